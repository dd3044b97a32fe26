"""Say whose lease has run out, by a clock that people and time servers cannot set. Pure, apart from its own state.

A lease is renewed for a full ``ttl_s``. Its runner stops itself earlier (``runner.guard``), so when it runs out here
the old process is dead. After a start of the server, and after a pause of its loop, every lease gets a full term: what
could not be heard is no sign of death.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable

from fulltilt.lab.records import Attempt

STALE_S = 30.0  # without a renewal: shown, and nothing else
ENDING_PART = 0.8  # of the term: the runner begins to end its training
GRACE_PART = 0.15  # of the term at most: between SIGTERM and SIGKILL
STALL_PART = 0.25  # of the term: a loop that was away for so long has heard nobody


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """How long a lease lasts, and how long a training has to save at its end. What is left is for a late signal."""

    ttl_s: float = 600.0
    grace_s: float = 90.0

    def __post_init__(self) -> None:
        if not 0 < self.grace_s <= GRACE_PART * self.ttl_s:
            raise ValueError(f"grace_s {self.grace_s:g} must be above 0 and at most {GRACE_PART:g} of {self.ttl_s:g} s")


class Leases:
    """Holds when each live attempt was last heard of. All threads of a server use it."""

    def __init__(self, term: Term, clock: Callable[[], float]):
        self._term, self._clock, self._turn = term, clock, threading.Lock()
        self._heard_s: dict[Attempt, float] = {}
        self._turned_s = clock()

    def renew(self, attempt: Attempt) -> None:
        with self._turn:
            self._heard_s[attempt] = self._clock()

    def forget(self, attempt: Attempt) -> None:
        with self._turn:
            self._heard_s.pop(attempt, None)

    def list_stale(self) -> set[Attempt]:
        return set(self._list_silent(STALE_S))

    def turn(self, live: Iterable[Attempt]) -> list[Attempt]:
        """Take note of a turn of the server's loop → the live attempts whose lease has run out."""
        with self._turn:
            now_s = self._clock()
            if now_s - self._turned_s > STALL_PART * self._term.ttl_s:
                self._heard_s = {}
            self._turned_s = now_s
            self._heard_s = {attempt: self._heard_s.get(attempt, now_s) for attempt in live}
        return self._list_silent(self._term.ttl_s)

    def _list_silent(self, seconds: float) -> list[Attempt]:
        with self._turn:
            now_s = self._clock()
            return [attempt for attempt, heard_s in self._heard_s.items() if now_s - heard_s > seconds]
