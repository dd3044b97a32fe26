"""What a row suggests to look at next. Each hint is a pure function of one row; thresholds only ever make a hint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from fulltilt.records import Trial, format_gib

DATA_WAIT_PCT = 20.0
UTILIZATION_PCT = 70.0
MEMORY_LOW_PCT, MEMORY_HIGH_PCT = 50.0, 85.0
PRESSURE_PCT = 10.0
STEAL_PCT = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
    rule: str
    trial_id: str
    text: str
    evidence: dict[str, Any]


def hint_data_wait(trial: Trial, memory_limit_gib: float | None) -> Hint | None:
    phases = trial.phases_ms
    if phases is None or phases.data_wait is None or not phases.step:
        return None
    share_pct = 100 * phases.data_wait / phases.step
    if share_pct <= DATA_WAIT_PCT:
        return None
    workers = trial.plan.get("num_workers")
    return Hint(
        rule="data-wait",
        trial_id=trial.id,
        text=(
            f"{share_pct:.0f} % of the step waits for data ({phases.data_wait:.2f} of {phases.step:.2f} ms with "
            f"num_workers {workers}): try more workers, cheaper transforms, or data that is already decoded"
        ),
        evidence={"data_wait_pct": share_pct, "data_wait_ms": phases.data_wait, "step_ms": phases.step},
    )


def hint_utilization(trial: Trial, memory_limit_gib: float | None) -> Hint | None:
    busy_pct = trial.gpu_utilization_pct
    if busy_pct is None or busy_pct >= UTILIZATION_PCT:
        return None
    return Hint(
        rule="utilization",
        trial_id=trial.id,
        text=(
            f"the GPU was busy {busy_pct:.0f} % of the time: a larger batch, compile, or more data workers may "
            f"fill it; above {UTILIZATION_PCT:.0f} % is usual for training"
        ),
        evidence={"gpu_utilization_pct": busy_pct},
    )


def hint_memory(trial: Trial, memory_limit_gib: float | None) -> Hint | None:
    """Only on a GPU: host memory left over is nothing to fill."""
    used_gib = trial.memory_reserved_peak_gib
    if used_gib is None or not memory_limit_gib:
        return None
    share_pct = 100 * used_gib / memory_limit_gib
    if MEMORY_LOW_PCT <= share_pct <= MEMORY_HIGH_PCT:
        return None
    advice = (
        "a larger batch or a larger model fits"
        if share_pct < MEMORY_LOW_PCT
        else "fragmentation or a longer batch may run out; a smaller batch leaves room"
    )
    return Hint(
        rule="memory",
        trial_id=trial.id,
        text=f"{format_gib(used_gib)} of {format_gib(memory_limit_gib)} used ({share_pct:.0f} %): {advice}",
        evidence={"memory_used_gib": used_gib, "memory_limit_gib": memory_limit_gib, "share_pct": share_pct},
    )


def hint_phases(trial: Trial, memory_limit_gib: float | None) -> Hint | None:
    """Phases that do not add up to the step."""
    if trial.status != "ok" or "phases_ms" not in trial.null_reasons:
        return None
    text = f"the phases of the step are not shown: {trial.null_reasons['phases_ms']}"
    return Hint(rule="phases", trial_id=trial.id, text=text, evidence={})


def hint_contention(trial: Trial, memory_limit_gib: float | None) -> Hint | None:
    """Other work on the machine, or data workers that take the step's cores."""
    pressure_pct, steal_pct = trial.cpu_pressure_pct, trial.steal_pct
    if (pressure_pct or 0.0) <= PRESSURE_PCT and (steal_pct or 0.0) <= STEAL_PCT:
        return None
    measured = [] if pressure_pct is None else [f"tasks waited for a core {pressure_pct:.0f} % of the time"]
    measured += [] if steal_pct is None else [f"the host took {steal_pct:.0f} % of the cores' time for others"]
    return Hint(
        rule="contention",
        trial_id=trial.id,
        text=(
            f"{', '.join(measured)}: data workers compete with the step, or other programs ran; figures vary more "
            "than usual"
        ),
        evidence={"cpu_pressure_pct": trial.cpu_pressure_pct, "steal_pct": trial.steal_pct},
    )


HINTS: tuple[Callable[[Trial, float | None], Hint | None], ...] = (
    hint_data_wait,
    hint_utilization,
    hint_memory,
    hint_phases,
    hint_contention,
)


def find_hints(trial: Trial, memory_limit_gib: float | None) -> tuple[Hint, ...]:
    """All hints for one row, usually the recommended one."""
    return tuple(hint for rule in HINTS if (hint := rule(trial, memory_limit_gib)) is not None)


def find_search_hints(rows: Sequence[Trial]) -> tuple[Hint, ...]:
    """Hints about the rows together: rows that ended in an error deserve a look before the picks are trusted."""
    broken = [row for row in rows if row.status in ("error", "timeout")]
    if not broken:
        return ()
    first = broken[0]
    return (
        Hint(
            rule="failed-rows",
            trial_id=first.id,
            text=f"{len(broken)} of {len(rows)} rows ended with error or timeout; {first.id}: {first.reason}",
            evidence={"n_failed": len(broken), "ids": [row.id for row in broken]},
        ),
    )
