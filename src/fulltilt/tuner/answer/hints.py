"""What a row suggests to look at next. Thresholds decide only whether a hint is given."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fulltilt.records import Trial, format_gib
from fulltilt.report.advice import HINTS

DATA_WAIT_PCT = 20.0
UTILIZATION_PCT = 70.0
MEMORY_LOW_PCT, MEMORY_HIGH_PCT = 50.0, 85.0
PRESSURE_PCT = 10.0
STEAL_PCT = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
    """A sentence about one row, with the figures that it rests on."""

    rule: str
    trial_id: str
    text: str
    evidence: dict[str, Any]


def find_hints(trial: Trial, memory_limit_gib: float | None) -> tuple[Hint, ...]:
    """Find all hints for one row, usually the recommended one."""
    return tuple(_build_hint(trial, *judged) for judged in _judge(trial, memory_limit_gib))


def _build_hint(trial: Trial, rule: str, evidence: dict[str, Any], words: Mapping[str, Any]) -> Hint:
    return Hint(rule=rule, trial_id=trial.id, text=HINTS[rule].format(**evidence, **words), evidence=evidence)


def _judge(trial: Trial, memory_limit_gib: float | None) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (rule, its evidence, other words of its sentence)."""
    phases = trial.phases_ms
    if phases is not None and phases.data_wait is not None and phases.step:
        share_pct = 100 * phases.data_wait / phases.step
        if share_pct > DATA_WAIT_PCT:
            evidence = {"data_wait_pct": share_pct, "data_wait_ms": phases.data_wait, "step_ms": phases.step}
            yield "data-wait", evidence, {"num_workers": trial.plan.get("num_workers")}
    gpu_pct = trial.gpu_utilization_pct
    if gpu_pct is not None and gpu_pct < UTILIZATION_PCT:
        yield "utilization", {"gpu_utilization_pct": gpu_pct}, {"least_pct": UTILIZATION_PCT}
    used_gib = trial.memory_reserved_peak_gib  # of a GPU alone: host memory that is left over is nothing to fill
    if used_gib is not None and memory_limit_gib:
        share_pct = 100 * used_gib / memory_limit_gib
        if not MEMORY_LOW_PCT <= share_pct <= MEMORY_HIGH_PCT:
            evidence = {"memory_used_gib": used_gib, "memory_limit_gib": memory_limit_gib, "share_pct": share_pct}
            advice = "fragmentation or a longer batch may run out; a smaller batch leaves room"
            if share_pct < MEMORY_LOW_PCT:
                advice = "a larger batch or a larger model fits"
            words = {"used": format_gib(used_gib), "limit": format_gib(memory_limit_gib), "advice": advice}
            yield "memory", evidence, words
    if trial.status == "ok" and "phases_ms" in trial.null_reasons:
        yield "phases", {}, {"reason": trial.null_reasons["phases_ms"]}
    pressure_pct, steal_pct = trial.cpu_pressure_pct, trial.steal_pct
    if (pressure_pct or 0.0) > PRESSURE_PCT or (steal_pct or 0.0) > STEAL_PCT:
        measured = [] if pressure_pct is None else [f"tasks waited for a core {pressure_pct:.0f} % of the time"]
        measured += [] if steal_pct is None else [f"the host took {steal_pct:.0f} % of the cores' time for others"]
        evidence = {"cpu_pressure_pct": pressure_pct, "steal_pct": steal_pct}
        yield "contention", evidence, {"measured": ", ".join(measured)}


def find_search_hints(rows: Sequence[Trial]) -> tuple[Hint, ...]:
    """Find hints about the rows together: rows that ended in an error deserve a look before the picks are trusted."""
    broken = [row for row in rows if row.status in ("error", "timeout")]
    if not broken:
        return ()
    first, evidence = broken[0], {"n_failed": len(broken), "ids": [row.id for row in broken]}
    words = {"n_rows": len(rows), "id": first.id, "reason": first.reason}
    return (_build_hint(first, "failed-rows", evidence, words),)
