"""The mount table of this process.

Source: proc_pid_mountinfo(5).
"""

import dataclasses
import re

from fulltilt.hardware._files import Root, read_text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of the mount table."""

    point: str
    root: str  # the part of the file system that is mounted here
    type: str
    options: str  # of the file system: "rw,memory"


def read_mounts(root: Root = "/") -> tuple[Mount, ...]:
    """Read all mounts in the order they were made: a later one covers an earlier one on the same point."""
    lines = (read_text(root, "/proc/self/mountinfo") or "").splitlines()
    return tuple(mount for line in lines if (mount := _parse_mount(line)) is not None)


def _parse_mount(line: str) -> Mount | None:
    before, _, after = line.partition(" - ")
    left, right = before.split(), after.split()
    if len(left) < 5 or len(right) < 2:
        return None
    return Mount(point=_unescape(left[4]), root=_unescape(left[3]), type=right[0], options="".join(right[2:3]))


def _unescape(text: str) -> str:
    """Decode blanks and backslashes, which come as octal: ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
