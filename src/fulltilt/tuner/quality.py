"""Whether two trained plans learn alike: final validation quality, and time to the same quality, paired by seed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fulltilt.errors import TrainingError
from fulltilt.report import format_duration
from fulltilt.stats import compute_interval
from fulltilt.tuner.savings import Interval, compute_speedup_ci95

Arm = Literal["as it was", "recommended"]
QualityVerdict = Literal["learns as well", "learns worse", "too noisy to tell"]

ARMS: tuple[Arm, Arm] = ("as it was", "recommended")
RISING_METRICS = ("accuracy", "binary_accuracy", "top5")  # of our own metrics, those where more is better
MARGIN_PCT = {"rising": 1.0, "falling": 2.0}  # of the quality as it was: a smaller loss of it is no worse learning


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """One training.

    Attributes:
        curve: (training seconds, quality) of every evaluation, in order.
        quality: Of the last one.
    """

    arm: Arm
    seed: int
    quality: float
    training_s: float
    samples_per_s: float
    curve: tuple[tuple[float, float], ...]
    folder: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The two plans side by side, paired by seed. Intervals are 95 %, over pairs.

    Attributes:
        verdict: "learns as well" when the interval of the change lies above −``margin_pct``; "learns worse" when all of
            it lies below 0 and some of it below −``margin_pct``; otherwise there is no telling with this many pairs.
        quality_change_pct: Of the final quality; positive is better, whichever way the metric points.
        time_saved_pct: Share of the training time saved until both of a pair had reached the worse one's best quality.
        settings: What the recommended arm has on top of the user's own command line.
    """

    verdict: QualityVerdict
    text: str
    metric: str
    is_rising: bool
    margin_pct: float
    n_pairs: int
    quality_before: float
    quality_after: float
    quality_change_pct: float
    quality_change_ci95_pct: Interval
    time_before_s: float
    time_after_s: float
    time_saved_pct: float
    time_saved_ci95_pct: Interval
    settings: dict[str, Any]
    runs: tuple[TrainedRun, ...]


def judge(documents: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Verification:
    """The verdict from the documents of ``fulltilt train --json``, each with its ``arm``, ``seed`` and ``folder``.

    Raises:
        TrainingError: a run has no evaluation.
        ValueError: the arms do not have the same seeds, or fewer than two.
    """
    metric = choose_metric(documents)
    is_rising = metric in RISING_METRICS
    runs = tuple(_read_run(document, metric) for document in documents)
    before, after = (sorted((r for r in runs if r.arm == arm), key=lambda r: r.seed) for arm in ARMS)
    if [r.seed for r in before] != [r.seed for r in after] or len(before) < 2:
        raise ValueError("both arms need runs of the same seeds, two at least")
    change_pct, ci95_pct = _compare_quality(before, after, is_rising)
    margin_pct = MARGIN_PCT["rising" if is_rising else "falling"]
    times = [_find_times(*pair, is_rising) for pair in zip(before, after, strict=True)]
    low, high = compute_speedup_ci95([1 / a for a, _ in times], [1 / b for _, b in times])
    time_before_s, time_after_s = (statistics.geometric_mean(column) for column in zip(*times, strict=True))
    made = Verification(
        verdict=_decide(ci95_pct, margin_pct),
        text="",
        metric=metric,
        is_rising=is_rising,
        margin_pct=margin_pct,
        n_pairs=len(before),
        quality_before=statistics.fmean(r.quality for r in before),
        quality_after=statistics.fmean(r.quality for r in after),
        quality_change_pct=change_pct,
        quality_change_ci95_pct=ci95_pct,
        time_before_s=time_before_s,
        time_after_s=time_after_s,
        time_saved_pct=100 * (1 - time_after_s / time_before_s),
        time_saved_ci95_pct=(100 * (1 - 1 / low), 100 * (1 - 1 / high)),
        settings=dict(settings),
        runs=runs,
    )
    return dataclasses.replace(made, text=_describe(made))


def choose_metric(documents: Sequence[Mapping[str, Any]]) -> str:
    """The first metric of which we know that more of it is better, else the validation loss."""
    for document in documents:
        if not document.get("evaluations"):
            raise TrainingError(
                f"{document['folder']} was trained without an evaluation: verifying needs a validation set, and "
                "run.evaluate_every within the run"
            )
    names = documents[0]["evaluations"][-1]["metrics"]
    return next((name for name in names if name in RISING_METRICS), "loss")


def _read_run(document: Mapping[str, Any], metric: str) -> TrainedRun:
    curve = tuple((point["training_seconds"], point["metrics"][metric]) for point in document["evaluations"])
    return TrainedRun(
        arm=document["arm"],
        seed=document["seed"],
        quality=curve[-1][1],
        training_s=document["training_seconds"],
        samples_per_s=document["samples_per_s"],
        curve=curve,
        folder=document["folder"],
    )


def _compare_quality(
    before: Sequence[TrainedRun], after: Sequence[TrainedRun], is_rising: bool
) -> tuple[float, Interval]:
    """Change of the final quality in % of what it was; paired, because one seed starts both from the same weights."""
    scale = abs(statistics.fmean(r.quality for r in before)) or 1.0
    sign = 1 if is_rising else -1
    changes = [sign * 100 * (b.quality - a.quality) / scale for a, b in zip(before, after, strict=True)]
    return statistics.fmean(changes), compute_interval(changes)


def _find_times(before: TrainedRun, after: TrainedRun, is_rising: bool) -> tuple[float, float]:
    """Training seconds of each until an evaluation first showed the quality that both of them reached."""
    sign = 1 if is_rising else -1
    curves = [[(seconds, sign * quality) for seconds, quality in run.curve] for run in (before, after)]
    target = min(max(quality for _, quality in curve) for curve in curves)
    first, second = (next(seconds for seconds, quality in curve if quality >= target) for curve in curves)
    return first, second


def _decide(ci95_pct: Interval, margin_pct: float) -> QualityVerdict:
    low, high = ci95_pct
    if low >= -margin_pct:
        return "learns as well"
    return "learns worse" if high < 0 else "too noisy to tell"


def _describe(made: Verification) -> str:
    low, high = made.quality_change_ci95_pct
    more = "; more pairs narrow the interval" if made.verdict == "too noisy to tell" else ""
    return (
        f"{made.verdict}: validation {made.metric} {made.quality_before:.4g} → {made.quality_after:.4g}, "
        f"{made.quality_change_pct:+.2f} % ({low:+.2f} to {high:+.2f} %; a loss of {made.margin_pct:g} % is allowed); "
        f"{_describe_times(made)}; {made.n_pairs} pairs of trainings{more}"
    )


def _describe_times(made: Verification) -> str:
    low, high = made.time_saved_ci95_pct
    before, after = format_duration(made.time_before_s), format_duration(made.time_after_s)
    times = f"training time to the same quality {before} → {after}"
    if low <= 0 <= high:
        return f"{times}, a difference that {made.n_pairs} pairs cannot tell from none"
    return f"{times}, {made.time_saved_pct:.0f} % less ({low:.0f} to {high:.0f} %)"
