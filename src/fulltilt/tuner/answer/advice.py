"""What would make the recommended plan faster still: what bounds its step, how near it is to the roof, which levers
are not in force and why. Every sentence has its figures from a row of the search or from a roof measured in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from fulltilt.levers import Facts, load_catalogue
from fulltilt.records import PhasesMs, Plan, Roof, Trial, format_rate
from fulltilt.tuner.answer.busy import list_busy
from fulltilt.tuner.answer.lever_advice import LeverAdvice, build_lever_advice
from fulltilt.tuner.answer.savings import Interval

BoundKind = Literal["compute", "data", "transfer", "optimizer", "other"]

MAX_SPAN = 4.0  # times its lower end: an interval of MFU that reaches further is called noise, not printed

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
        phase: The longest single phase in it.
        share_pct: Of the step.
        ceiling_pct: How many more samples/s at most, were this part for nothing; None for compute.
        busy_ids: Rows that it rests on and that a busy machine ran; so in all parts of ``Advice``.
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
    """How much of the device's arithmetic the plan uses, against the matmul measured in the same search.

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
    """What a part of the step reached alone, beside the whole."""

    kind: str  # "device" or "loader"
    trial_id: str
    samples_per_s: float
    text: str
    busy_ids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    trial_id: str
    bound: Bound | None
    roof: RoofShare | None
    ceilings: tuple[ProbeCeiling, ...] = ()
    levers: tuple[LeverAdvice, ...] = ()


def build_advice(
    recommended: Trial,
    rows: Sequence[Trial],
    *,
    probes: Sequence[Trial] = (),
    roofs: Sequence[Roof] = (),
    axes: Mapping[str, Sequence[object]],
    facts: Facts,
    noise_pct: float | None = None,
    tied: Collection[Plan] = (),
) -> tuple[Advice, dict[str, str]]:
    """Advice on one row, and why parts of it are missing, by dotted name.

    Args:
        rows: The whole runs it is compared with, repeats included.
        roofs: Measured in this search, on this device.
        axes: Lever → values that the search could try.
        noise_pct: How far repeats of one plan lay apart.
    """
    bound, bound_reason = compute_bound(recommended)
    n_roofs = recommended.n_devices if facts.device_type == "cuda" else 1
    roof, roof_reason = compute_roof_share(recommended, roofs, n_roofs=n_roofs)
    reasons = {"advice.bound": bound_reason, "advice.roof": roof_reason}
    if roof is not None and roof.roof_fraction_pct is None:
        reasons["advice.roof.roof_fraction_pct"] = bound_reason
    if roof is not None and roof.mfu_ci95_pct is None:
        reasons["advice.roof.mfu_ci95_pct"] = "the recommended row has no interval"
    advice = Advice(
        trial_id=recommended.id,
        bound=bound,
        roof=roof,
        ceilings=find_ceilings(recommended, probes),
        levers=build_lever_advice(
            recommended, rows, probes=probes, axes=axes, facts=facts, noise_pct=noise_pct, tied=tied
        ),
    )
    return advice, {name: reason for name, reason in reasons.items() if reason}


def compute_bound(row: Trial) -> tuple[Bound | None, str | None]:
    """The longest part of the step, or why it is not known."""
    phases = row.phases_ms
    if phases is None or phases.forward is None or not phases.step:
        return None, row.null_reasons.get("phases_ms", "the row has no phases")
    parts: dict[BoundKind, float] = {kind: _sum_phases(phases, names) for kind, names in BOUND_PHASES.items()}
    kind = max(parts, key=lambda name: parts[name])
    part_ms, step_ms = parts[kind], phases.step
    share = min(1.0, part_ms / step_ms)
    ceiling_pct = None if kind == "compute" or share >= 1 else 100 * share / (1 - share)
    phase = max(BOUND_PHASES[kind], key=lambda name: getattr(phases, name) or 0.0)
    times = f"{format_rate(part_ms)} of {format_rate(step_ms)} ms"
    text = f"{100 * share:.0f} % of the step is {_PART_NAMES[kind]} ({times} in {row.id})"
    if ceiling_pct is not None:
        text += f"; were it for nothing, samples/s would rise by {ceiling_pct:.0f} % at most"
    else:
        text += f", most of it {phase} ({format_rate(getattr(phases, phase) or 0.0)} ms)"
    made = Bound(
        kind=kind, phase=phase, part_ms=part_ms, step_ms=step_ms, share_pct=100 * share, ceiling_pct=ceiling_pct,
        text=text, busy_ids=list_busy(row),
    )  # fmt: skip
    return made, None


_PART_NAMES: Mapping[BoundKind, str] = {
    "compute": "forward and backward",
    "data": "waiting for data",
    "transfer": "copying batches to the device",
    "optimizer": "the optimizer",
    "other": "what no phase claims",
}


def _sum_phases(phases: PhasesMs, names: Sequence[str]) -> float:
    return sum(getattr(phases, name) or 0.0 for name in names)


