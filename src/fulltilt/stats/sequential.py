"""Decide by a sequential test whether the share of late responses is below a limit.

A bet against "the share is at least the limit" is multiplied up over the responses; while that is true its value never
grows on average, so it ever reaches 1 / alpha with probability alpha at most (Ville's inequality), however often one
looks. Another bet goes against "at most the limit". Each bet is a mixture of likelihood ratios, one for each share that
it is good at. Their factors are linear in the outcome, so the late share of a block of responses can be bet on as well
as a single response.

Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting (2024); Wald (1945) for one.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Decision = Literal["accepted", "refused", "undecided"]
Floats = NDArray[np.float64]

ALPHA = 0.01
BETTER, WORSE = (0.1, 0.2, 0.3, 0.45, 0.65), (1.5, 2.5, 5.0, 12.0, 40.0)
"""Odds of being late, in multiples of those of the limit, that the two mixtures are good at, in equal parts."""
RESERVE = 1.25
"""How many times 1 / alpha a bet has to reach: less than the bound, since dependence is only estimated."""
MAX_LAG_SHARE = 0.25  # of the record: farther apart too few pairs are left to tell


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShareTest:
    """What a record of responses says about the share of late ones.

    Attributes:
        evidence_for: Value of the bet that the share is below the limit; decides from 1.25 / alpha on.
        evidence_against: Value of the bet that it is above the limit.
        n_blocks: Blocks of responses that were bet on; single responses where they do not depend on each other.
    """

    decision: Decision
    evidence_for: float
    evidence_against: float
    n_blocks: int


def judge_share(is_late: ArrayLike, limit_share: float, *, alpha: float = ALPHA, dependence: float = 1.0) -> ShareTest:
    """Decide whether the share of late responses is below ``limit_share``, from all responses so far, in their order.

    Args:
        alpha: Probability at most of a wrong decision of either kind, over all looks together.
        dependence: How many successive responses carry as much information as one; blocks are that long.
    """
    shares = compute_block_shares(np.asarray(is_late, dtype=np.float64), dependence)
    values = [mix_bets(np.log(_bet(shares, limit_share, odds)).sum(axis=0)) for odds in (BETTER, WORSE)]
    accepts, refuses = (float(value) >= compute_threshold(alpha) for value in values)
    return ShareTest(
        decision="accepted" if accepts else "refused" if refuses else "undecided",
        evidence_for=math.exp(min(values[0], 700.0)),
        evidence_against=math.exp(min(values[1], 700.0)),
        n_blocks=len(shares),
    )


def compute_threshold(alpha: float = ALPHA) -> float:
    """Compute the logarithm of what a bet has to be worth to decide."""
    return math.log(RESERVE / alpha)


def compute_block_shares(is_late: Floats, dependence: float) -> Floats:
    """Compute the late share of each whole block of ``dependence`` responses, which need not be a whole number."""
    n_blocks = int(len(is_late) / dependence)
    if n_blocks == 0:
        return np.empty(0)
    edges = (np.arange(n_blocks + 1) * dependence).astype(np.int64)
    return np.diff(np.concatenate([[0.0], np.cumsum(is_late)])[edges]) / np.diff(edges)


def compute_factors(limit_share: float, odds: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Compute what a late response and one in time multiply each bet of a mixture with: likelihood ratios."""
    odds_late = np.array(odds) * limit_share / (1 - limit_share)
    share = odds_late / (1 + odds_late)
    return share / limit_share, (1 - share) / (1 - limit_share)


def mix_bets(log_values: Floats) -> Floats:
    """Return the logarithm of the mean of bets that are given by their logarithms, over the last axis."""
    return np.logaddexp.reduce(log_values, axis=-1) - math.log(log_values.shape[-1])


def _bet(shares: Floats, limit_share: float, odds: tuple[float, ...]) -> Floats:
    late, in_time = compute_factors(limit_share, odds)
    return in_time + shares[:, None] * (late - in_time)


def compute_queue_dependence(utilization: float) -> float:
    """Compute how many successive waits in a queue carry as much information as one: the busier, the more.

    Returns:
        1 or more; infinite where requests come as fast as they are answered.

    Source: the relaxation time of the M/M/1 queue, Cohen, The Single Server Queue (1982), II.2.
    """
    return 1 + utilization / (1 - math.sqrt(utilization)) ** 2 if utilization < 1 else math.inf


def estimate_dependence(values: ArrayLike) -> float:
    """Estimate how many successive values carry as much information as one independent value; 1 or more.

    Sums autocorrelations in pairs of lags for as long as these are positive (Geyer's initial positive sequence, 1992).
    """
    x = np.asarray(values, dtype=np.float64)
    x = x - x.mean() if len(x) else x
    if len(x) < 8 or not np.any(np.abs(x) > 1e-12):
        return 1.0
    spectrum = np.abs(np.fft.rfft(x, 2 * len(x))) ** 2
    correlation = np.fft.irfft(spectrum)[: max(2, int(MAX_LAG_SHARE * len(x))) // 2 * 2]
    pairs = (correlation / correlation[0]).reshape(-1, 2).sum(axis=1)
    n_positive = int(np.argmin(pairs > 0)) if (pairs <= 0).any() else len(pairs)
    return max(1.0, float(2 * pairs[:n_positive].sum() - 1))
