"""The sentences of advice and hints, each from the rows and figures that it names."""

from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.records import Roof, Trial, format_rate

Interval = tuple[float, float]

MAX_SPAN = 4.0  # a wider interval of MFU, upper end over lower, is called noise and not shown
PARTS = {
    "compute": "forward and backward",
    "data": "waiting for data",
    "transfer": "copying batches to the device",
    "optimizer": "the optimizer",
    "other": "what no phase claims",
    "device": "the step on batches that lie on the device",
    "loader": "the loader alone",
}
SLOWER_SIDE = ": the slower side, so gains are to be had there first"
TIED = "; its plan is among the ties: all runs together do not tell the two apart"
HINTS = {
    "data-wait": "{data_wait_pct:.0f} % of the step waits for data ({data_wait_ms:.2f} of {step_ms:.2f} ms with "
    "num_workers {num_workers}): try more workers, cheaper transforms, or data that is already decoded",
    "utilization": "the GPU was busy {gpu_utilization_pct:.0f} % of the time: a larger batch, compile, or more data "
    "workers may fill it; above {least_pct:.0f} % is usual for training",
    "memory": "{used} of {limit} used ({share_pct:.0f} %): {advice}",
    "phases": "the phases of the step are not shown: {reason}",
    "contention": "{measured}: data workers compete with the step, or other programs ran; figures vary more than usual",
    "failed-rows": "{n_failed} of {n_rows} rows ended with error or timeout; {id}: {reason}",
}
"""Rule → its sentence, for ``format``."""


def describe_bound(row: Trial, kind: str, phase: str, part_ms: float, step_ms: float, ceiling_pct: float | None) -> str:
    """Say which part of the step of ``row`` takes longest."""
    times = f"{format_rate(part_ms)} of {format_rate(step_ms)} ms in {row.id}"
    text = f"{100 * min(1.0, part_ms / step_ms):.0f} % of the step is {PARTS[kind]} ({times})"
    if ceiling_pct is not None:
        return f"{text}; were it for nothing, samples/s would rise by {ceiling_pct:.0f} % at most"
    return f"{text}, most of it {phase} ({format_rate(getattr(row.phases_ms, phase) or 0.0)} ms)"


def describe_roof(
    row: Trial,
    roof: Roof,
    *,
    achieved_tflops: float,
    mfu_pct: float,
    mfu_ci95_pct: Interval | None,
    roof_fraction_pct: float | None,
    n_roofs: int,
) -> str:
    """Say how much of the device's arithmetic ``row`` uses."""
    mfu = f"MFU {_pct(mfu_pct)} %"
    if mfu_ci95_pct is not None:
        low, high = mfu_ci95_pct
        mfu += f" ({_pct(low)} to {_pct(high)} %)"
        if high > MAX_SPAN * low:
            mfu = f"MFU about {_pct(mfu_pct)} %, the machine was too noisy to tell"
    text = (
        f"{mfu}: {achieved_tflops:.3g} of the {roof.measured:.3g} TFLOP/s that {roof.name} reached on this device in "
        "this search"
    )
    if (n_threads := row.plan.get("threads")) is not None:
        text += f" with torch's own number of threads, where the plan has {n_threads}"
    if roof_fraction_pct is not None:
        text += f"; {_pct(roof_fraction_pct)} % of it during forward and backward alone"
    if (coverage_pct := row.flops_coverage_pct) is not None:
        text += f"; FLOPs are known for {coverage_pct:.0f} % of the operators that compute"
        text += ", so these are lower bounds" if coverage_pct < 100 else ""
    return text + (f"; of each of {n_roofs} devices, on average" if n_roofs > 1 else "")


def _pct(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def describe_ceiling(probe: Trial, row: Trial) -> str:
    """Say what a part of the step reached alone, beside the whole of ``row``."""
    counted = f", one rank's part counted {row.n_devices} times" if row.n_devices > 1 else ""
    rates = [format_rate(trial.samples_per_s or 0.0) for trial in (probe, row)]
    return f"{PARTS[probe.kind]} reaches {rates[0]} samples/s ({probe.id}{counted}), both together {rates[1]}"


def name_lever(lever: str, value: Any) -> str:
    """``compile yes``, ``precision bf16``."""
    return f"{lever} {'yes' if value is True else value}"


def describe_effect(effect_pct: float, ci95_pct: Interval | None) -> str:
    """Say how two runs differ; the interval is of the blocks inside one run each, not of several runs."""
    spread = ""
    if ci95_pct is not None:
        spread = f" ({ci95_pct[0]:+.1f} to {ci95_pct[1]:+.1f} % by the blocks of one run each)"
        if ci95_pct[0] <= 0 <= ci95_pct[1]:
            return f"made no difference that shows: {effect_pct:+.1f} %{spread}"
    return f"was {abs(effect_pct):.1f} % {'slower' if effect_pct < 0 else 'faster'}{spread}"


def describe_tried(row: Trial, others: Sequence[str]) -> str:
    return f" in {row.id}, which differs in {', '.join(others)} too," if others else f" ({row.id})"


def describe_probed(without: Trial, probe: Trial) -> str:
    return f", {'the step' if probe.kind == 'device' else 'the loader'} alone ({probe.id} against {without.id}),"


UNTRIED: Mapping[str, str] = {
    "cannot apply": "{obstacle}",
    "failed": "no run of it ended well; {row.id} {row.status}: {row.reason}",
    "not reached": "was not run, though it is in the space; a larger --budget or --exhaustive reaches it",
    "not in the space": "was not run, the space of this search does not hold it; "
    "benchmark.levers.{lever}: [{values}] tries it{note}",
}
"""State of a lever's value that no run says anything about → why, for ``format``."""
