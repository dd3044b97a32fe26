"""What would make the recommended plan faster: what bounds its step, how near the roof it is, which levers are off.

Every figure comes from a row of the search or from a roof measured in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from fulltilt.levers import load_catalogue
from fulltilt.records import Roof, Trial
from fulltilt.report.advice import SLOWER_SIDE, describe_bound, describe_ceiling, describe_roof
from fulltilt.tuner.answer.lever_advice import Findings, LeverAdvice, build_lever_advice, list_busy
from fulltilt.tuner.answer.savings import Interval

BoundKind = Literal["compute", "data", "transfer", "optimizer", "other"]

BOUND_PHASES: Mapping[BoundKind, tuple[str, ...]] = {
    "compute": ("forward", "backward"),
    "data": ("data_wait",),
    "transfer": ("h2d",),
    "optimizer": ("optimizer",),
    "other": ("other",),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The part of a step that takes longest.

    Attributes:
        phase: The longest single phase of that part.
        share_pct: Share of the step.
        ceiling_pct: Gain in samples/s if the part took no time; None for compute.
        busy_ids: Rows behind the figures that a busy machine ran; the same in every part of ``Advice``.
    """

    kind: BoundKind
    phase: str
    part_ms: float
    step_ms: float
    share_pct: float
    ceiling_pct: float | None
    text: str
    busy_ids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoofShare:
    """The share of the device's arithmetic that the plan uses, against the matmul measured in the same search.

    Attributes:
        mfu_pct: Model FLOPs utilisation: FLOPs of the model over the whole step's wall time, as a share of the roof.
        mfu_ci95_pct: From the intervals of throughput and roof together.
        roof_fraction_pct: The same over the time of forward and backward alone; None where phases are withheld.
        flops_coverage_pct: Share of the computing operators whose FLOPs are known; below 100 these are lower bounds.
    """

    roof: str
    roof_tflops: float
    achieved_tflops: float
    mfu_pct: float
    mfu_ci95_pct: Interval | None
    roof_fraction_pct: float | None
    flops_coverage_pct: float | None
    text: str
    busy_ids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCeiling:
    """The speed of one part of the step, measured alone."""

    kind: str  # "device" or "loader"
    trial_id: str
    samples_per_s: float
    text: str
    busy_ids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """All advice on one row."""

    trial_id: str
    bound: Bound | None
    roof: RoofShare | None
    ceilings: tuple[ProbeCeiling, ...] = ()
    levers: tuple[LeverAdvice, ...] = ()


def build_advice(found: Findings) -> tuple[Advice, dict[str, str]]:
    """Build the advice on the recommended row, and the reasons for its missing parts by dotted name."""
    row = found.recommended
    bound, bound_reason = compute_bound(row)
    n_roofs = row.n_devices if found.facts.device_type == "cuda" else 1
    roof, roof_reason = compute_roof_share(row, found.roofs, n_roofs=n_roofs)
    reasons = {"advice.bound": bound_reason, "advice.roof": roof_reason}
    if roof is not None and roof.roof_fraction_pct is None:
        reasons["advice.roof.roof_fraction_pct"] = bound_reason
    if roof is not None and roof.mfu_ci95_pct is None:
        reasons["advice.roof.mfu_ci95_pct"] = "the recommended row has no interval"
    ceilings, levers = find_ceilings(row, found.probes), build_lever_advice(found)
    advice = Advice(trial_id=row.id, bound=bound, roof=roof, ceilings=ceilings, levers=levers)
    return advice, {name: reason for name, reason in reasons.items() if reason}


def compute_bound(row: Trial) -> tuple[Bound | None, str | None]:
    """Find the longest part of the step, or why it is not known."""
    phases = row.phases_ms
    if phases is None or phases.forward is None or not phases.step:
        return None, row.null_reasons.get("phases_ms", "the row has no phases")
    times = {name: getattr(phases, name) or 0.0 for names in BOUND_PHASES.values() for name in names}
    parts: dict[BoundKind, float] = {kind: sum(times[n] for n in names) for kind, names in BOUND_PHASES.items()}
    kind = max(parts, key=lambda name: parts[name])
    phase = max(BOUND_PHASES[kind], key=lambda name: times[name])
    share = min(1.0, parts[kind] / phases.step)
    ceiling_pct = None if kind == "compute" or share >= 1 else 100 * share / (1 - share)
    bound = Bound(
        kind=kind,
        phase=phase,
        part_ms=parts[kind],
        step_ms=phases.step,
        share_pct=100 * share,
        ceiling_pct=ceiling_pct,
        text=describe_bound(row, kind, phase, parts[kind], phases.step, ceiling_pct),
        busy_ids=list_busy(row),
    )
    return bound, None


