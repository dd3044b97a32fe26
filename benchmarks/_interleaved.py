"""Arms run in turn, block by block, with the baseline against itself as the judge of the session.

The baseline takes part twice. When it differs from itself, no other difference can be trusted, and every verdict is
"too_noisy"; when it does not, its two copies are one arm with twice the blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fulltilt.stats import MARGIN_PCT, Decision, decide

ALPHA = 0.05
MAX_LOOKS = 3
LOOK_SHARES = {1: (1.0,), 2: (0.3, 0.7), 3: (0.2, 0.2, 0.6)}
"""Parts of ``ALPHA`` by look. Early looks end clear cases cheaply; the last one keeps most of the power."""

LOOKS_AT = {1: (1.0,), 2: (0.4, 1.0), 3: (1 / 6, 0.4, 1.0)}
"""Where, as a share of all rounds: a quiet machine needs few, and a noisy one all of them."""

FIRST_LOOK_ROUNDS = 4
"""With 3 rounds, and a fifth of the 5 %, a t interval reaches 10 standard errors to either side."""

N_ROUNDS = 36
"""At most. Looks after 6 and 14 end what is clear, so only a noisy machine pays for them."""

A_A_ALPHA = 0.01
"""What the A/A arm may call a difference by chance. At 5 % it would silence one true difference in twenty."""

_AGAIN = "\0again"  # key of the baseline's second copy; no arm can be named so


class Look(NamedTuple):
    """A look at the data after ``n_rounds``, with an interval of this ``confidence``."""

    n_rounds: int
    confidence: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonResult:
    """All arms against the baseline.

    Attributes:
        baseline: Name of the arm the others are compared with.
        decisions: By arm, the baseline left out.
        a_a: The baseline against itself.
        is_quiet: Whether the baseline agreed with itself; if not, every verdict is "too_noisy".
        noise_floor_pct: The largest difference the A/A interval holds.
        block_values: By arm, the block medians in the order they ran, two per round; the baseline's first copy.
        n_rounds: Rounds run; fewer than asked for when a look ended it.
        n_looks: Times the data was looked at.
    """

    baseline: str
    decisions: dict[str, Decision]
    a_a: Decision
    is_quiet: bool
    noise_floor_pct: float
    block_values: dict[str, tuple[float, ...]]
    n_rounds: int
    n_looks: int


def compare(
    arms: Sequence[str],
    run_block: Callable[[str], float | Sequence[float]],
    *,
    n_rounds: int = N_ROUNDS,
    n_looks: int = MAX_LOOKS,
    margin_pct: float = MARGIN_PCT,
    higher_is_better: bool = False,
    on_round: Callable[[int, Mapping[str, Sequence[float]]], None] | None = None,
) -> ComparisonResult:
    """Run the arms interleaved and compare each with the first one, the baseline.

    A round runs every arm and the baseline a second time (the A/A arm), then all of them in reverse order, so that a
    linear drift cancels within each round; the order turns from round to round. The run ends at a look where every
    verdict is settled.

    Args:
        arms: Names, the baseline first.
        run_block: Runs one block of the named arm → its value, or its step times.
        n_rounds: Rounds at most.
        n_looks: 1 to 3.
        margin_pct: Differences inside it do not matter; the narrower it is, the more rounds a tie takes.
        on_round: Called after each round with its number and all block values so far.

    Raises:
        ValueError: fewer than two arms, a name twice, fewer than 2 rounds, or looks outside 1…3.
    """
    if len(arms) < 2 or len(set(arms)) != len(arms):
        raise ValueError(f"arms are {list(arms)}; give at least two different names, the baseline first")
    looks = plan_looks(n_rounds, n_looks)
    order = [*arms, _AGAIN]
    values: dict[str, list[float]] = {arm: [] for arm in order}
    result = None
    for done in range(1, n_rounds + 1):
        _run_round(order, done, arms[0], run_block, values)
        if on_round is not None:
            on_round(done, {arm: tuple(v) for arm, v in values.items() if arm != _AGAIN})
        look = find_look(looks, done)
        if look is not None:
            result = _judge(values, arms, look, looks.index(look) + 1, margin_pct, higher_is_better)
            if all(decision.is_settled for decision in result.decisions.values()):
                break
    assert result is not None
    return result


def plan_looks(n_rounds: int, n_looks: int = MAX_LOOKS) -> tuple[Look, ...]:
    """Looks after a sixth, two fifths and all of the rounds; fewer looks where there are too few rounds.

    The 5 % are split over the looks, a fifth for each early one (three tenths for the one of two), so that all together
    leave out the truth in 5 % at most, whatever the correlation between looks and wherever the run ends.

    Raises:
        ValueError: fewer than 2 rounds, or looks outside 1…3.

    Source: Dunn, Multiple comparisons among means (JASA 56, 1961). The boundaries of group-sequential trials (Pocock
    1977; O'Brien and Fleming 1979) gain little over it with three looks, and rest on known variance and normal data.
    """
    if n_rounds < 2:
        raise ValueError(f"n_rounds is {n_rounds}; an interval needs at least 2")
    if not 1 <= n_looks <= MAX_LOOKS:
        raise ValueError(f"n_looks is {n_looks}; between 1 and {MAX_LOOKS}")
    at = sorted({max(FIRST_LOOK_ROUNDS, round(n_rounds * share)) for share in LOOKS_AT[n_looks]})
    at = [*[n for n in at if n < n_rounds], n_rounds]
    return tuple(Look(n, 1 - ALPHA * share) for n, share in zip(at, LOOK_SHARES[len(at)], strict=True))


def find_look(looks: Sequence[Look], n_rounds: int) -> Look | None:
    """The look that is due after ``n_rounds``, if one is."""
    return next((look for look in looks if look.n_rounds == n_rounds), None)


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
    look: Look,
    n_looks: int,
    margin_pct: float,
    higher_is_better: bool,
) -> ComparisonResult:
    rounds = {arm: _split_rounds(blocks) for arm, blocks in values.items()}
    own, again = rounds[arms[0]], rounds[_AGAIN]
    a_a = decide(own, again, margin_pct, confidence=1 - A_A_ALPHA, higher_is_better=higher_is_better)
    is_quiet = a_a.verdict in ("tie", "too_noisy")
    both = np.hstack([own, again])
    found = {
        arm: decide(both, rounds[arm], margin_pct, confidence=look.confidence, higher_is_better=higher_is_better)
        for arm in arms[1:]
    }
    if not is_quiet:
        found = {arm: dataclasses.replace(decision, verdict="too_noisy") for arm, decision in found.items()}
    return ComparisonResult(
        baseline=arms[0],
        decisions=found,
        a_a=a_a,
        is_quiet=is_quiet,
        noise_floor_pct=max(abs(bound) for bound in a_a.ci_pct),
        block_values={arm: tuple(v) for arm, v in values.items() if arm != _AGAIN},
        n_rounds=len(own),
        n_looks=n_looks,
    )


def _split_rounds(blocks: Sequence[float]) -> NDArray[np.float64]:
    """One row of two blocks per round."""
    return np.asarray(blocks, dtype=np.float64).reshape(-1, 2)
