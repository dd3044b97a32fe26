"""Where warm-up ends, by evidence in the timings."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

TOLERANCE_PCT = 2.0
MAX_ALLOWANCE_PCT = 5.0
"""Noise widens the allowance up to here: a shorter series cannot tell more noise than this from a ramp."""

_MAX_CANDIDATES = 256
_Z = 3.0


def find_steady_start(samples: ArrayLike, *, tolerance_pct: float = TOLERANCE_PCT, min_steady: int = 3) -> int:
    """Index of the first sample after warm-up; ``len(samples)`` while there is no steady tail yet.

    The longest tail is taken whose first and second half agree: their medians differ by no more than
    ``tolerance_pct``, or three standard errors where the samples are noisier than that, up to 5 %. Warm samples left at
    the head of this tail are cut off. A tail counts only when it is at least a third as long as what came
    before it; otherwise any three neighbours on a slow ramp would look steady.

    Single slow samples are not warm-up: comparisons use medians, and the head is judged after a running
    median of three.

    Args:
        samples: Times of steps or blocks, in order, in any unit.
        tolerance_pct: Halves that differ by less than this are the same.
        min_steady: Fewest samples a steady tail can have.

    Raises:
        ValueError: a sample is not finite, or ``min_steady`` is below 2.

    Cost: below 1 ms for a steady series, 30 ms for one of 256 samples that never settles; above 256 samples neighbours
    are joined first.
    """
    x = np.asarray(samples, dtype=np.float64).ravel()
    if not np.isfinite(x).all():
        raise ValueError("samples must be finite; leave out steps that were not measured")
    if min_steady < 2:
        raise ValueError(f"min_steady is {min_steady}; one sample cannot agree with itself, give 2 or more")
    if x.size < min_steady:
        return int(x.size)
    width = math.ceil(x.size / _MAX_CANDIDATES)
    if width > 1:
        return _find_in_joined(x, width, tolerance_pct, min_steady)
    return _find_start(x, tolerance_pct, min_steady)


def _find_in_joined(x: NDArray[np.float64], width: int, tolerance_pct: float, min_steady: int) -> int:
    n_joined = x.size // width
    lead = x.size - n_joined * width  # the remainder is counted as warm-up: the end is what matters
    start = _find_start(np.median(x[lead:].reshape(n_joined, width), axis=1), tolerance_pct, min_steady)
    return int(x.size) if start == n_joined else lead + start * width if start else 0


def _find_start(x: NDArray[np.float64], tolerance_pct: float, min_steady: int) -> int:
    shortest = max(min_steady, math.ceil(x.size / 4))
    for start in range(x.size - shortest + 1):
        tail = x[start:]
        if _halves_agree(tail, tolerance_pct):
            return min(start + _count_warm_head(tail, tolerance_pct), x.size - min_steady)
    return int(x.size)


def _halves_agree(tail: NDArray[np.float64], tolerance_pct: float) -> bool:
    half = tail.size // 2
    gap = abs(float(np.median(tail[:half]) - np.median(tail[-half:])))
    level = abs(float(np.median(tail)))
    standard_error = 1.2533 * _estimate_noise(tail) * math.sqrt(2 / half)
    allowance = max(tolerance_pct / 100 * level, min(_Z * standard_error, MAX_ALLOWANCE_PCT / 100 * level))
    return gap <= allowance


def _count_warm_head(tail: NDArray[np.float64], tolerance_pct: float) -> int:
    """How many samples at the head of the tail precede the first three in a row within the band of its second half.

    An excursion later on is noise, which a band of three deviations meets often in a long or correlated series.
    """
    half = tail.size // 2
    level = float(np.median(tail[-half:]))
    band = max(tolerance_pct / 100 * abs(level), _Z * _estimate_noise(tail))
    smooth = tail.copy()
    smooth[1:-1] = np.median(np.stack([tail[:-2], tail[1:-1], tail[2:]]), axis=0)
    inside = np.abs(smooth - level) <= band
    settled = np.flatnonzero(inside[:-2] & inside[1:-1] & inside[2:])
    return min(int(settled[0]), half) if settled.size else half


def _estimate_noise(x: NDArray[np.float64]) -> float:
    """Standard deviation from successive differences: a ramp does not inflate it, nor do a few slow samples."""
    steps = np.diff(x)
    return float(1.4826 * np.median(np.abs(steps - np.median(steps))) / math.sqrt(2))
