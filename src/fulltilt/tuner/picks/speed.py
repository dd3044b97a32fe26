"""Read speeds of whole runs, and how far the machine disturbed them while they were timed."""

import math
from collections.abc import Sequence

import numpy as np

from fulltilt.records import Trial

PRIOR_ERROR = 0.01  # of the logarithm: what processes of one plan differ by on a quiet machine, with drift
NOISY = 0.025  # of the logarithm: runs whose own blocks leave as much open; a quiet machine has less than half of it


def read_rate(row: Trial) -> float:
    return row.samples_per_s or 0.0


def estimate_error(run: Trial) -> float:
    """Estimate the standard error of one run's log samples/s from its 95 % interval, or use a prior."""
    if run.samples_per_s_ci95 is None or not run.samples_per_s:
        return PRIOR_ERROR
    low, high = run.samples_per_s_ci95
    width = math.log(high / low) if low > 0 else (high - low) / run.samples_per_s
    return width / (2 * 1.96)


def measure_noise(runs: Sequence[Trial]) -> float:
    """Take the median ``estimate_error``: how much this machine disturbs a run while it is timed. 0 without runs."""
    return float(np.median([estimate_error(run) for run in runs])) if runs else 0.0


def is_noisy(runs: Sequence[Trial]) -> bool:
    """Return whether the median error within runs exceeds what an idle machine shows."""
    return measure_noise(runs) > NOISY
