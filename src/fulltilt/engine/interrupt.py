"""Ctrl-C and SIGTERM as a request: the loop finishes its step and saves, then the signal takes its course."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 0.1  # timeout(1) signals the process and then its group: one wish, told twice


class Stop(Protocol):
    """What the loop asks between steps: true when it has to leave."""

    def __bool__(self) -> bool: ...


class StopRequest:
    """Becomes true once a signal came. A later signal takes its course at once, unless it is an echo of the first.

    ``deliver`` raises the signal again for the handler that was there before: KeyboardInterrupt for Ctrl-C, for
    SIGTERM whatever the program set up, else death by SIGTERM (a shell reads 143).
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._came_s = 0.0
        self._owner = os.getpid()
        self._old: dict[int, signal.Handlers | object] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def deliver(self) -> None:
        """Let the signal that was held back take its course; call it after ``catch_signals`` has ended."""
        if self.signal_number is not None:
            signal.raise_signal(self.signal_number)

    def install(self) -> None:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            # Ignored since the start (nohup, a background job): stays ignored. None: not a Python handler, and
            # signal.signal could not put it back.
            if handler is not None and handler is not signal.SIG_IGN:
                self._old[number] = handler
                signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._old = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A forked process inherits the handler. Ctrl-C reaches it too, but the step in progress may still need it;
            # data workers have a handler of their own (data/loading/worker_signals.py).
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        elif self.signal_number is None:
            self.signal_number, self._came_s = number, time.monotonic()
        elif time.monotonic() - self._came_s >= ECHO_S:
            self.restore()
            signal.raise_signal(number)


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a ``StopRequest`` for the length of the block, then restore the old handlers.

    Outside the main thread Python lets nobody handle signals: the request then stays empty.
    """
    stop = StopRequest()
    if threading.current_thread() is threading.main_thread():
        stop.install()
    try:
        yield stop
    finally:
        stop.restore()
