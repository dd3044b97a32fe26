"""The mark of advice that rests on rows measured while tasks waited for a core."""

from __future__ import annotations

from fulltilt.records import Trial
from fulltilt.report import BUSY_MARK


def say_busy(*rows: Trial) -> str:
    """The end of a sentence on these rows; empty where none is of a busy machine.

    On a quiet machine the step may be bound by another part, and a lever may gain where it lost.
    """
    return f" {BUSY_MARK}" if any(row.is_busy for row in rows) else ""
