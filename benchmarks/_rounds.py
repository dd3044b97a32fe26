"""Interleaved blocks: every arm runs in every round, forwards and then backwards, from a start drawn anew.

Slow drift of the machine (clock, temperature, neighbours) then falls on all arms alike and cancels in the difference of
two arms of one round. The round is the unit of replication.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks._schema import Arm, build_arm

B = TypeVar("B")
Round = dict[str, tuple[B, B]]


def order_blocks(names: Sequence[str], rng: random.Random) -> list[str]:
    """Return each name twice, as a palindrome: a b c c b a, turned to a random start."""
    start = rng.randrange(len(names))
    turned = [*names[start:], *names[:start]]
    return [*turned, *reversed(turned)]


def run_rounds(names: Sequence[str], run_block: Callable[[str], B], *, n_rounds: int, seed: int = 0) -> list[Round[B]]:
    """Return both blocks of every arm, round by round."""
    rng = random.Random(seed)
    rounds = []
    for _ in range(n_rounds):
        blocks: dict[str, list[B]] = {name: [] for name in names}
        for name in order_blocks(names, rng):
            blocks[name].append(run_block(name))
        rounds.append({name: (first, second) for name, (first, second) in blocks.items()})
    return rounds


def compute_means(rounds: Sequence[Round[B]], arm: str, read: Callable[[B], float] = float) -> list[float]:
    """Return one figure a round: the mean of the arm's two blocks."""
    return [sum(map(read, blocks[arm])) / 2 for blocks in rounds]


def compute_differences(
    rounds: Sequence[Round[B]], arm: str, reference: str, read: Callable[[B], float] = float
) -> list[float]:
    """Return one figure a round: the arm less the reference."""
    pairs = zip(compute_means(rounds, arm, read), compute_means(rounds, reference, read), strict=True)
    return [value - base for value, base in pairs]


def compute_ratios(
    rounds: Sequence[Round[B]], arm: str, reference: str, read: Callable[[B], float] = float
) -> list[float]:
    """Return one figure a round: the arm over the reference."""
    pairs = zip(compute_means(rounds, arm, read), compute_means(rounds, reference, read), strict=True)
    return [value / base for value, base in pairs]


def compute_geometric_ratios(
    rounds: Sequence[Round[B]], arm: str, reference: str, read: Callable[[B], float] = float
) -> list[float]:
    """Return one figure a round: the arm over the reference, by the geometric means of their blocks."""
    return [math.exp(gap) for gap in compute_differences(rounds, arm, reference, lambda block: math.log(read(block)))]


def compute_differences_pct(
    rounds: Sequence[Round[B]], arm: str, reference: str, read: Callable[[B], float] = float
) -> list[float]:
    """Return one figure a round: the arm less the reference, as a share of the reference."""
    return [100 * (ratio - 1) for ratio in compute_ratios(rounds, arm, reference, read)]


def build_arms(
    rounds: Sequence[Round[B]],
    read: Callable[[B], float] = float,
    *,
    notes: Mapping[str, str | None] = {},
    **common: Any,
) -> list[Arm]:
    """Build an arm for each contestant, a figure a round; ``common`` is what they share (case, metric, unit)."""
    return [build_arm(compute_means(rounds, arm, read), arm=arm, note=notes.get(arm), **common) for arm in rounds[0]]
