"""Decide which of the waiting samples the model answers together. Pure: no thread, no clock."""

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from fulltilt.infer.manifest import Policy

LOOK_AHEAD = 512  # samples from the oldest on that a decision looks at: it must not take longer than the model


class HasLength(Protocol):
    @property
    def length(self) -> int: ...


def choose_batch(waiting: Sequence[HasLength], policy: Policy) -> list[int]:
    """Choose a batch from waiting samples → their places in line, the oldest always among them.

    Those nearest in length join it, while samples times the longest length stay within the policy's limits.
    """
    if policy.max_batch == 1:
        return [0]
    most, lengths = policy.max_tokens or math.inf, [each.length for each in itertools.islice(waiting, LOOK_AHEAD)]
    longest, chosen = lengths[0], [0]
    for place in sorted(range(1, len(lengths)), key=lambda place: abs(lengths[place] - lengths[0])):
        n_samples = len(chosen) + 1
        if n_samples > policy.max_batch or n_samples * longest > most:
            break
        if n_samples * (longer := max(longest, lengths[place])) <= most:
            chosen.append(place)
            longest = longer
    return chosen
