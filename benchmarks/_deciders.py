"""Methods to decide which of two settings is faster, each fed with the same noise."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks._interleaved import compare
from benchmarks._noise import NoiseModel, Stream
from fulltilt.levers import default_plan
from fulltilt.records import Measurement, Trial
from fulltilt.stats import Verdict, compute_rate_interval, compute_t_quantile
from fulltilt.tuner.picks.undecided import INDIFFERENCE_PCT, choose
from fulltilt.tuner.search.confirm import confirm
from fulltilt.tuner.search.session import REPEAT, Ask
from fulltilt.tuner.trials.rows import build_row

BLOCK_STEPS = 8
N_ROUNDS = 36
WELCH_STEPS = 40
GUIDE_STEPS = 10
PROCESS_STEPS = 80
USER_FACTOR = 1.5  # the time of the settings as they were over a finalist's


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a decider said about arm b, and what it cost; None where its method does not say."""

    verdict: Verdict
    n_steps: int
    detectable_pct: float | None = None  # the effect that it could have found
    takes_b: bool | None = None  # whether it would go on with arm b, told apart or not


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decider:
    """A method: from the steps of a machine and the true time of arm b over that of arm a to an outcome."""

    run: Callable[[Stream, float], Outcome]
    max_steps: int
    note: str


def decide_interleaved(stream: Stream, factor: float) -> Outcome:
    """Decide as fulltilt does: ABBA rounds with an A/A arm, three looks."""
    factors = {"a": 1.0, "b": factor}
    result = compare(["a", "b"], lambda arm: list(stream.take(BLOCK_STEPS) * factors[arm]), n_rounds=N_ROUNDS)
    decision = result.decisions["b"]
    n_steps = result.n_rounds * 6 * BLOCK_STEPS
    return Outcome(verdict=decision.verdict, n_steps=n_steps, detectable_pct=decision.detectable_pct)


def decide_by_welch(stream: Stream, factor: float) -> Outcome:
    """Run Welch's t test at 5 % on 40 steps of one arm and then 40 of the other; no difference is a "tie"."""
    a, b = stream.take(WELCH_STEPS), stream.take(WELCH_STEPS) * factor
    squares = [float(x.var(ddof=1)) / x.size for x in (a, b)]
    df = sum(squares) ** 2 / sum(s * s / (WELCH_STEPS - 1) for s in squares)
    gap = float(b.mean() - a.mean())
    limit = compute_t_quantile(0.975, math.floor(df)) * math.sqrt(sum(squares))
    verdict: Verdict = "tie" if abs(gap) <= limit else "faster" if gap < 0 else "slower"
    return Outcome(verdict=verdict, n_steps=2 * WELCH_STEPS)


def decide_by_means(stream: Stream, factor: float) -> Outcome:
    """Time ten steps of one arm, ten of the other, and keep the faster mean, as short benchmark scripts do."""
    a, b = stream.take(GUIDE_STEPS), stream.take(GUIDE_STEPS) * factor
    faster = statistics.fmean(b) < statistics.fmean(a)
    return Outcome(verdict="faster" if faster else "slower", n_steps=2 * GUIDE_STEPS)


def decide_between_processes(noise: NoiseModel, factor: float, rng: np.random.Generator) -> Outcome:
    """Decide as a search does for its finalists: by its own rounds of fresh processes and its own rule for ties.

    As in a search each finalist has run once before, and the settings as they were, far slower, run beside them. What
    they cannot tell is a tie where the means lie as close as the search calls equal, and too noisy where they do not.
    """
    factors = {1: 1.0, 2: factor, 3: USER_FACTOR}
    times = {default_plan({"batch_size": 1, "threads": threads}): factor for threads, factor in factors.items()}
    (first, other, user), level = times, 0.0
    plans, rows = (first, other), list[Trial]()

    def run(wish: Ask) -> Trial:
        nonlocal level
        steps = noise.simulate(PROCESS_STEPS, rng) * math.exp(level) * times[wish.plan]
        level += rng.normal(0, noise.drift_pct / 100 * math.sqrt(PROCESS_STEPS))  # it goes on between processes
        rows.append(build_run(wish, steps, id=f"t{len(rows) + 1}"))
        return rows[-1]

    for plan in plans:
        run(Ask(plan=plan, why="in the search"))
    rounds = confirm(plans, baseline=Ask(plan=user, why="as it was", kind=REPEAT))
    with contextlib.suppress(StopIteration):
        wish = next(rounds)
        while True:
            wish = rounds.send(run(wish))
    runs = rows[len(plans) :]
    chosen, tied = choose([next(run for run in runs if run.plan == plan) for plan in times], runs, history=rows)
    n_steps = len(runs) * PROCESS_STEPS
    means = [statistics.fmean(math.log(run.samples_per_s or 0.0) for run in runs if run.plan == plan) for plan in plans]
    is_ahead = means[1] > means[0]
    if not tied:
        return Outcome(verdict="faster" if chosen.plan == other else "slower", n_steps=n_steps, takes_b=is_ahead)
    is_close = abs(means[1] - means[0]) <= -math.log1p(-INDIFFERENCE_PCT / 100)
    return Outcome(verdict="tie" if is_close else "too_noisy", n_steps=n_steps, takes_b=is_ahead)


def build_run(wish: Ask, step_s: np.ndarray, *, id: str) -> Trial:
    """Build a finished trial whose steps of one sample took ``step_s``, in blocks as the engine times them."""
    blocks = step_s.reshape(-1, BLOCK_STEPS).sum(axis=1)
    rate = step_s.size / float(step_s.sum())
    measured = Measurement(
        phases_ms=None,
        samples_per_s=rate,
        samples_per_s_ci95=compute_rate_interval([BLOCK_STEPS] * blocks.size, blocks),
        block_samples_per_s=tuple(BLOCK_STEPS / blocks),
        n_steps=step_s.size,
        n_warmup_steps=0,
    )
    return build_row(wish.plan, id=id, why=wish.why, kind=wish.kind, status="ok", reason=None, measurement=measured)


OURS = "fulltilt"
DECIDERS: Mapping[str, Decider] = {
    OURS: Decider(
        run=decide_interleaved,
        max_steps=N_ROUNDS * 6 * BLOCK_STEPS,
        note=f"interleaved: at most {N_ROUNDS} rounds of 6 blocks of {BLOCK_STEPS} steps, A/A arm, 3 looks",
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
