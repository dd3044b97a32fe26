"""The name a tracking system gave a run, kept in the run's folder so that a resumed run goes on under it."""

from __future__ import annotations

from pathlib import Path

from fulltilt.records.run_folder import write_atomic

FILE = "run_id"


def read_run_id(folder: Path, *, first_step: int) -> str | None:
    """That of the run that is resumed; None for a run that starts at its first step."""
    path = folder / FILE
    if not first_step or not path.exists():
        return None
    return path.read_text(encoding="utf-8").strip() or None


def write_run_id(folder: Path, run_id: str) -> None:
    write_atomic(folder / FILE, f"{run_id}\n")
