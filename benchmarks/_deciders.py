"""Ways to decide which of two settings is faster, each fed with the same noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks._noise import NoiseModel, Stream
from fulltilt.stats import Decision, Verdict, compare, compute_t_quantile, decide, find_look, plan_looks

BLOCK_STEPS = 8
N_ROUNDS = 36
WELCH_STEPS = 40
GUIDE_STEPS = 10
PROCESS_ROUNDS = 15
PROCESS_STEPS = 80


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a decider said about arm b, and what it cost.

    Attributes:
        detectable_pct: The effect it says it could have found; None where the method has no such figure.
    """

    verdict: Verdict
    n_steps: int
    detectable_pct: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decider:
    """A method: (steps of the machine, true time of arm b over that of arm a) → outcome."""

    run: Callable[[Stream, float], Outcome]
    max_steps: int
    note: str


def decide_interleaved(stream: Stream, factor: float) -> Outcome:
    """fulltilt's: ABBA rounds with an A/A arm, three looks."""
    factors = {"a": 1.0, "b": factor}
    result = compare(["a", "b"], lambda arm: list(stream.take(BLOCK_STEPS) * factors[arm]), n_rounds=N_ROUNDS)
    decision = result.decisions["b"]
    n_steps = result.n_rounds * 6 * BLOCK_STEPS
    return Outcome(verdict=decision.verdict, n_steps=n_steps, detectable_pct=decision.detectable_pct)


def decide_by_welch(stream: Stream, factor: float) -> Outcome:
    """Welch's t test at 5 % on 40 steps of one arm and then 40 of the other; no difference found is a "tie"."""
    a, b = stream.take(WELCH_STEPS), stream.take(WELCH_STEPS) * factor
    squares = [float(x.var(ddof=1)) / x.size for x in (a, b)]
    df = sum(squares) ** 2 / sum(s * s / (WELCH_STEPS - 1) for s in squares)
    gap = float(b.mean() - a.mean())
    limit = compute_t_quantile(0.975, math.floor(df)) * math.sqrt(sum(squares))
    verdict: Verdict = "tie" if abs(gap) <= limit else "faster" if gap < 0 else "slower"
    return Outcome(verdict=verdict, n_steps=2 * WELCH_STEPS)


def decide_by_means(stream: Stream, factor: float) -> Outcome:
    """Ten steps of one arm, ten of the other, keep the faster mean: as a benchmark script of twenty lines does."""
    a, b = stream.take(GUIDE_STEPS), stream.take(GUIDE_STEPS) * factor
    faster = statistics.fmean(b) < statistics.fmean(a)
    return Outcome(verdict="faster" if faster else "slower", n_steps=2 * GUIDE_STEPS)


def decide_between_processes(noise: NoiseModel, factor: float, rng: np.random.Generator) -> Outcome:
    """fulltilt's for finalists: a fresh process per run, A B and then B A, three looks, no A/A arm."""
    looks = plan_looks(PROCESS_ROUNDS)
    rates: dict[str, list[float]] = {"a": [], "b": []}
    level = 0.0  # drift goes on from one process to the next
    decision: Decision | None = None
    for number in range(1, PROCESS_ROUNDS + 1):
        for arm in ("ab", "ba")[number % 2]:
            steps = noise.simulate(PROCESS_STEPS, rng) * math.exp(level) * (factor if arm == "b" else 1.0)
            level += rng.normal(0, noise.drift_pct / 100 * math.sqrt(PROCESS_STEPS))
            rates[arm].append(PROCESS_STEPS / float(steps.sum()))
        look = find_look(looks, number)
        if look is not None:
            decision = decide(rates["a"], rates["b"], confidence=look.confidence, higher_is_better=True)
            if decision.is_settled:
                break
    assert decision is not None
    n_steps = len(rates["a"]) * 2 * PROCESS_STEPS
    return Outcome(verdict=decision.verdict, n_steps=n_steps, detectable_pct=decision.detectable_pct)


OURS = "fulltilt"
DECIDERS: Mapping[str, Decider] = {
    OURS: Decider(
        run=decide_interleaved,
        max_steps=N_ROUNDS * 6 * BLOCK_STEPS,
        note=f"stats.compare: at most {N_ROUNDS} rounds of 6 blocks of {BLOCK_STEPS} steps, A/A arm, 3 looks",
    ),
    "Welch": Decider(
        run=decide_by_welch,
        max_steps=2 * WELCH_STEPS,
        note=f"{WELCH_STEPS} + {WELCH_STEPS} consecutive steps, 5 %",
    ),
    "faster mean": Decider(
        run=decide_by_means,
        max_steps=2 * GUIDE_STEPS,
        note=f"{GUIDE_STEPS} + {GUIDE_STEPS} consecutive steps; it always calls a difference",
    ),
}
