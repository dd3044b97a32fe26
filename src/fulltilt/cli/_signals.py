"""Turn SIGTERM and SIGHUP into an exception, so that commands clean up as after Ctrl-C."""

import signal
from typing import NoReturn


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived: unwinds like KeyboardInterrupt, so that every ``finally`` runs."""


def unwind_on_signals() -> None:
    """Install handlers for SIGTERM and, unless ignored or handled already, SIGHUP that raise ``Terminated``."""
    signal.signal(signal.SIGTERM, _raise_terminated)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a terminal that closes; nohup ignores it
        signal.signal(signal.SIGHUP, _raise_terminated)


def _raise_terminated(number: int, frame: object) -> NoReturn:
    raise Terminated
