"""Runs a search strategy on a simulated machine through the real session, and scores what it ends at.

Every strategy that measures speed goes through the product's own last stage: finalists and the user's plan measured
again side by side, then the recommended pick with its memory limit and its rule for ties.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks import _tpe
from benchmarks._machines import SimulatedMachine
from benchmarks._machines_recorded import GridRecording, RecordedMachine
from fulltilt.records import WHOLE_RUNS, Plan, Trial
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.question.space import COUPLED, Space
from fulltilt.tuner.search import strategies as search
from fulltilt.tuner.search.finals import run_finals
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.session import BASELINE, REPEAT, Ask, Session, Strategy

LARGEST = "largest_that_fits"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Truths:
    """The grid of one machine without noise, or as the median of what was recorded: what a search is held against."""

    machine: SimulatedMachine | RecordedMachine
    space: Space
    samples_per_s: Mapping[Plan, float]  # of plans that fit
    best: Plan  # the fastest below the memory safety limit, which is what a search may recommend

    @property
    def best_samples_per_s(self) -> float:
        return self.samples_per_s[self.best]

    def compute_regret_pct(self, plan: Plan | None) -> float:
        rate = 0.0 if plan is None else self.samples_per_s.get(plan, 0.0)
        return max(0.0, 100 * (1 - rate / self.best_samples_per_s))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One search: what it cost and what it found.

    Attributes:
        regret_pct: Of the recommended plan's true speed to that of the best plan; never below 0. 100 without a pick.
        fastest_regret_pct: The same of the fastest row that could be recommended, before the rule for ties prefers
            smaller batches and simpler plans at up to 3 % of speed.
        n_trials: Processes that ran a step or a loader: whole runs and probes, repeats among them.
        n_end_to_end: Whole runs of the search itself.
        n_repeats: Whole runs of the last stage.
    """

    strategy: str
    seed: int
    recommended: Plan | None
    regret_pct: float
    fastest_regret_pct: float
    n_trials: int
    n_end_to_end: int
    n_repeats: int
    n_out_of_memory: int
    n_memory_probes: int
    seconds: float  # of the simulated trials
    rows: tuple[Trial, ...]


def find_truths(machine: SimulatedMachine, n_points: int) -> Truths:
    """Simulate the whole grid. Cost: seconds for 2,688 points; what a search asks of it is then known."""
    space = machine.space(n_points)
    fitting = [plan for plan in space.grid() if machine.fits(plan)]
    truths = machine.find_truths(fitting)
    rates = {plan: plan["batch_size"] / truth.step_s for plan, truth in zip(fitting, truths, strict=True)}
    safe = [plan for plan in fitting if machine.true_memory_gib(plan) <= machine.recommendable_gib] or fitting
    return Truths(machine=machine, space=space, samples_per_s=rates, best=max(safe, key=rates.__getitem__))


def find_recorded_truths(recording: GridRecording, seed: int) -> Truths:
    """The medians of a recorded grid. A search is answered with the same runs, in an order drawn from the seed."""
    machine = RecordedMachine(recording, seed)
    rates, limit_gib = machine.find_rates(), machine.recommendable_gib
    space = recording.build_space()
    fine = [plan for plan in space.grid() if plan in rates]
    safe = [plan for plan in fine if limit_gib is None or machine.true_memory_gib(plan) <= limit_gib] or fine
    return Truths(machine=machine, space=space, samples_per_s=rates, best=max(safe, key=rates.__getitem__))


def run_search(truths: Truths, strategy: str) -> Score:
    """One search with the noise of its own seed, so that strategies do not share their luck.

    Raises:
        KeyError: no strategy of that name.
    """
    machine, space = truths.machine, truths.space
    machine.restart_noise(strategy)
    session = Session(machine, Journal())
    session.run(search.skip_impossible(space))
    session.run(_build_strategy(strategy, machine.seed, space))
    if strategy == LARGEST:
        recommended = fastest = _find_largest(session.rows)
    else:
        recommended, fastest = _finish(session, machine, space, strategy)
    rows = (*session.rows, *session.probes)
    counts = Counter(row.kind for row in rows if row.status != "skipped")
    return Score(
        strategy=strategy,
        seed=machine.seed,
        recommended=recommended,
        regret_pct=truths.compute_regret_pct(recommended),
        fastest_regret_pct=truths.compute_regret_pct(fastest),
        n_trials=sum(count for kind, count in counts.items() if kind != "memory"),
        n_end_to_end=counts["end_to_end"],
        n_repeats=counts[REPEAT] + counts[BASELINE],
        n_out_of_memory=sum(row.status == "out_of_memory" for row in rows),
        n_memory_probes=counts["memory"],
        seconds=sum(row.seconds for row in rows),
        rows=tuple(sorted(rows, key=lambda row: int(row.id[1:]))),
    )


