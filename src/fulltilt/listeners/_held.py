"""Logging intervals that are held back for up to a second and stored together.

Steps of a millisecond end a hundred intervals a second, and a write to a busy disk takes as long as a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from fulltilt.records import Event, StepsDone

HOLD_S = 1.0


class HeldEvents:
    """Events that wait. ``add`` says when to ``take`` and store them.

    That is at any event but ``StepsDone``, and a second after the last time. A killed process loses what it holds: the
    intervals since the last time, less than a second of them; those of steps that take longer are never held. What a
    checkpoint counts on was stored before it was written, see ``CheckpointStarted``.

    Args:
        clock: Seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._events: list[Event] = []
        self._taken_s = -math.inf

    def add(self, event: Event) -> bool:
        """Take an event in; true when what is held has to be stored now."""
        self._events.append(event)
        return not isinstance(event, StepsDone) or self._clock() - self._taken_s >= HOLD_S

    def take(self) -> list[Event]:
        """Hand over what is held, oldest first."""
        events, self._events = self._events, []
        self._taken_s = self._clock()
        return events
