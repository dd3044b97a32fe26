"""The batch sizes that ``memory_prediction`` measures before it predicts: doubled until a peak comes as predicted.

A search does not probe like this. Its real points are the probes of the device that it makes for speed, few of them
far below the largest batch that fits; here they are kept small, so that the prediction has far to go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from fulltilt.tuner.search.model.memory import SETTLED_PCT, TELLING_SHARE, MemoryCurve


def measure_until_settled(
    curve: MemoryCurve, candidates: Sequence[int], measure: Callable[[int], float]
) -> MemoryCurve:
    """Add real points to the curve by doubling, until it is settled or the candidates end."""
    while (batch_size := choose_next(curve, candidates)) is not None:
        curve = dataclasses.replace(curve, real={**curve.real, batch_size: measure(batch_size)})
    return curve


def choose_next(curve: MemoryCurve, candidates: Sequence[int]) -> int | None:
    """Return the next batch size to measure; None where the last one brought nothing new, or none is left above it."""
    left = sorted(set(candidates) - set(curve.real))
    if not left or is_settled(curve):
        return None
    if not curve.real:
        return _find_telling(curve.fake, left)
    last = max(curve.real)
    above = [c for c in left if c > last]
    return next((c for c in above if c >= 2 * last), max(above, default=None))


def is_settled(curve: MemoryCurve) -> bool:
    """Tell whether another point would add nothing.

    Without fake points: the slope repeated. With them: the last peak came out as predicted without it, while the part
    that grows with the batch was plain to see.
    """
    if not curve.fake:
        return curve.is_settled
    *before, last = list(curve.real) or [0]
    if not before:
        return False
    growth = (curve.real[last] - curve.real[before[-1]]) / (last - before[-1]) * last
    if growth <= TELLING_SHARE * curve.real[last]:
        return False
    predicted = dataclasses.replace(curve, real={b: curve.real[b] for b in before}).predict_gib(last)
    return abs(predicted.gib / curve.real[last] - 1) <= SETTLED_PCT / 100


def _find_telling(fake: Mapping[int, float], candidates: Sequence[int]) -> int:
    """Return the smallest batch whose fake peak shows growth, else the largest; without fake ones the smallest.

    The slope at a candidate is that to the one below it, at the smallest that to the one above.
    """
    if not fake or len(candidates) < 2:
        return candidates[0]
    for batch, other in zip(candidates, [candidates[1], *candidates], strict=False):
        slope = (fake[batch] - fake[other]) / (batch - other)
        if slope * batch > TELLING_SHARE * fake[batch]:
            return batch
    return candidates[-1]
