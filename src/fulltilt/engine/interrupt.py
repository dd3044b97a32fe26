"""Treat Ctrl-C and SIGTERM as a request to stop.

The loop ends its step and saves; then the signal is raised again.

Python's own handlers wait until the main thread leaves the operator it is in, which may take minutes. So a thread,
woken from C, says that the signal was heard, and ends the process at the third one where the second one still waits.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Protocol

# timeout(1) signals the process and then its group: one wish, told twice. Who ends a process that is late says more.
ECHO_S = float(os.environ.get("FULLTILT_ECHO_S", "0.1"))
SAID = "ending after this step, with a checkpoint; a second signal ends at once, a third one inside an operator too"
_END = b"\0"  # no signal has this number
_answering: list[int] = []  # the end of a pipe that signals are written to


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
        self._caught: frozenset[int] = frozenset()

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
        self._caught = frozenset(self._old)

    def answer(self, pipe: int, said: str) -> None:
        """Answer signals whose numbers come from a pipe, until one is ``_END``; for a thread of its own."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._caught)  # where the main thread blocks one, it is to wait
        n_came, came_s = 0, -math.inf
        while True:
            for number in os.read(pipe, 64):
                now_s = time.monotonic()
                if number == _END[0]:
                    return
                if number not in self._caught or now_s - came_s < ECHO_S:
                    continue
                n_came, came_s = n_came + 1, now_s
                if n_came == 1:
                    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it
                        print("\n" * sys.stderr.isatty() + said, file=sys.stderr, flush=True)  # below a bar and the ^C
                elif n_came > 2 and not self.is_urgent:
                    os._exit(128 + number)

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
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    *,
    is_patient: bool = False,
    said: str | None = None,
) -> Iterator[StopRequest]:
    """Turn ``signals`` into a ``StopRequest`` for the length of the block, then restore the old handlers.

    Outside the main thread Python lets nobody handle signals: the request then stays empty.

    Args:
        is_patient: A later signal only sets ``is_urgent``, instead of being raised at once.
        said: Written to standard error at once when the first signal comes; None: nothing, and no thread is started.
    """
    stop = StopRequest(is_patient=is_patient)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        stop.install(signals)
    try:
        with contextlib.nullcontext() if said is None or not is_main else _answer_at_once(stop, said):
            yield stop
    finally:
        stop.restore()


@contextlib.contextmanager
def _answer_at_once(stop: StopRequest, said: str) -> Iterator[None]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # an event loop's, which needs it
        signal.set_wakeup_fd(before)
    _answering.append(writer)
    thread = threading.Thread(target=stop.answer, args=(reader, said), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _answering.remove(writer)
        if before == -1:
            signal.set_wakeup_fd(-1)
        os.write(writer, _END)
        thread.join()
        os.close(reader)
        os.close(writer)


def _leave_signals() -> None:
    """Keep signals of a forked process out of the pipe that it has inherited."""
    if _answering:
        with contextlib.suppress(ValueError):  # a thread has forked
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_signals)
