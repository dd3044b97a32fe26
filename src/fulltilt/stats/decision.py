"""Decide whether one setting is faster than another, from the logarithms of their ratios.

Drift and slow moments hit neighbours alike, so settings ("arms") are compared within a round in which all of them ran.
The unit of replication is the round (of blocks, or of processes), never the step: steps next to each other are
correlated, and Welch's test on 40 + 40 of them calls two equal arms different in 16 to 33 % of the cases.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fulltilt.stats.intervals import compute_t_quantile, compute_trimmed_interval, count_trimmed

Verdict = Literal["faster", "slower", "tie", "too_noisy"]

MARGIN_PCT = 2.0
"""Differences below this are not worth another plan."""

ALPHA = 0.05
DETECTION_POWER = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One arm against the baseline.

    The verdict is about the arm. "tie": the whole interval lies inside the margin. "faster", "slower": it leaves out 0,
    and reaches beyond the margin. "too_noisy": it holds 0 and a difference that would matter.
    """

    verdict: Verdict
    effect_pct: float  # change of the value from baseline to arm; −10 is a tenth less time, or a tenth less rate
    ci_pct: tuple[float, float]  # interval of the effect; nan bounds where there was one round only
    confidence: float  # of that interval
    detectable_pct: float  # the smallest true difference that 80 % of such comparisons tell from 0; nan for one round
    margin_pct: float  # differences inside it do not matter
    n: int  # rounds; for runs that are not paired, those of the arm with fewer

    @property
    def is_settled(self) -> bool:
        """Whether no more rounds are needed: the interval leaves out 0, or every difference that matters."""
        return self.verdict != "too_noisy"


def decide(
    rounds_a: ArrayLike,
    rounds_b: ArrayLike,
    margin_pct: float = MARGIN_PCT,
    *,
    confidence: float = 1 - ALPHA,
    higher_is_better: bool = False,
) -> Decision:
    """Decide between arm ``b`` and baseline ``a`` from rounds in which both ran next to each other.

    Below 15 rounds the interval is Student's t of the mean log ratio. From there on it is that of the mean without the
    highest and the lowest fifth of the rounds, so that a few rounds that other work broke into do not hide the rest.

    Args:
        rounds_a: Shape (rounds,) or (rounds, values): the baseline's value in each round (a block's median step time,
            a run's samples per second), or several, of which the geometric mean is taken.
        rounds_b: The same for the other arm.
        confidence: Of the interval; higher than 0.95 at each look of several.
        higher_is_better: The values are rates.

    Raises:
        ValueError: rounds differ in number, nothing to compare, a value that is not above 0, or a margin below 0.
    """
    log_a, log_b = _compute_log_rounds(rounds_a), _compute_log_rounds(rounds_b)
    if log_a.size != log_b.size:
        raise ValueError(f"{log_a.size} rounds against {log_b.size}; rounds are compared in pairs")
    n = log_a.size
    interval, df = compute_trimmed_interval(log_b - log_a, confidence), max(1, n - 2 * count_trimmed(n) - 1)
    return _build_decision(interval, n, df, confidence, margin_pct, higher_is_better)


def decide_apart(
    runs_a: ArrayLike,
    runs_b: ArrayLike,
    *,
    confidence: float = 1 - ALPHA,
    higher_is_better: bool = False,
) -> Decision:
    """Decide between two sets of runs that were not interleaved, by the spread between the runs of each.

    What changed on the machine between the two sets is part of the effect.

    Args:
        runs_a, runs_b: One value per independent run, all above 0; the sets may differ in size.

    Raises:
        ValueError: no runs, or a value that is not above 0.

    Source: Welch, The generalization of Student's problem (Biometrika 34, 1947), on log values; degrees of freedom
    rounded down.
    """
    log_a, log_b = _compute_log_rounds(runs_a), _compute_log_rounds(runs_b)
    effect, n = float(log_b.mean() - log_a.mean()), min(log_a.size, log_b.size)
    half, df = math.nan, 1
    if n >= 2:
        squares = [float(x.var(ddof=1)) / x.size for x in (log_a, log_b)]
        total = sum(squares)
        parts = sum(s * s / (x.size - 1) for s, x in zip(squares, (log_a, log_b), strict=True))
        df = max(1, math.floor(total * total / parts)) if parts > 0 else log_a.size + log_b.size - 2
        half = compute_t_quantile(0.5 + confidence / 2, df) * math.sqrt(total)
    interval = effect, effect - half, effect + half
    return _build_decision(interval, n, df, confidence, MARGIN_PCT, higher_is_better)


def _build_decision(
    logs: tuple[float, float, float], n: int, df: int, confidence: float, margin_pct: float, higher_is_better: bool
) -> Decision:
    """Build a decision from effect and interval given as log ratios.

    Source of the minimum detectable effect: Bloom (Evaluation Review 19, 1995).
    """
    if not margin_pct >= 0:
        raise ValueError(f"margin_pct is {margin_pct}; give 0 or more")
    effect_pct, low_pct, high_pct = (100 * math.expm1(log) for log in logs)
    verdict: Verdict = "too_noisy"  # also where the bounds are nan
    if -margin_pct <= low_pct and high_pct <= margin_pct:
        verdict = "tie"
    elif low_pct > 0 or high_pct < 0:
        verdict = "faster" if (low_pct > 0) == higher_is_better else "slower"
    quantile = compute_t_quantile(0.5 + confidence / 2, df)
    error = (logs[2] - logs[1]) / 2 / quantile
    return Decision(
        verdict=verdict,
        effect_pct=effect_pct,
        ci_pct=(low_pct, high_pct),
        confidence=confidence,
        detectable_pct=100 * math.expm1(error * (quantile + compute_t_quantile(DETECTION_POWER, df))),
        margin_pct=margin_pct,
        n=n,
    )


def _compute_log_rounds(rounds: ArrayLike) -> NDArray[np.float64]:
    """Compute one log value per round."""
    x = np.asarray(rounds, dtype=np.float64)
    if x.ndim not in (1, 2) or x.size == 0:
        raise ValueError(f"rounds have shape {x.shape}; give one value, or one row of values, per round")
    if not (np.isfinite(x).all() and x.min() > 0):
        raise ValueError(f"values must be above 0 and finite, got {x[~(np.isfinite(x) & (x > 0))].ravel()[0]}")
    logs = np.log(x)
    return logs if x.ndim == 1 else logs.mean(axis=1)
