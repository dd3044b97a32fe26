"""When one arm beats another: interleaved blocks, paired by round, with the baseline against itself as the judge.

Drift and slow moments hit neighbours alike, so arms are compared within a round and never across the session. The
baseline takes part twice; when it differs from itself, no other difference can be trusted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fulltilt.stats.intervals import compute_interval

Verdict = Literal["faster", "slower", "tie", "unclear", "too noisy to tell"]

INDIFFERENCE_PCT = 2.0
MAX_LOOKS = 3
_AGAIN = "\0again"  # key of the baseline's second copy; no arm can be named so


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One arm against the baseline.

    Attributes:
        effect_pct: Change of the block value from baseline to arm; −10 is a tenth less time.
        ci95_pct: Interval of the effect, same unit; nan bounds when there was one pair only. Wider than 95 % where
            ``compare`` may look several times: then all looks together leave out the truth in 5 %.
        verdict: About the arm: "faster" or "slower" than the baseline; "tie" when the interval lies inside the
            indifference zone; "unclear" when it holds both 0 and a difference that would matter.
        n: Pairs (rounds).
    """

    effect_pct: float
    ci95_pct: tuple[float, float]
    verdict: Verdict
    n: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonResult:
    """All arms against the baseline.

    Attributes:
        baseline: Name of the arm the others are compared with.
        comparisons: By arm, the baseline left out.
        a_a: The baseline against itself.
        is_quiet: Whether the baseline agreed with itself; if not, every verdict is "too noisy to tell".
        noise_floor_pct: The largest difference the A/A interval holds.
        block_values: By arm, the block medians in the order they ran, two per round.
        n_rounds: Rounds run; fewer than asked for when a look ended it.
        n_looks: Times the data was looked at.
    """

    baseline: str
    comparisons: dict[str, Comparison]
    a_a: Comparison
    is_quiet: bool
    noise_floor_pct: float
    block_values: dict[str, tuple[float, ...]]
    n_rounds: int
    n_looks: int


def compare_blocks(
    a: ArrayLike,
    b: ArrayLike,
    *,
    confidence: float = 0.95,
    indifference_pct: float = INDIFFERENCE_PCT,
    higher_is_better: bool = False,
) -> Comparison:
    """Compare arm ``b`` with baseline ``a``, paired: ``a[i]`` and ``b[i]`` ran next to each other.

    Args:
        a: One value per block (times by default), or one row of step times per block, of which the median is taken.
        b: The same for the other arm.
        higher_is_better: The values are rates, such as samples per second.

    Raises:
        ValueError: lengths differ, nothing to compare, or a value that is not above 0.
    """
    log_a, log_b = _compute_log_medians(a), _compute_log_medians(b)
    if log_a.size != log_b.size:
        raise ValueError(f"{log_a.size} blocks against {log_b.size}; blocks are compared in pairs")
    return _compare_log_ratios(log_b - log_a, confidence, indifference_pct, higher_is_better)


def compare(
    arms: Sequence[str],
    run_block: Callable[[str], float | Sequence[float]],
    *,
    n_rounds: int = 6,
    n_looks: int = 1,
    indifference_pct: float = INDIFFERENCE_PCT,
    higher_is_better: bool = False,
    on_round: Callable[[int, Mapping[str, Sequence[float]]], None] | None = None,
) -> ComparisonResult:
    """Run the arms interleaved and compare each with the first one, the baseline.

    A round runs every arm and the baseline a second time (the A/A arm), then all of them in reverse order, so that a
    linear drift cancels within each round; the order turns from round to round. With ``n_looks`` above 1 the
    data is looked at that many times at equal distances, each look with its part of the 5 %, and the run ends at a
    look where every verdict is settled.

    Args:
        arms: Names, the baseline first.
        run_block: Runs one block of the named arm → its value, or its step times.
        n_rounds: Rounds at most.
        n_looks: 1 to 3.
        on_round: Called after each round with its number and all block values so far.

    Raises:
        ValueError: fewer than two arms, a name twice, fewer than 2 rounds, or looks outside 1…3.
    """
    _check_design(arms, n_rounds, n_looks)
    order = [*arms, _AGAIN]
    values: dict[str, list[float]] = {arm: [] for arm in order}
    looks = _plan_looks(n_rounds, n_looks)
    result = None
    for done in range(1, looks[-1] + 1):
        _run_round(order, done, arms[0], run_block, values)
        if on_round is not None:
            on_round(done, {arm: tuple(v) for arm, v in values.items() if arm != _AGAIN})
        if done in looks:
            confidence = 1 - 0.05 / len(looks)
            result = _judge(values, arms, looks.index(done) + 1, confidence, indifference_pct, higher_is_better)
            if result.is_quiet and all(c.verdict != "unclear" for c in result.comparisons.values()):
                break
    assert result is not None
    return result


