"""Treat Ctrl-C and SIGTERM as a request to stop: the loop ends its step and saves; then the signal is raised again."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Protocol

ECHO_S = 0.1  # timeout(1) signals the process and then its group: one wish, told twice


class Stop(Protocol):
    """What the loop asks between steps: true when it has to leave."""

    def __bool__(self) -> bool: ...


class StopRequest:
    """Becomes true once a signal came. A later signal is raised at once, unless it is an echo of the first.

    ``deliver`` raises the signal again for the handler that was there before: KeyboardInterrupt for Ctrl-C, for
    SIGTERM whatever the program set up, else death by SIGTERM (a shell reads 143).

    Attributes:
        is_urgent: A later signal arrived too; with ``is_patient`` that is all it does.
    """

    def __init__(self, *, is_patient: bool = False) -> None:
        self.signal_number: int | None = None
        self.is_urgent = False
        self._is_patient = is_patient
        self._came_s = 0.0
        self._owner = os.getpid()
        self._old: dict[int, signal.Handlers | object] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def deliver(self) -> None:
        """Let the signal that was held back take its course; call it after ``catch_signals`` has ended."""
        if self.signal_number is not None:
            signal.raise_signal(self.signal_number)

    def install(self, signals: Sequence[signal.Signals]) -> None:
        for number in signals:
            handler = signal.getsignal(number)
            # Ignored since the start (nohup, a background job): stays ignored. None: not a Python handler, and
            # signal.signal could not put it back.
            if handler not in (None, signal.SIG_IGN):
                self._old[number] = signal.signal(number, self._handle)

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
            self.is_urgent = True
            if not self._is_patient:
                self.restore()
                signal.raise_signal(number)


@contextlib.contextmanager
def catch_signals(
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM), *, is_patient: bool = False
) -> Iterator[StopRequest]:
    """Turn ``signals`` into a ``StopRequest`` for the length of the block, then restore the old handlers.

    Outside the main thread Python lets nobody handle signals: the request then stays empty.

    Args:
        is_patient: A later signal only sets ``is_urgent``, instead of being raised at once.
    """
    stop = StopRequest(is_patient=is_patient)
    if threading.current_thread() is threading.main_thread():
        stop.install(signals)
    try:
        yield stop
    finally:
        stop.restore()
