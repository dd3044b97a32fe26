"""Read small kernel files below a root folder, so that recorded trees can stand in for the machine."""

from pathlib import Path

Root = str | Path


def read_text(root: Root, path: str) -> str | None:
    """Read ``path`` below ``root``; ``None`` when it is absent, unreadable or of a process that ended."""
    try:
        return (Path(root) / path.lstrip("/")).read_bytes().decode(errors="replace")
    except OSError:
        return None


def parse_table(text: str) -> dict[str, int]:
    """Parse lines ``name value`` or ``name: value kB`` to integers; other lines are left out."""
    table = {}
    for line in text.splitlines():
        parts = line.replace(":", " ", 1).split()
        if len(parts) >= 2 and parts[1].lstrip("-").isdigit():
            table[parts[0]] = int(parts[1])
    return table