def _run_round(
    order: Sequence[str],
    number: int,
    baseline: str,
    run_block: Callable[[str], float | Sequence[float]],
    values: dict[str, list[float]],
) -> None:
    turn = (number - 1) % len(order)
    turned = [*order[turn:], *order[:turn]]
    for arm in [*turned, *reversed(turned)]:
        value = run_block(baseline if arm == _AGAIN else arm)
        values[arm].append(float(np.median(np.asarray(value, dtype=np.float64))))


def _judge(
    values: Mapping[str, Sequence[float]],
    arms: Sequence[str],
    n_looks: int,
    confidence: float,
    indifference_pct: float,
    higher_is_better: bool,
) -> ComparisonResult:
    logs = {arm: _compute_log_medians(v).reshape(-1, 2).mean(axis=1) for arm, v in values.items()}
    baseline = arms[0]
    found = {
        arm: _compare_log_ratios(logs[arm] - logs[baseline], confidence, indifference_pct, higher_is_better)
        for arm in [*arms[1:], _AGAIN]
    }
    a_a = found.pop(_AGAIN)
    is_quiet = a_a.verdict in ("tie", "unclear")
    if not is_quiet:
        found = {arm: dataclasses.replace(c, verdict="too noisy to tell") for arm, c in found.items()}
    return ComparisonResult(
        baseline=baseline,
        comparisons=found,
        a_a=a_a,
        is_quiet=is_quiet,
        noise_floor_pct=max(abs(bound) for bound in a_a.ci95_pct),
        block_values={arm: tuple(v) for arm, v in values.items() if arm != _AGAIN},
        n_rounds=logs[baseline].size,
        n_looks=n_looks,
    )


def _compare_log_ratios(
    ratios: NDArray[np.float64], confidence: float, indifference_pct: float, higher_is_better: bool
) -> Comparison:
    low, high = (_to_pct(bound) for bound in compute_interval(ratios, confidence))
    return Comparison(
        effect_pct=_to_pct(float(ratios.mean())),
        ci95_pct=(low, high),
        verdict=_decide(low, high, indifference_pct, higher_is_better),
        n=int(ratios.size),
    )


def _decide(low: float, high: float, indifference_pct: float, higher_is_better: bool) -> Verdict:
    if math.isnan(low) or math.isnan(high):
        return "unclear"
    if -indifference_pct <= low and high <= indifference_pct:
        return "tie"
    if low <= 0 <= high:
        return "unclear"
    return "faster" if (low > 0) == higher_is_better else "slower"


def _compute_log_medians(blocks: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(blocks, dtype=np.float64)
    if x.ndim == 2:
        x = np.median(x, axis=1)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"blocks have shape {x.shape}; give one value, or one row of steps, per block")
    if not (np.isfinite(x).all() and x.min() > 0):
        raise ValueError(f"block values must be above 0 and finite, got {x.min()}")
    return np.log(x)


def _to_pct(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def _plan_looks(n_rounds: int, n_looks: int) -> list[int]:
    """Rounds after which to look; at least 2 rounds before the first."""
    return sorted({max(2, round(n_rounds * (k + 1) / n_looks)) for k in range(n_looks)})


def _check_design(arms: Sequence[str], n_rounds: int, n_looks: int) -> None:
    if len(arms) < 2 or len(set(arms)) != len(arms):
        raise ValueError(f"arms are {list(arms)}; give at least two different names, the baseline first")
    if n_rounds < 2:
        raise ValueError(f"n_rounds is {n_rounds}; an interval needs at least 2")
    if not 1 <= n_looks <= MAX_LOOKS:
        raise ValueError(f"n_looks is {n_looks}; between 1 and {MAX_LOOKS}")
