"""Build rows of the table from what a process measured and how it ended."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

from fulltilt.records import IN_TURNS, Figures, Measurement, PhasesMs, Plan, Status, Trial, classify_outcome, format_gib
from fulltilt.records.trial import TurnsWay
from fulltilt.stats import Turns
from fulltilt.tuner.trials.process import ProcessOutcome

NULLABLE = (
    "phases_ms", "samples_per_s", "samples_per_s_ci95", "receive_ms", "gpu_utilization_pct",
    "memory_allocated_peak_gib", "memory_reserved_peak_gib", "memory_rss_peak_gib", "memory_peak_part",
    "first_step_s", "flops_per_sample", "flops_coverage_pct", "cpu_pressure_pct", "steal_pct",
)  # fmt: skip
"""Figures of a trial that may be null; each null then has an entry in ``null_reasons``."""
IN_TURNS_ALONE = "plans that take turns are measured for their speed alone; the plan's whole run has the other figures"
WHY_NULL = {"ok": "the trial did not report it", "skipped": "not run"}


def build_trial(
    plan: Plan,
    outcome: ProcessOutcome,
    *,
    id: str,
    why: str,
    kind: str = "end_to_end",
    n_devices: int = 1,
    memory_limit_bytes: int | None = None,
) -> Trial:
    """Build the row that a process' end becomes.

    A trial that ended well though its peak lay above the limit is out of memory: between two looks of the watchdog,
    and in the room that the limit leaves for stacks, a run can pass unseen.
    """
    status, reason = classify_outcome(outcome.evidence)
    measurement = outcome.measurement
    if status == "ok":
        status, reason = judge(measurement, kind, memory_limit_bytes)
    if status != "ok":
        first_line = (reason or status).strip().splitlines()[0]
        reason = f"{first_line} (log: {outcome.log_path})"
    return build_row(
        plan, id=id, why=why, kind=kind, status=status, reason=reason, measurement=measurement,
        seconds=outcome.seconds, n_devices=n_devices,
    )  # fmt: skip


def build_turns_row(plan: Plan, turns: Turns, *, id: str, why: str, seconds: float, n_devices: int = 1) -> Trial:
    """Build the row of a plan that took turns with others: its speed, and nothing else."""
    measurement = Measurement(
        samples_per_s=turns.samples_per_s,
        n_warmup_steps=0,
        null_reasons={name: IN_TURNS_ALONE for name in NULLABLE if name != "samples_per_s"},
    )
    row = build_row(
        plan, id=id, why=why, kind=IN_TURNS, status="ok", reason=None, measurement=measurement, seconds=seconds,
        n_devices=n_devices,
    )  # fmt: skip
    return dataclasses.replace(row, stalled_pct=turns.stalled_pct, turns=cast(TurnsWay, turns.way))


def build_row(
    plan: Plan,
    *,
    id: str,
    why: str,
    status: Any,
    reason: str | None,
    kind: str = "end_to_end",
    measurement: Measurement | None = None,
    seconds: float = 0.0,
    n_devices: int = 1,
) -> Trial:
    """Build a trial with its null reasons; figures of ``measurement`` join when the status is ok."""
    figures: dict[str, Any] = {}
    reasons: Mapping[str, str] = {}
    if status == "ok" and measurement is not None:
        names = {field.name for field in dataclasses.fields(Figures)} - {"null_reasons"}
        figures = {name: getattr(measurement, name) for name in names}
        if not all(map(math.isfinite, measurement.samples_per_s_ci95 or ())):
            figures["samples_per_s_ci95"] = None
        reasons = measurement.null_reasons
    return Trial(
        id=id,
        plan=plan,
        status=status,
        reason=reason,
        why=why,
        kind=kind,
        n_devices=n_devices,
        batch_size_per_device=-(-plan["batch_size"] // n_devices),
        effective_batch_size=plan.effective_batch_size,
        seconds=seconds,
        null_reasons=_complete_reasons(
            figures, reasons, default=WHY_NULL.get(status, f"the trial ended with {status}")
        ),
        **figures,
    )


def _complete_reasons(figures: Mapping[str, Any], given: Mapping[str, str], default: str) -> dict[str, str]:
    reasons = dict.fromkeys((name for name in NULLABLE if figures.get(name) is None), default)
    phases = figures.get("phases_ms")
    if isinstance(phases, PhasesMs):
        void = given.get("phases_ms", default)  # phases that do not close to the wall time keep the step only
        reasons |= {
            f"phases_ms.{f.name}": void for f in dataclasses.fields(PhasesMs) if getattr(phases, f.name) is None
        }
    return reasons | dict(given)


def judge(measurement: Measurement | None, kind: str, limit_bytes: int | None) -> tuple[Status, str | None]:
    """Judge a trial that ended well: it may have sent no rate, or have peaked above its limit."""
    if measurement is None:
        return "error", "the trial ended well but sent no measurement"
    rate, used_gib = measurement.samples_per_s, measurement.device_memory_peak_gib
    if kind != "memory" and (rate is None or not math.isfinite(rate) or rate <= 0):
        return "error", f"the trial measured {rate} samples/s, which is no rate"
    if limit_bytes is None or used_gib is None or used_gib <= limit_bytes / 2**30:
        return "ok", None
    part = measurement.memory_peak_part
    where = f" in the part '{part}'" if part not in (None, "steps") else ""
    limit = format_gib(limit_bytes / 2**30)
    return "out_of_memory", f"the run peaked at {format_gib(used_gib)}{where}, the limit is {limit}"
