"""The mount table of this process.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import dataclasses
import re

from fulltilt.hardware._files import Root, read_text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    point: str
    root: str  # the part of the file system that is mounted here
    type: str
    source: str
    super_options: str


def read_mounts(root: Root = "/") -> tuple[Mount, ...]:
    """All mounts in the order they were made: of two on one point, the later one covers the earlier."""
    return tuple(
        mount
        for line in (read_text(root, "/proc/self/mountinfo") or "").splitlines()
        if (mount := _parse_mount(line)) is not None
    )


def _parse_mount(line: str) -> Mount | None:
    before, separator, after = line.partition(" - ")
    left, right = before.split(), after.split()
    if not separator or len(left) < 5 or len(right) < 2:
        return None
    return Mount(
        root=_unescape(left[3]),
        point=_unescape(left[4]),
        type=right[0],
        source=_unescape(right[1]),
        super_options=right[2] if len(right) > 2 else "",
    )


def _unescape(text: str) -> str:
    """Blanks and backslashes come as octal: ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
