"""Runs a command with the observer inside every Python process that it starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fulltilt.errors import UsageError

SITE = Path(__file__).parent / "inside" / "site"


def run_watched(command: Sequence[str], *, folder: Path, proves: bool, stdout_to_stderr: bool = False) -> int:
    """Run ``command`` to its end and return its exit code, 128 + n where signal n ended it.

    Args:
        folder: Where the observer writes what it sees, one file a process.
        proves: Whether writes of files may be held back for some steps, to measure what they cost.
        stdout_to_stderr: Keep our own standard output free of what the command prints.

    Raises:
        UsageError: there is no such program.
    """
    session = {"folder": str(folder), "proves": proves}
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "FULLTILT_ATTACH": json.dumps(session), "PYTHONPATH": os.pathsep.join(paths)}
    try:
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr if stdout_to_stderr else None)
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be started ({error.strerror}); name a program, as python train.py"
        ) from None
    with _pass_on_signals(process):
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _pass_on_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C reaches the command by itself; SIGTERM and SIGHUP are handed on. We outlive it to tell what was seen."""
    handlers = {
        signal.SIGINT: lambda number, frame: None,
        signal.SIGTERM: lambda number, frame: process.send_signal(number),
        signal.SIGHUP: lambda number, frame: process.send_signal(number),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
