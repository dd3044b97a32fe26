"""Run a command and observe the training steps of every Python process that it starts (``inside/``)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.hardware.proctree import build_death_wish

SITE = Path(__file__).parent / "inside" / "site"


def run_watched(command: Sequence[str], *, folder: Path, proves: bool, stdout_to_stderr: bool = False) -> int:
    """Run ``command`` and return its exit code; 128 + n if signal n ended it.

    Args:
        folder: Folder for the observer's reports, one file a process.
        proves: Whether file writes may be held back in some steps, to measure their cost.
        stdout_to_stderr: Send the command's standard output to stderr.

    Raises:
        UsageError: the program does not exist.
    """
    session = {"folder": str(folder), "proves": proves}
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "FULLTILT_ATTACH": json.dumps(session), "PYTHONPATH": os.pathsep.join(paths)}
    wish = build_death_wish(os.getpid(), signal.SIGTERM) if sys.platform == "linux" else None  # no run goes on unseen
    output = sys.stderr if stdout_to_stderr else None
    try:
        process = subprocess.Popen(command, env=environment, stdout=output, preexec_fn=wish)
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be started ({error.strerror}); name a program, as python train.py"
        ) from None
    with _pass_on_signals(process):
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _pass_on_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward SIGTERM and SIGHUP to the command (Ctrl-C reaches it by itself) and outlive it to report."""
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
