"""Statistics of timings, in numpy alone: intervals, steady state, comparison."""

# ruff: noqa: F401

from fulltilt.stats.alternation import (
    CONFIDENCE,
    Arm,
    Block,
    Comparison,
    Evidence,
    Turns,
    alternate,
    compare_pairs,
    is_look,
    run_group,
    run_round,
)
from fulltilt.stats.decision import MARGIN_PCT, Decision, Verdict, decide, decide_apart
from fulltilt.stats.intervals import (
    compute_contrast_interval,
    compute_interval,
    compute_proportion_interval,
    compute_quantile_interval,
    compute_rate_interval,
    compute_t_quantile,
    compute_trimmed_interval,
)
from fulltilt.stats.sequential import ShareTest, estimate_dependence, judge_share
from fulltilt.stats.steady import find_steady_start
