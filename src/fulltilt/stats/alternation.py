"""Compare settings ("arms") that take turns in short blocks, and stop as soon as that decides.

    block   what one arm does in one turn, some hundredths of a second
    round   two blocks of every arm, in random order and then in the reverse one
    group   rounds of processes that live at the same time, one an arm, until they agree; the next has fresh ones

Drift of the machine cancels within a round. Processes of one setting differ by several percent, and steps of one
process say nothing of that: the unit of replication is the group. Looking at the evidence several times gives chance
several tries, so each look is taken at a confidence that leaves 95 % for all together.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from fulltilt.stats.intervals import compute_trimmed_interval

Verdict = Literal["faster", "slower", "equal", "undecided"]
Name = TypeVar("Name", bound=Hashable)
T = TypeVar("T")

WORTH_PCT = 1.0  # a gain up to this is none
EQUAL_PCT = 2.0  # arms that differ by no more are as good as equal
CONFIDENCE = 0.98  # of each interval: together the looks are wrong in less than 5 of 100 comparisons
LOOKS = (4, 6, 8, 10, 13, 16, 20, 25, 32, 40)  # groups after which a comparison may end
LEAST_GROUPS, LEAST_CONFIDENCE = 3, 0.99  # of a claim, where the time ended before the first look
MIN_ROUNDS = 2
AGREE_PCT = 10.0  # rounds that differ by no more agree: processes differ by half of that, however many rounds
MOST_S = 2.0  # of turns, for each pair of arms: after it no round begins only because they do not agree
STALLED_PCT = 5.0  # of the time, in stalled steps: from here on a machine is busy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What an arm did in one turn.

    Attributes:
        stalled_s: Of ``seconds``, those of steps that took over five times as long as quick ones.
    """

    n_samples: int
    seconds: float
    stalled_s: float = 0.0


class Arm(Protocol):
    """A setting at work, which does nothing between its turns."""

    def run_block(self) -> Block: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What one arm did in the rounds of a group.

    ``samples_per_s`` is that of the median round, so that one in which other work took the cores does not count.

    Attributes:
        way: How its process ran. Figures of two ways are not compared.
    """

    samples_per_s: float
    stalled_pct: float
    way: str = "usual"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How much faster an arm is than a base.

    The verdict: "faster" and "slower" by more than 1 %, "equal" within 2 %, else "undecided".
    """

    verdict: Verdict
    gain_pct: float  # of samples/s
    ci_pct: tuple[float, float]  # at 98 %, of up to three groups at 99 %; infinite bounds before the second group
    n_groups: int

    @property
    def is_decided(self) -> bool:
        return self.verdict != "undecided"

    @property
    def speedup(self) -> float:
        return 1 + self.gain_pct / 100


class Evidence(Generic[Name]):
    """Holds what groups measured: one figure an arm and group."""

    def __init__(self) -> None:
        self._groups: list[Mapping[Name, Turns]] = []

    def add(self, group: Mapping[Name, Turns]) -> None:
        """Add what the arms of one group measured."""
        self._groups.append(dict(group))

    def compare(self, base: Name, arm: Name) -> Comparison:
        """Compare two arms by the groups that both were in, of the way in which they ran last."""
        return compare_pairs(self.list_log_ratios(base, arm))

    def list_log_ratios(self, base: Name, arm: Name) -> list[float]:
        """List the logarithm of arm over base, one a group that both were in."""
        return [
            math.log(group[arm].samples_per_s / group[base].samples_per_s) for group in self._list_groups([base, arm])
        ]

    def count_groups(self, names: Iterable[Name]) -> int:
        """Count the groups that hold all of these arms."""
        return len(self._list_groups(list(names)))

    def _list_groups(self, names: Sequence[Name]) -> list[Mapping[Name, Turns]]:
        """List the groups that hold all of these arms, of the way in which these ran last."""
        groups = [group for group in self._groups if all(name in group for name in names)]
        return [group for group in groups if group[names[0]].way == groups[-1][names[0]].way] if names else groups

    def estimate_rate(self, name: Name) -> float:
        """Estimate an arm's samples/s as the median over its groups; nan where there is none."""
        rates = [group[name].samples_per_s for group in self._list_groups([name])]
        return statistics.median(rates) if rates else math.nan

    @property
    def stalled_pct(self) -> float:
        """Mean share of the timed seconds in which steps stalled, of the arm in which most did."""
        shares: dict[Name, list[float]] = {}
        for group in self._groups:
            for name, turns in group.items():
                shares.setdefault(name, []).append(turns.stalled_pct)
        return max(map(statistics.fmean, shares.values()), default=0.0)


