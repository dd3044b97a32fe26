"""Rounds of blocks as ``stats.alternation`` runs them, of arms that are measured in anything: seconds, MiB, losses.

Slow drift of the machine (clock, temperature, neighbours) falls on all arms of a round alike and cancels in the
difference of two of them. The round is the unit of replication.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks._schema import Arm, build_arm
from fulltilt.stats import run_round

B = TypeVar("B")
Round = dict[str, tuple[B, B]]


def run_rounds(names: Sequence[str], run_block: Callable[[str], B], *, n_rounds: int, seed: int = 0) -> list[Round[B]]:
    """Return both blocks of every arm, round by round."""
    rng = random.Random(seed)
    rounds = [run_round(names, run_block, rng) for _ in range(n_rounds)]
    return [{name: (first, second) for name, (first, second) in blocks.items()} for blocks in rounds]


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
