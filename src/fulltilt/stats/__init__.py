"""Statistics of timings, in numpy alone: intervals, steady state, interleaved comparison, ties."""

from fulltilt.stats.compare import (
    Comparison,
    ComparisonResult,
    Verdict,
    compare,
    compare_blocks,
)
from fulltilt.stats.intervals import (
    compute_interval,
    compute_proportion_interval,
    compute_quantile_interval,
    compute_rate_interval,
    compute_t_quantile,
)
from fulltilt.stats.steady import find_steady_start
from fulltilt.stats.ties import find_ties

__all__ = [
    "Comparison",
    "ComparisonResult",
    "Verdict",
    "compare",
    "compare_blocks",
    "compute_interval",
    "compute_proportion_interval",
    "compute_quantile_interval",
    "compute_rate_interval",
    "compute_t_quantile",
    "find_steady_start",
    "find_ties",
]