def compare_pairs(log_ratios: Sequence[float]) -> Comparison:
    """Compare an arm with a base by the logarithms of their ratios, one a group."""
    n = len(log_ratios)
    if n < 2:
        centre = log_ratios[0] if n else 0.0
        return Comparison(
            verdict="undecided", gain_pct=100 * math.expm1(centre), ci_pct=(-math.inf, math.inf), n_groups=n
        )
    confidence = LEAST_CONFIDENCE if n < LOOKS[0] else CONFIDENCE
    centre, low, high = compute_trimmed_interval(log_ratios, confidence)
    gain_pct, low_pct, high_pct = (100 * math.expm1(value) for value in (centre, low, high))
    verdict: Verdict = "undecided"
    if n >= LEAST_GROUPS:
        if low_pct > WORTH_PCT:
            verdict = "faster"
        elif high < -math.log1p(WORTH_PCT / 100):
            verdict = "slower"
        elif max(-low, high) <= math.log1p(EQUAL_PCT / 100):
            verdict = "equal"
    return Comparison(verdict=verdict, gain_pct=gain_pct, ci_pct=(low_pct, high_pct), n_groups=n)


def is_look(n_groups: int) -> bool:
    """Whether a comparison may end after so many groups."""
    return n_groups in LOOKS or n_groups > LOOKS[-1]


def run_group(
    arms: Mapping[Name, Arm],
    *,
    seconds: float = 0.0,
    n_rounds: int = MIN_ROUNDS,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> dict[Name, Turns]:
    """Run rounds of the arms until they agree, two at least.

    Args:
        seconds: Of turns, for each pair of arms, at least.
        n_rounds: After so many, or two seconds a pair, none begins because they do not agree.
    """
    rng, names = rng or random.Random(), list(arms)
    rounds: list[dict[Name, list[Block]]] = []
    begin_s, n_pairs = clock(), len(names) / 2
    while True:
        rounds.append(run_round(names, lambda name: arms[name].run_block(), rng))
        spent_s, n_done = (clock() - begin_s) / n_pairs, len(rounds)
        may_go_on = n_done < n_rounds and spent_s < MOST_S and not _agree(rounds)
        if n_done >= MIN_ROUNDS and spent_s >= seconds and not may_go_on:
            return summarize_rounds(rounds)


def run_round(names: Sequence[Name], run_block: Callable[[Name], T], rng: random.Random) -> dict[Name, list[T]]:
    """Run two blocks of every arm, in random order and then in the reverse one."""
    order = rng.sample(names, len(names))
    blocks: dict[Name, list[T]] = {name: [] for name in names}
    for name in (*order, *reversed(order)):
        blocks[name].append(run_block(name))
    return blocks


def summarize_rounds(rounds: Sequence[Mapping[Name, Sequence[Block]]]) -> dict[Name, Turns]:
    """Summarize each arm by the median of its ratios to the mean of all arms, round by round."""
    levels, effects = _compute_effects(rounds)
    level, summary = statistics.median(levels), {}
    for name, logs in effects.items():
        blocks = [block for turn in rounds for block in turn[name]]
        stalled_s, seconds = sum(block.stalled_s for block in blocks), sum(block.seconds for block in blocks)
        rate = math.exp(level + statistics.median(logs))
        summary[name] = Turns(samples_per_s=rate, stalled_pct=100 * stalled_s / seconds)
    return summary


def _agree(rounds: Sequence[Mapping[Name, Sequence[Block]]]) -> bool:
    """Whether the usual arm's ratio to the others is about the same in all rounds."""
    effects = _compute_effects(rounds)[1]
    to_others = len(effects) / max(1, len(effects) - 1)  # from a ratio to the mean of all
    usual = statistics.median(max(logs) - min(logs) for logs in effects.values())
    return to_others * usual <= math.log1p(AGREE_PCT / 100)


def _compute_effects(rounds: Sequence[Mapping[Name, Sequence[Block]]]) -> tuple[list[float], dict[Name, list[float]]]:
    """Compute each round's mean speed and each arm's ratio to it, as logarithms."""
    logs = [{name: _compute_log_rate(blocks) for name, blocks in turn.items()} for turn in rounds]
    levels = [statistics.fmean(turn.values()) for turn in logs]
    return levels, {name: [turn[name] - level for turn, level in zip(logs, levels, strict=True)] for name in logs[0]}


def _compute_log_rate(blocks: Sequence[Block]) -> float:
    return math.log(sum(block.n_samples for block in blocks) / sum(block.seconds for block in blocks))


def alternate(
    measure_group: Callable[[], Mapping[Name, Turns]],
    base: Name,
    arm: Name,
    *,
    limit_s: float,
    on_group: Callable[[Comparison], Any] = lambda comparison: None,
    clock: Callable[[], float] = time.monotonic,
) -> Evidence[Name]:
    """Run groups of two arms until they are decided, or the time is over.

    Args:
        measure_group: Starts both anew, and has them take turns (``run_group``).
        on_group: Told what is known after each group.
    """
    evidence: Evidence[Name] = Evidence()
    begin_s = clock()
    while True:
        start_s = clock()
        evidence.add(measure_group())
        known = evidence.compare(base, arm)
        on_group(known)
        if is_look(known.n_groups) and known.is_decided:
            return evidence
        if known.n_groups >= LOOKS[0] and 2 * clock() - start_s - begin_s > limit_s:  # the next would end too late
            return evidence
