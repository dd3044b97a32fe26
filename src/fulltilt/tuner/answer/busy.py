"""Which rows that advice rests on were measured while tasks waited for a core."""

from __future__ import annotations

from fulltilt.records import Trial


def list_busy(*rows: Trial) -> tuple[str, ...]:
    """Ids of those of a busy machine: on a quiet one another part may bound the step, a lever gain where it lost."""
    return tuple(row.id for row in rows if row.is_busy)