def is_known(strategy: str) -> bool:
    """Whether it can be run here: TPE needs Optuna."""
    if strategy.startswith("tpe"):
        return _tpe.is_available()
    return strategy in PEERS_AND_BASELINES or strategy in search.STRATEGIES


def _build_strategy(name: str, seed: int, space: Space) -> Strategy:
    if name in PEERS_AND_BASELINES:
        return PEERS_AND_BASELINES[name](space, seed)
    return search.STRATEGIES[name](space)


def try_at_random(space: Space, *, n_trials: int, seed: int) -> Strategy:
    """Plans of the grid drawn without putting back."""
    grid = space.grid()
    for index in np.random.default_rng([seed, 3]).permutation(len(grid))[:n_trials]:
        yield Ask(plan=grid[index], why="drawn at random")


def find_largest_that_fits(space: Space) -> Strategy:
    """Double the batch until memory ends, then bisect, the rest as the user has it but with mixed precision on.

    The documented way of Lightning's BatchSizeFinder:
    https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#batch-size-finder
    """
    mixed = space.axes.get("precision", (space.base["precision"],))[-1]
    start = space.with_value(space.base, "precision", mixed)
    sizes = space.axes[COUPLED]
    fits, fails, at = -1, len(sizes), 0
    while at < len(sizes):
        trial = yield _ask_size(space, start, sizes[at])
        if trial.status != "ok":
            fails = at
            break
        fits, at = at, _find_doubled(sizes, at)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        trial = yield _ask_size(space, start, sizes[middle])
        fits, fails = (middle, fails) if trial.status == "ok" else (fits, middle)


def _ask_size(space: Space, start: Plan, size: int) -> Ask:
    return Ask(plan=space.with_value(start, COUPLED, size), why=f"does batch {size} fit?")


def _find_doubled(sizes: Sequence[int], at: int) -> int:
    """The position of the first size at least twice as large; past the end where there is none."""
    return next((i for i, size in enumerate(sizes) if size >= 2 * sizes[at]), len(sizes))


def _find_largest(rows: Sequence[Trial]) -> Plan | None:
    ran = [row.plan for row in rows if row.status == "ok" and row.kind in WHOLE_RUNS]
    return max(ran, key=lambda plan: plan["batch_size"], default=None)


def _finish(
    session: Session, machine: SimulatedMachine | RecordedMachine, space: Space, strategy: str
) -> tuple[Plan | None, Plan | None]:
    """The last stage of ``tune``: finalists and the user's plan again side by side; the pick, and the fastest."""
    limit_gib = machine.recommendable_gib
    run_finals(session, space, n_finalists=search.count_finalists(strategy, session.rows))
    table, _ = recommend.merge_repeats(session.rows)
    if not any(row.status == "ok" for row in table):
        return None, None
    picks = recommend.pick(table, user_plan=space.user_plan, memory_limit_gib=machine.memory_gib, runs=session.rows)
    safe = [
        row
        for row in table
        if row.status == "ok" and (limit_gib is None or (row.device_memory_peak_gib or 0.0) <= limit_gib)
    ]
    field = recommend.find_confirmed(safe) or safe
    chosen = picks.recommended.trial.plan
    return chosen, max(field, key=lambda row: row.samples_per_s or 0.0).plan if field else chosen


PEERS_AND_BASELINES: Mapping[str, Callable[[Space, int], Strategy]] = {
    "coordinate_descent_1": lambda space, seed: search.coordinate_descent(space, max_rounds=1),
    "coordinate_descent_2": lambda space, seed: search.coordinate_descent(space, max_rounds=2),
    LARGEST: lambda space, seed: find_largest_that_fits(space),
    "tpe_24": lambda space, seed: _tpe.run_tpe(space, n_trials=24, seed=seed),
    "tpe_60": lambda space, seed: _tpe.run_tpe(space, n_trials=60, seed=seed),
    "random_24": lambda space, seed: try_at_random(space, n_trials=24, seed=seed),
}
"""What a search is compared with, beside the strategies of the product."""
