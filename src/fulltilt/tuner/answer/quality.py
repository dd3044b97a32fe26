"""Judge whether two trained plans learn alike: final validation quality, and time to it, paired by seed."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fulltilt.errors import TrainingError
from fulltilt.report import format_duration
from fulltilt.report.quality import find_direction, find_times_to_common_quality
from fulltilt.report.summary import count
from fulltilt.stats import compute_contrast_interval, compute_interval
from fulltilt.tuner.answer.savings import Interval

Arm = Literal["as it was", "recommended"]
QualityVerdict = Literal["learns as well", "learns worse", "too noisy to tell"]

ARMS: tuple[Arm, Arm] = ("as it was", "recommended")
MARGIN_PCT = {"rising": 1.0, "falling": 2.0}  # of the quality as it was: a smaller loss of it is no worse learning


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """One training of a plan.

    Attributes:
        curve: (training seconds, quality) of every evaluation that came to a number, in order.
        quality: Of the last evaluation; None when the run diverged.
    """

    arm: Arm
    seed: int
    quality: float | None
    training_s: float
    samples_per_s: float
    curve: tuple[tuple[float, float], ...]
    folder: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The two plans side by side, paired by seed. Intervals are 95 %, over pairs.

    Attributes:
        verdict: "learns as well" when the interval of the change lies above −``margin_pct``; "learns worse" when all of
            it lies below 0 and some of it below −``margin_pct``, or when a recommended run diverged; otherwise there is
            no telling with this many pairs.
        quality_change_pct: Of the final quality; positive is better, whichever way the metric points.
        time_saved_pct: Share of the training time saved until both of a pair had reached the worse one's best quality.
        settings: What the recommended arm has on top of the user's own command line.
        null_reasons: Why a figure is None: of a run that diverged there is no final quality to compare.
    """

    verdict: QualityVerdict
    text: str
    metric: str
    is_rising: bool
    margin_pct: float
    n_pairs: int
    quality_before: float
    quality_after: float | None = None
    quality_change_pct: float | None = None
    quality_change_ci95_pct: Interval | None = None
    time_before_s: float | None = None
    time_after_s: float | None = None
    time_saved_pct: float | None = None
    time_saved_ci95_pct: Interval | None = None
    settings: dict[str, Any]
    runs: tuple[TrainedRun, ...]
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)


def judge(documents: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Verification:
    """Reach the verdict from the documents of ``fulltilt train --json``, with their ``arm``, ``seed`` and ``folder``.

    Both arms have the same seeds, two at least. A training that stopped itself over its loss left no such document: it
    comes with why under ``diverged``.

    Raises:
        TrainingError: a run has no evaluation, or one with the settings as they were diverged.
    """
    metric = choose_metric(documents)
    is_rising = find_direction(metric) == "rising"
    runs = tuple(_read_run(document, metric) for document in documents)
    before, after = (sorted((r for r in runs if r.arm == arm), key=lambda r: r.seed) for arm in ARMS)
    if diverged := [run for run in before if run.quality is None]:
        raise TrainingError(
            f"{len(diverged)} of {len(before)} trainings with the settings as they were diverged "
            f"({_name_seeds(diverged)}): the loss was no finite number (see {diverged[0].folder}), and "
            "there is nothing to compare with; try a lower optim.lr"
        )
    margin_pct = MARGIN_PCT["rising" if is_rising else "falling"]
    if diverged := [run for run in after if run.quality is None]:
        judged = _condemn(diverged, len(after))
    else:
        judged = _compare(before, after, margin_pct, f"{metric} {_describe_place(documents)}", is_rising=is_rising)
    return Verification(
        metric=metric,
        is_rising=is_rising,
        margin_pct=margin_pct,
        n_pairs=len(before),
        quality_before=statistics.fmean(_list_qualities(before)),
        settings=dict(settings),
        runs=runs,
        **judged,
    )


def choose_metric(documents: Sequence[Mapping[str, Any]]) -> str:
    """Choose the first metric that is known to be better when larger, else the validation loss."""
    for document in documents:
        if not document.get("evaluations") and "diverged" not in document:
            raise TrainingError(
                f"{document['folder']} was trained without an evaluation: verifying needs a validation set, and "
                "run.evaluate_every within the run"
            )
    names = next((d["evaluations"][-1]["metrics"] for d in documents if d["evaluations"]), ())
    return next((name for name in names if find_direction(name) == "rising"), "loss")


def _describe_place(documents: Sequence[Mapping[str, Any]]) -> str:
    """Say where quality was measured: ``on the validation set of 360 samples after 2 epochs``."""
    sizes: set[Any] = {document.get("n_validation_samples") for document in documents}
    epochs: set[Any] = {document["evaluations"][-1].get("epoch") for document in documents if document["evaluations"]}
    said = "on the validation set"
    if len(sizes) == 1 and None not in sizes:
        said += f" of {count(sizes.pop(), 'sample')}"
    if len(epochs) == 1 and None not in epochs:
        said += f" after {count(epochs.pop(), 'epoch')}"
    return said


def _read_run(document: Mapping[str, Any], metric: str) -> TrainedRun:
    """Read one run; NaN and infinity were written as null."""
    points = [(point["training_seconds"], point["metrics"][metric]) for point in document["evaluations"]]
    last = document["evaluations"][-1]["metrics"] if document["evaluations"] else {}
    has_diverged = "diverged" in document or None in (points[-1][1], last.get("loss", points[-1][1]))
    return TrainedRun(
        arm=document["arm"],
        seed=document["seed"],
        quality=None if has_diverged else points[-1][1],
        training_s=document["training_seconds"],
        samples_per_s=document["samples_per_s"],
        curve=tuple((seconds, quality) for seconds, quality in points if quality is not None),
        folder=document["folder"],
    )


def _condemn(diverged: Sequence[TrainedRun], n_runs: int) -> dict[str, Any]:
    """Give the verdict on recommended runs that diverged where those of the same seeds did not."""
    reason = (
        f"{len(diverged)} of {n_runs} trainings with the recommended settings diverged ({_name_seeds(diverged)}): "
        "the loss was no finite number"
    )
    text = f"learns worse: {reason}; none with the settings as they were did (see {diverged[0].folder})"
    missing = [field.name for field in dataclasses.fields(Verification) if field.default is None]
    return {"verdict": "learns worse", "text": text, "null_reasons": dict.fromkeys([*missing, "runs.quality"], reason)}


def _name_seeds(runs: Sequence[TrainedRun]) -> str:
    return f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(run.seed) for run in runs)}"


