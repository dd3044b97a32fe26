"""Statistics of timings, in numpy alone: intervals, steady state, interleaved comparison."""

from fulltilt.stats.decision import (
    MARGIN_PCT,
    Decision,
    Look,
    Verdict,
    decide,
    decide_apart,
    find_look,
    plan_looks,
)
from fulltilt.stats.interleave import ComparisonResult, compare
from fulltilt.stats.intervals import (
    compute_contrast_interval,
    compute_interval,
    compute_proportion_interval,
    compute_quantile_interval,
    compute_rate_interval,
    compute_t_quantile,
    compute_trimmed_interval,
)
from fulltilt.stats.steady import find_steady_start

__all__ = [
    "MARGIN_PCT",
    "ComparisonResult",
    "Decision",
    "Look",
    "Verdict",
    "compare",
    "compute_contrast_interval",
    "compute_interval",
    "compute_proportion_interval",
    "compute_quantile_interval",
    "compute_rate_interval",
    "compute_t_quantile",
    "compute_trimmed_interval",
    "decide",
    "decide_apart",
    "find_look",
    "find_steady_start",
    "plan_looks",
]