def compute_roof_share(row: Trial, roofs: Sequence[Roof], *, n_roofs: int = 1) -> tuple[RoofShare | None, str | None]:
    """Compute MFU and roof fraction of a row, or say why they are not known.

    Args:
        n_roofs: Devices that share the row's work, each with the roof. Ranks on a CPU share one.
    """
    precision = row.plan.get("precision", "fp32")
    roof = next((roof for roof in roofs if roof.name == f"matmul {precision}"), None)
    if not roofs:
        return None, "no roof was measured in this search"
    if roof is None:
        return None, f"no roof was measured for {precision}; there is {', '.join(roof.name for roof in roofs)}"
    if row.flops_per_sample is None or row.samples_per_s is None:
        return None, row.null_reasons.get("flops_per_sample", "the FLOPs of a sample are not known")
    tflop_per_sample = row.flops_per_sample / n_roofs / 1e12
    figures = {
        "achieved_tflops": tflop_per_sample * row.samples_per_s,
        "mfu_pct": 100 * tflop_per_sample * row.samples_per_s / roof.measured,
        "mfu_ci95_pct": None,
        "roof_fraction_pct": _compute_roof_fraction_pct(row, roof, tflop_per_sample),
    }
    if row.samples_per_s_ci95 is not None:
        (low, high), (roof_low, roof_high) = row.samples_per_s_ci95, roof.measured_ci95
        figures["mfu_ci95_pct"] = (100 * tflop_per_sample * low / roof_high, 100 * tflop_per_sample * high / roof_low)
    if max(figures["mfu_pct"], figures["roof_fraction_pct"] or 0.0) > 100:
        return None, (
            f"{roof.name} reached {roof.measured:.3g} TFLOP/s when the roof was measured, less than the plan itself: "
            "the machine was slower then, by other programs or its clock"
        )
    share = RoofShare(
        roof=roof.name,
        roof_tflops=roof.measured,
        flops_coverage_pct=row.flops_coverage_pct,
        text=describe_roof(row, roof, n_roofs=n_roofs, **figures),
        busy_ids=list_busy(row),
        **figures,
    )
    return share, None


def _compute_roof_fraction_pct(row: Trial, roof: Roof, tflop_per_sample: float) -> float | None:
    phases = row.phases_ms
    if phases is None or phases.forward is None or phases.backward is None:
        return None
    compute_s = (phases.forward + phases.backward) / 1000
    return 100 * tflop_per_sample * row.effective_batch_size / compute_s / roof.measured if compute_s > 0 else None


def find_ceilings(row: Trial, probes: Sequence[Trial]) -> tuple[ProbeCeiling, ...]:
    """Find the newest probes of exactly this plan's parts: the step without its loader, the loader without the step."""
    fitting = {probe.kind: probe for probe in probes if _is_part_of(probe, row)}
    # A part that is slower than the whole was disturbed by other programs.
    found = [
        probe
        for kind in ("device", "loader")
        if (probe := fitting.get(kind)) and (probe.samples_per_s or 0.0) >= (row.samples_per_s or 0.0)
    ]
    slowest = min(found, key=lambda probe: probe.samples_per_s or 0.0) if len(found) == 2 else None
    return tuple(
        ProbeCeiling(
            kind=probe.kind,
            trial_id=probe.id,
            samples_per_s=probe.samples_per_s or 0.0,
            text=describe_ceiling(probe, row) + (SLOWER_SIDE if probe is slowest else ""),
            busy_ids=list_busy(probe, row),
        )
        for probe in found
    )


def _is_part_of(probe: Trial, row: Trial) -> bool:
    """Whether batch and every lever that the probed part depends on are the same."""
    if probe.status != "ok" or probe.samples_per_s is None or probe.plan["batch_size"] != row.plan["batch_size"]:
        return False
    catalogue, is_loader = load_catalogue(), probe.kind == "loader"
    depends = [name for name in row.plan if name in catalogue and (catalogue[name].stage == "loader") == is_loader]
    return all(probe.plan.get(name) == row.plan[name] for name in depends)
