"""Treat Ctrl-C, SIGTERM and SIGHUP as a request to stop: trainings save first, a second signal kills them."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 0.1  # timeout(1) signals the process and then its group: one wish, told twice


class StopRequest:
    """Whether a stop was requested; the queue's loop reads it at every iteration.

    Attributes:
        number: The signal that arrived; None: none yet.
        is_urgent: A second signal arrived.
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
        """Raise the collected signal again, now that the original handlers are back."""
        if self.number is not None:
            signal.raise_signal(self.number)


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Collect stop signals within the block; those already ignored (nohup, background jobs) stay ignored."""
    stop = StopRequest()
    old = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in old:
        signal.signal(number, stop)
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
