"""Ctrl-C, SIGTERM and a closed terminal as a request: trainings may save first; a second one ends them at once."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 0.1  # timeout(1) signals the process and then its group: one wish, told twice


class StopRequest:
    """What the loop of the lab asks at every turn.

    Attributes:
        number: The signal that came; None before.
        is_urgent: Another one came after it.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_urgent = False
        self._came_s = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._came_s = number, time.monotonic()
        elif time.monotonic() - self._came_s >= ECHO_S:
            self.is_urgent = True

    def deliver(self) -> None:
        """Let the signal take its course, under the handlers that are there by now."""
        if self.number is not None:
            signal.raise_signal(self.number)


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Collect signals for the length of the block; one that is ignored (nohup, a background job) stays ignored."""
    stop = StopRequest()
    old = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in old:
        signal.signal(number, stop)
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
