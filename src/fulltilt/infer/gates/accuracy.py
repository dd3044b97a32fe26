"""Hold the answers of a candidate against those of the same model in eager fp32."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fulltilt.infer.joining import Sample
from fulltilt.infer.manifest import Accuracy
from fulltilt.report.quality import find_direction
from fulltilt.stats import compute_interval

EQUAL_DB = 200.0


def compare_outputs(reference: Sequence[Sample], here: Sequence[Sample]) -> tuple[float, float]:
    """Return the signal-to-quantisation-noise ratio in dB, the smallest over the outputs, and the largest error.

    An output that is not finite, or of another shape, is infinitely wrong.
    """
    ratios_db, largest = [], 0.0
    for theirs, ours in zip(zip(*reference, strict=True), zip(*here, strict=True), strict=True):
        signal, found = (np.concatenate([np.ravel(array) for array in each]).astype(float) for each in (theirs, ours))
        if [array.shape for array in theirs] != [array.shape for array in ours] or not np.isfinite(found).all():
            return -math.inf, math.inf
        error = np.abs(found - signal)
        largest = max(largest, float(error.max(initial=0.0)))
        noise, power = float(error @ error), float(signal @ signal)
        ratios_db.append(EQUAL_DB if not noise else 10 * math.log10(power / noise) if power else -math.inf)
    return min(EQUAL_DB, *ratios_db), largest


def compute_changed_labels_pct(reference: Sequence[Sample], here: Sequence[Sample]) -> float | None:
    """Return the share of samples whose largest score is that of another class; None: the output holds no scores."""
    if reference[0][0].ndim != 1 or reference[0][0].size < 2:
        return None
    changed = [int(a[0].argmax()) != int(b[0].argmax()) for a, b in zip(reference, here, strict=True)]
    return 100 * sum(changed) / len(changed)


def compute_metric_drop(name: str, fp32: Sequence[float], here: Sequence[float]) -> dict[str, Any]:
    """Return a metric of both models, and the interval of its loss over pairs of samples, for ``Accuracy``.

    Where nothing says which way the metric points, any change is a loss.
    """
    change = np.asarray(fp32, dtype=np.float64) - np.asarray(here, dtype=np.float64)
    direction = find_direction(name)
    low, high = compute_interval(change if direction != "falling" else -change)
    if direction is None:
        low, high = 0.0 if low <= 0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high))
    means = {"metric_fp32": float(np.mean(fp32)), "metric_here": float(np.mean(here))}
    return {"metric": name, "metric_drop_ci95": (low, high), **means}


def judge_accuracy(accuracy: Accuracy, min_sqnr_db: float, max_metric_drop_pct: float) -> list[str]:
    """Say what of the accuracy is not proven to be within its limits; empty where all is."""
    failures = []
    if not accuracy.sqnr_db >= min_sqnr_db:
        failures.append(
            f"accuracy: the error is {accuracy.sqnr_db:.1f} dB below the outputs of eager fp32, "
            f"inference.min_sqnr_db asks for {min_sqnr_db:g}"
        )
    if accuracy.metric_drop_ci95 is not None and accuracy.metric_fp32 is not None:
        limit = abs(accuracy.metric_fp32) * max_metric_drop_pct / 100
        low, high = accuracy.metric_drop_ci95
        if not high <= limit:
            failures.append(
                f"accuracy: {accuracy.metric} loses {low:.4g} to {high:.4g} of {accuracy.metric_fp32:.4g}, "
                f"inference.max_metric_drop_pct {max_metric_drop_pct:g} allows {limit:.4g}"
            )
    return failures