def _list_qualities(runs: Sequence[TrainedRun]) -> list[float]:
    return [run.quality for run in runs if run.quality is not None]


def _compare(
    before: Sequence[TrainedRun], after: Sequence[TrainedRun], margin_pct: float, what: str, *, is_rising: bool
) -> dict[str, Any]:
    """Give verdict, text and figures of runs that all came to a number.

    Args:
        what: Was compared, in words.
    """
    finals, n_pairs = (_list_qualities(before), _list_qualities(after)), len(before)
    old, new = map(statistics.fmean, finals)
    change_pct, (low, high) = _compare_quality(*finals, is_rising)
    verdict: QualityVerdict = "learns worse" if high < 0 else "too noisy to tell"
    if low >= -margin_pct:
        verdict = "learns as well"
    more = "; more pairs narrow the interval" if verdict == "too noisy to tell" else ""
    times = _compare_times(before, after, is_rising)
    allowed = f"a loss of {margin_pct:g} % is allowed"
    # an interval of no width would claim that the plans always learn exactly alike
    change = f"{change_pct:+.2f} % ({low:+.2f} to {high:+.2f} %; {allowed})"
    if finals[0] == finals[1]:
        change = f"both trainings of every pair came out equal ({allowed})"
    return {
        "verdict": verdict,
        "text": f"{verdict}: {what} {old:.4g} → {new:.4g}, {change}; {_describe_times(times, n_pairs)}; "
        f"{n_pairs} pairs of trainings{more}",
        "quality_after": new,
        "quality_change_pct": change_pct,
        "quality_change_ci95_pct": (low, high),
        **times,
    }


def _compare_quality(before: Sequence[float], after: Sequence[float], is_rising: bool) -> tuple[float, Interval]:
    """Compute the change of the final quality in % of what it was, paired by seed."""
    scale = (abs(statistics.fmean(before)) or 1.0) * (1 if is_rising else -1)
    changes = [100 * (b - a) / scale for a, b in zip(before, after, strict=True)]
    return statistics.fmean(changes), compute_interval(changes)


def _compare_times(before: Sequence[TrainedRun], after: Sequence[TrainedRun], is_rising: bool) -> dict[str, Any]:
    """Compare the training seconds until both of a pair first showed the quality that both reached."""
    pairs = [(first.curve, second.curve) for first, second in zip(before, after, strict=True)]
    times = [find_times_to_common_quality(pair, is_rising=is_rising)[1] for pair in pairs]
    logs = [[-math.log(seconds) for seconds in side] for side in zip(*times, strict=True)]
    low, high = map(math.exp, compute_contrast_interval(logs, 0, 1))
    before_s, after_s = (statistics.geometric_mean(column) for column in zip(*times, strict=True))
    return {
        "time_before_s": before_s,
        "time_after_s": after_s,
        "time_saved_pct": 100 * (1 - after_s / before_s),
        "time_saved_ci95_pct": (100 * (1 - 1 / low), 100 * (1 - 1 / high)),
    }


def _describe_times(times: Mapping[str, Any], n_pairs: int) -> str:
    (low, high), saved_pct = times["time_saved_ci95_pct"], times["time_saved_pct"]
    before, after = format_duration(times["time_before_s"]), format_duration(times["time_after_s"])
    said = f"training time to the same quality {before} → {after}"
    if low <= 0 <= high:
        return f"{said}, a difference that {n_pairs} pairs cannot tell from none"
    if high < 0:
        return f"{said}, {-saved_pct:.0f} % more ({-high:.0f} to {-low:.0f} %)"
    return f"{said}, {saved_pct:.0f} % less ({low:.0f} to {high:.0f} %)"
