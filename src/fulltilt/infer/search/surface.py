"""The service surface: how long a batch of so many samples of such a length takes."""

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from fulltilt.infer.search.simulate import Service

BATCHES = (1, 2, 4, 16, 64)  # that are measured; between them it is close to linear
COARSE_BATCHES = (1, 16)
SHARES = (0.25, 0.75, 1.0)  # of the samples: the lengths that are measured are the longest of these
MAX_CALL_S = 1.0  # slower calls are not measured: smaller batches are as fast a sample long before
Point = tuple[int, int]
"""A shape that is measured: length and samples of a batch, all of that length."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """Seconds of a call at the measured points; between them linear, beyond them as between the last two."""

    points: tuple[Point, ...]
    seconds: tuple[float, ...]

    def build_service(self) -> Service:
        rows: dict[int, list[tuple[int, float]]] = {}
        for (length, batch), seconds in sorted(zip(self.points, self.seconds, strict=True)):
            rows.setdefault(length, []).append((batch, seconds))

        @functools.cache  # a simulation asks a million times
        def estimate_s(batch: int, length: int) -> float:
            return _interpolate([(at, _interpolate(row, batch)) for at, row in rows.items()], length)

        return Service(estimate_s=estimate_s)


def plan_points(lengths: Sequence[int], one_s: float, *, is_coarse: bool, max_batch: int) -> list[Point]:
    """Plan the points of a surface.

    Args:
        lengths: Of real samples.
        one_s: Seconds of one sample of the longest length in eager mode.
        is_coarse: A few points, enough to see who has no chance.
    """
    batches, shares = (COARSE_BATCHES, SHARES[1:]) if is_coarse else (BATCHES, SHARES)
    chosen = np.unique(np.quantile(lengths, shares, method="higher")).tolist()
    most = {length: min(max_batch, MAX_CALL_S / one_s * max(lengths) / length) for length in chosen}
    return [(length, batch) for length in chosen for batch in batches if batch <= max(1, most[length])]


def _interpolate(line: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolate between neighbours; beyond the ends go on from the last two, never below a tenth of the nearest."""
    if len(line) == 1:
        return line[0][1] * max(1.0, at / line[0][0])
    i = min(max(bisect.bisect_left(line, at, key=lambda each: each[0]), 1), len(line) - 1)
    (x0, y0), (x1, y1) = line[i - 1], line[i]
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), min(y0, y1) / 10)
