"""Holds logging intervals back for up to a second, to store them together.

Steps of a millisecond end a hundred intervals a second, and a write to a busy disk takes as long as a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from fulltilt.records import Event, StepsDone

HOLD_S = 1.0


class HeldEvents:
    """Collects events until they are due: at any event but ``StepsDone``, and a second after the last time.

    A killed process loses what is held: less than a second of intervals, and none of steps that take longer. What a
    checkpoint counts on was stored before it was written, see ``CheckpointStarted``.

    Args:
        clock: Seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._events: list[Event] = []
        self._taken_s = -math.inf

    def add(self, event: Event) -> list[Event]:
        """Take an event in; return all that have to be stored now, oldest first."""
        self._events.append(event)
        if isinstance(event, StepsDone) and self._clock() - self._taken_s < HOLD_S:
            return []
        due, self._events, self._taken_s = self._events, [], self._clock()
        return due
