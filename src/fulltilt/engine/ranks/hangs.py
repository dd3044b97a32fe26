"""Find the rank that hangs, by the progress marks of all ranks: a state machine without a clock."""

from collections.abc import Sequence
from typing import NamedTuple

from fulltilt.engine.ranks.process import PHASES, Mark


class Sight(NamedTuple):
    """Holds the progress mark of a rank at one moment, and whether a signal had stopped it."""

    mark: Mark
    is_stopped: bool = False  # by a signal


class Standstill(NamedTuple):
    """Says since when a rank has held up the others without making progress."""

    count: int
    since_s: float


def is_starting(sights: Sequence[Sight]) -> bool:
    """Return whether any rank has yet to end its first step."""
    return min(sight.mark.count for sight in sights) <= len(PHASES)


def advance(before: Sequence[Standstill], sights: Sequence[Sight], now_s: float) -> list[Standstill]:
    """Return the state of each rank after a look: its standstill goes on, or begins at ``now_s``.

    It goes on where the rank has not moved and holds up the others: a signal stopped it; or no rank works alone, and it
    is behind another one or does not wait while another one does. A rank sets a mark when it has built its model
    (``World.arrive``), and is ahead of those that have not.
    """
    marks = [sight.mark for sight in sights]
    counts = [mark.count for mark in marks]
    # Until the last one has taken its first step, the others may be waiting for that one only.
    enough = min(min(counts) + 1, max(counts)) if is_starting(sights) else max(counts)
    is_alone, is_awaited = any(mark.is_alone for mark in marks), any(mark.is_waiting for mark in marks)
    after = []
    for standstill, (mark, is_stopped) in zip(before, sights, strict=True):
        is_late = mark.count < enough or (is_awaited and not mark.is_waiting)
        goes_on = mark.count == standstill.count and (is_stopped or (is_late and not is_alone))
        after.append(standstill if goes_on else Standstill(mark.count, now_s))
    return after
