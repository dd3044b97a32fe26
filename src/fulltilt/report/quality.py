"""Tell which way a metric gets better, and how long runs took to the same quality."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Direction = Literal["rising", "falling"]
Curve = Sequence[tuple[float, float]]  # (training seconds, quality) of every evaluation, in order

RISING_WORDS = frozenset({"accuracy", "acc", "top1", "top5", "purity", "nmi", "f1", "auc", "recall", "precision"})
FALLING_WORDS = frozenset({"loss", "perplexity", "error", "mse", "mae", "rmse"})


def find_direction(metric: str) -> Direction | None:
    """Tell whether a metric gets better rising or falling, by the words of its name; None: not known."""
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if words & FALLING_WORDS:
        return "falling"
    return "rising" if words & RISING_WORDS else None


def find_times_to_common_quality(curves: Sequence[Curve], *, is_rising: bool) -> tuple[float, list[float]]:
    """Find the best quality that every run reached → it, and the training seconds when each run first showed it.

    Args:
        curves: One a run, none of them empty.
    """
    sign = 1 if is_rising else -1
    signed = [[(seconds, sign * quality) for seconds, quality in curve] for curve in curves]
    target = min(max(quality for _, quality in curve) for curve in signed)
    return sign * target, [next(seconds for seconds, quality in curve if quality >= target) for curve in signed]
