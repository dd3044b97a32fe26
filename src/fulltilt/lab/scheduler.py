"""Choose which queued experiments start next, and on which slot. Pure functions of records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from fulltilt.lab.records import Experiment

Slot = TypeVar("Slot")


def plan_starts(queued: Iterable[Experiment], free: Sequence[Slot]) -> list[tuple[Experiment, Slot]]:
    """Pair experiments (oldest first) with free slots: highest priority first, then the oldest."""
    waiting = sorted(queued, key=lambda experiment: -experiment.priority)  # a stable sort: age decides ties
    return list(zip(waiting, free, strict=False))