def compute_roof_share(row: Trial, roofs: Sequence[Roof], *, n_roofs: int = 1) -> tuple[RoofShare | None, str | None]:
    """MFU and roof fraction of a row, or why they are not known.

    Args:
        n_roofs: Devices that the row's figures are of together; each has the roof. Ranks on a CPU share one.
    """
    precision = row.plan.get("precision", "fp32")
    roof = next((roof for roof in roofs if roof.name == f"matmul {precision}"), None)
    reason = None
    if not roofs:
        reason = "no roof was measured in this search"
    elif roof is None:
        reason = f"no roof was measured for {precision}; there is {', '.join(roof.name for roof in roofs)}"
    elif row.flops_per_sample is None or row.samples_per_s is None:
        reason = row.null_reasons.get("flops_per_sample", "the FLOPs of a sample are not known")
    if reason is not None or roof is None or row.flops_per_sample is None or row.samples_per_s is None:
        return None, reason
    share = _compute_share(row, roof, row.flops_per_sample / n_roofs, row.samples_per_s)
    if n_roofs > 1:
        share = dataclasses.replace(share, text=f"{share.text}; of each of {n_roofs} devices, on average")
    share = dataclasses.replace(share, busy_ids=list_busy(row))
    if max(share.mfu_pct, share.roof_fraction_pct or 0.0) <= 100:
        return share, None
    return None, (
        f"{roof.name} reached {roof.measured:.3g} TFLOP/s when the roof was measured, less than the plan itself: the "
        "machine was slower then, by other programs or its clock"
    )


def _compute_share(row: Trial, roof: Roof, flops_per_sample: float, samples_per_s: float) -> RoofShare:
    achieved = flops_per_sample * samples_per_s / 1e12
    fraction_pct = _compute_roof_fraction_pct(row, roof, flops_per_sample)
    ci95 = None
    if row.samples_per_s_ci95 is not None:
        low, high = (flops_per_sample * bound / 1e12 for bound in row.samples_per_s_ci95)
        ci95 = (100 * low / roof.measured_ci95[1], 100 * high / roof.measured_ci95[0])
    made = RoofShare(
        roof=roof.name,
        roof_tflops=roof.measured,
        achieved_tflops=achieved,
        mfu_pct=100 * achieved / roof.measured,
        mfu_ci95_pct=ci95,
        roof_fraction_pct=fraction_pct,
        flops_coverage_pct=row.flops_coverage_pct,
        text="",
    )
    return dataclasses.replace(made, text=_describe_share(made, row.plan.get("threads")))


def _compute_roof_fraction_pct(row: Trial, roof: Roof, flops_per_sample: float) -> float | None:
    phases = row.phases_ms
    if phases is None or phases.forward is None or phases.backward is None:
        return None
    compute_s = (phases.forward + phases.backward) / 1000
    tflop = flops_per_sample * row.effective_batch_size / 1e12
    return 100 * tflop / compute_s / roof.measured if compute_s > 0 else None


def _describe_share(share: RoofShare, n_threads: int | None) -> str:
    text = (
        f"MFU {_describe_mfu(share.mfu_pct, share.mfu_ci95_pct)}: {share.achieved_tflops:.3g} of the "
        f"{share.roof_tflops:.3g} TFLOP/s that {share.roof} reached on this device in this search"
    )
    if n_threads is not None:
        text += f" with torch's own number of threads, where the plan has {n_threads}"
    if share.roof_fraction_pct is not None:
        text += f"; {_pct(share.roof_fraction_pct)} % of it during forward and backward alone"
    if share.flops_coverage_pct is None:
        return text
    bound = ", so these are lower bounds" if share.flops_coverage_pct < 100 else ""
    return f"{text}; FLOPs are known for {share.flops_coverage_pct:.0f} % of the operators that compute{bound}"


def _describe_mfu(mfu_pct: float, ci95_pct: Interval | None) -> str:
    """The figure with its interval; one that spans ``MAX_SPAN`` says nothing but that."""
    if ci95_pct is None:
        return f"{_pct(mfu_pct)} %"
    low, high = ci95_pct
    if high > MAX_SPAN * low:
        return f"about {_pct(mfu_pct)} %, the machine was too noisy to tell"
    return f"{_pct(mfu_pct)} % ({_pct(low)} to {_pct(high)} %)"


def _pct(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def find_ceilings(row: Trial, probes: Sequence[Trial]) -> tuple[ProbeCeiling, ...]:
    """Probes of the parts of exactly this plan: the step without its loader, the loader without the step."""
    found = []
    for kind, part in (("device", "the step on batches that lie on the device"), ("loader", "the loader alone")):
        fitting = [probe for probe in probes if probe.kind == kind and _is_part_of(probe, row)]
        for probe in fitting[-1:]:  # the newest
            rate = probe.samples_per_s or 0.0
            if rate < (row.samples_per_s or 0.0):  # other programs disturbed it: a part is no slower than the whole
                continue
            counted = f", one rank's part counted {row.n_devices} times" if row.n_devices > 1 else ""
            together = format_rate(row.samples_per_s or 0.0)
            text = f"{part} reaches {format_rate(rate)} samples/s ({probe.id}{counted}), both together {together}"
            busy_ids = list_busy(probe, row)
            found.append(ProbeCeiling(kind=kind, trial_id=probe.id, samples_per_s=rate, text=text, busy_ids=busy_ids))
    if len(found) == 2:
        slower = min(found, key=lambda ceiling: ceiling.samples_per_s)
        said = dataclasses.replace(slower, text=f"{slower.text}: the slower side, so gains are to be had there first")
        found[found.index(slower)] = said
    return tuple(found)


def _is_part_of(probe: Trial, row: Trial) -> bool:
    """Same batch, and the same value of every lever that the probed part depends on."""
    if probe.status != "ok" or probe.samples_per_s is None or probe.plan["batch_size"] != row.plan["batch_size"]:
        return False
    catalogue = load_catalogue()
    depends = [
        name
        for name in row.plan
        if name in catalogue and (catalogue[name].stage == "loader") == (probe.kind == "loader")
    ]
    return all(probe.plan.get(name) == row.plan[name] for name in depends)
