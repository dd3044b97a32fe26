"""How SIGTERM and SIGHUP end a command: as Ctrl-C does, by unwinding."""

import signal
from typing import NoReturn


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived: unwinds like KeyboardInterrupt, so that every ``finally`` runs."""


def unwind_on_signals() -> None:
    """Let SIGTERM, and SIGHUP unless it is ignored, raise ``Terminated`` in the main thread."""
    signal.signal(signal.SIGTERM, _raise_terminated)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a terminal that closes; nohup ignores it
        signal.signal(signal.SIGHUP, _raise_terminated)


def _raise_terminated(number: int, frame: object) -> NoReturn:
    raise Terminated
