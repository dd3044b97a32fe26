"""Estimate percentiles of responses that depend on each other, with intervals."""

import dataclasses
import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fulltilt.infer.load.arrivals import count_needed_requests
from fulltilt.stats import compute_quantile_interval

Verdict = Literal["met", "missed", "not proven"]
Floats = NDArray[np.float64]
NEVER_S = 1e9  # stands for an answer that never came, where a figure has to be finite


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    measured: float
    ci95: tuple[float, float]


def estimate_quantile(ordered: Floats, quantile: float, dependence: float = 1.0) -> Estimate:
    """Estimate a quantile of ordered values with its 95 % interval; infinite values count as the largest.

    The upper bound is infinite where there are too few independent values for one.
    """
    independent = thin(np.minimum(ordered, NEVER_S), dependence)
    low, high = compute_quantile_interval(independent, quantile)
    high = high if len(independent) >= count_needed_requests(quantile) else math.inf
    measured = float(np.quantile(ordered, quantile, method="inverted_cdf"))
    low, high = (math.inf if bound >= NEVER_S else bound for bound in (low, high))
    return Estimate(measured=measured, ci95=(low, high))


def thin(ordered: Floats, dependence: float) -> Floats:
    """Reduce values to as many as are independent, keeping their distribution."""
    n = max(1, int(len(ordered) / dependence))
    return ordered if n == len(ordered) else np.quantile(ordered, (np.arange(n) + 0.5) / n, method="inverted_cdf")
