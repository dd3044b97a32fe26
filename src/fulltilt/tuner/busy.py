"""What every figure of advice says where it was measured while tasks waited for a core."""

from __future__ import annotations

from fulltilt.records import Trial


def say_busy(*rows: Trial) -> str:
    """The end of a sentence on these rows; empty where none is of a busy machine.

    On a quiet machine the step may be bound by another part, and a lever may gain where it lost.
    """
    busy = [row for row in rows if row.is_busy]
    if not busy:
        return ""
    waits = ", ".join(f"{row.id} {row.cpu_pressure_pct:.0f} %" for row in busy)
    return f"; a busy machine's figure (some task waited for a core: {waits} of the time)"
