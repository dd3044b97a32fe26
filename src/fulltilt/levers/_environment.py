"""Variables that libraries read once, when torch loads them: set before that, and read back as they were then."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_set_here: dict[str, str] = {}


def set_before_torch(variables: Mapping[str, str]) -> None:
    """Set variables of this process, and so of those it starts; where torch is loaded already, it does nothing."""
    if "torch" not in sys.modules:
        os.environ.update(variables)
        _set_here.update(variables)


def read_at_load(name: str) -> str | None:
    """Read a variable as torch's libraries found it; what a user's own code set before them is not seen.

    A process that was forked has the start of the one it came from, and its libraries.
    """
    if name in _set_here:
        return _set_here[name]
    try:
        started = Path("/proc/self/environ").read_bytes()  # as it was at the start: ``os.environ`` changes it nowhere
    except OSError:  # no Linux
        return os.environ.get(name)
    pairs = (os.fsdecode(pair).partition("=") for pair in started.split(b"\0"))
    return next((value for found, _, value in pairs if found == name), None)
