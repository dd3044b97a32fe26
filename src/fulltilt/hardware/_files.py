"""Reading small kernel files below a root folder, so that recorded trees can stand in for the machine."""

from __future__ import annotations

from pathlib import Path

Root = str | Path


def read_text(root: Root, path: str) -> str | None:
    """The text of ``path`` below ``root``; ``None`` when it is absent, unreadable or of a process that ended."""
    try:
        return (Path(root) / path.lstrip("/")).read_bytes().decode(errors="replace")
    except OSError:
        return None


def parse_table(text: str) -> dict[str, int]:
    """``name value`` or ``name: value kB`` lines to integers; lines of another shape are left out."""
    table = {}
    for line in text.splitlines():
        parts = line.replace(":", " ", 1).split()
        if len(parts) >= 2 and parts[1].lstrip("-").isdigit():
            table[parts[0]] = int(parts[1])
    return table
