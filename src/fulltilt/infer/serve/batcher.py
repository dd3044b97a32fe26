"""Decide which of the waiting samples the model answers together. Pure: no thread, no clock."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from fulltilt.infer.joining import Sample
from fulltilt.infer.manifest import Policy

LOOK_AHEAD = 512  # samples from the oldest on that a decision looks at: it must not take longer than the model


class HasLength(Protocol):
    @property
    def length(self) -> int: ...


def choose_batch(waiting: Sequence[HasLength], policy: Policy) -> list[int]:
    """Choose a batch from waiting samples → their places in line, the oldest always among them.

    Those nearest in length join it, while samples times the longest padded length stay within the policy's limits.
    """
    oldest = waiting[0].length
    longest, chosen = _pad(oldest, policy), [0]
    if policy.max_batch == 1:
        return chosen
    others = range(1, min(len(waiting), LOOK_AHEAD))
    for place in sorted(others, key=lambda place: abs(waiting[place].length - oldest)):
        n_samples = len(chosen) + 1
        if n_samples > policy.max_batch or not _fits(n_samples, longest, policy):
            break
        if _fits(n_samples, padded := max(longest, _pad(waiting[place].length, policy)), policy):
            chosen.append(place)
            longest = padded
    return chosen


def _pad(length: int, policy: Policy) -> int:
    return -(-length // policy.length_multiple) * policy.length_multiple


def _fits(n_samples: int, longest: int, policy: Policy) -> bool:
    return policy.max_tokens is None or n_samples * longest <= policy.max_tokens


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """A sample in line, and what becomes of it.

    Attributes:
        answer: A future of the application's loop, shared by all who wait for this sample.
        key: Of the cache; None: it is not cached.
        n_waiters: Requests that want it; nobody answers what none wants.
        began_s: When the model took it; None: it waits.
    """

    sample: Sample
    length: int
    answer: Any
    key: bytes | None = None
    n_waiters: int = 1
    deadline_s: float = math.inf
    began_s: float | None = None


class FullError(Exception):
    """The line has no room for a request's samples."""


class Line:
    """The samples that wait, oldest first. It is not safe for several threads: the crew holds its lock around it.

    Attributes:
        policy: Its ``max_batch`` falls when memory runs out, and stays there.
    """

    def __init__(self, policy: Policy, *, capacity: int):
        self.policy, self.capacity = policy, capacity
        self._waiting: dict[Entry, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, entries: Collection[Entry]) -> None:
        """Put all entries in line, or none.

        Raises:
            FullError: there is not enough room.
        """
        if len(self._waiting) + len(entries) > self.capacity:
            raise FullError
        self._waiting.update(dict.fromkeys(entries))

    def drop(self, entry: Entry) -> bool:
        """Take out an entry that nobody wants any more → whether it still waited."""
        return self._waiting.pop(entry, False) is None

    def take(self, now_s: float) -> tuple[list[Entry], list[Entry]]:
        """Take the next batch out of line, and those whose deadline has passed; either may be empty."""
        late = [entry for entry in self._waiting if entry.deadline_s < now_s]
        self._remove(late)
        if not self._waiting:
            return [], late
        waiting = list(self._waiting)
        batch = [waiting[place] for place in choose_batch(waiting, self.policy)]
        self._remove(batch)
        for entry in batch:
            entry.began_s = now_s
        return batch, late

    def back_off(self, n_samples: int) -> bool:
        """Halve the largest batch, after one of ``n_samples`` ran out of memory → whether that changed it."""
        smaller = max(1, n_samples // 2)
        if smaller >= self.policy.max_batch:
            return False
        self.policy = dataclasses.replace(self.policy, max_batch=smaller)
        return True

    def _remove(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            del self._waiting[entry]
