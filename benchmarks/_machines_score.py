"""Run a search strategy on a simulated or recorded machine, and score what it ends at.

Every strategy that measures speed goes through the product's own last stage: finalists and the user's plan take turns,
changes that are not worth it are taken back, and what is left is recommended when its gain is proven.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks import _tpe
from benchmarks._machines import SimulatedMachine
from benchmarks._machines_recorded import GridRecording, RecordedMachine
from fulltilt.records import IN_TURNS, WHOLE_RUN, Plan
from fulltilt.stats.alternation import WORTH_PCT
from fulltilt.tuner.answer.conclude import select_rows
from fulltilt.tuner.answer.picks import pick
from fulltilt.tuner.question.space import COUPLED, Space
from fulltilt.tuner.search import strategies as search
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.search import run_proof
from fulltilt.tuner.search.session import Ask, Session, Strategy

LARGEST = "largest_that_fits"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Truths:
    """The grid of one machine without noise, or as the median of what was recorded: what a search is held against."""

    machine: SimulatedMachine | RecordedMachine
    space: Space
    samples_per_s: Mapping[Plan, float]  # of plans that fit
    best: Plan  # the fastest below the memory safety limit, which is what a search may recommend

    def compute_regret_pct(self, plan: Plan | None) -> float:
        """Return the share of the best plan's true speed that ``plan`` loses; 100 for None."""
        rate = 0.0 if plan is None else self.samples_per_s.get(plan, 0.0)
        return max(0.0, 100 * (1 - rate / self.samples_per_s[self.best]))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One search: what it found, and what it cost; the figures have the names of the arms' metrics.

    Attributes:
        regret_pct: Of the recommended plan.
        regret_by_error_pct: The same, but 0 up to the 1 % that a simpler plan, or the user's own, may cost by design.
        regret_before_restraint_pct: Of the plan that won the race: before changes are taken back that are not proven to
            be worth it, and before the user's own settings are kept where no gain is proven.
        kept_own: 1 where the user's own settings were kept though a plan is faster by more than 1 %, else 0.
        trials: Processes that ran a step or a loader: whole runs, probes and those that took turns.
        turns: Processes that took turns.
    """

    recommended: Plan | None
    regret_pct: float
    regret_by_error_pct: float
    regret_before_restraint_pct: float
    kept_own: int
    trials: int
    end_to_end_trials: int
    turns: int
    groups: int
    seconds: float
    out_of_memory: int


def find_truths(machine: SimulatedMachine, n_points: int) -> Truths:
    """Simulate the whole grid. Cost: seconds for 2,688 points; what a search asks of it is then known."""
    space = machine.space(n_points)
    fitting = [plan for plan in space.grid() if machine.fits(plan)]
    truths = machine.find_truths(fitting)
    rates = {plan: plan["batch_size"] / truth.step_s for plan, truth in zip(fitting, truths, strict=True)}
    return _build_truths(machine, space, rates)


def find_recorded_truths(recording: GridRecording, seed: int) -> Truths:
    """Take the medians of a recorded grid. A search is answered with the same runs, in an order of the seed."""
    machine = RecordedMachine(recording, seed)
    return _build_truths(machine, recording.build_space(), machine.find_rates())


def _build_truths(machine: SimulatedMachine | RecordedMachine, space: Space, rates: Mapping[Plan, float]) -> Truths:
    limit_gib = machine.recommendable_gib
    fine = [plan for plan in space.grid() if plan in rates]
    safe = [plan for plan in fine if limit_gib is None or machine.true_memory_gib(plan) <= limit_gib] or fine
    return Truths(machine=machine, space=space, samples_per_s=rates, best=max(safe, key=rates.__getitem__))


def run_search(truths: Truths, strategy: str) -> Score:
    """Run one search with noise of its own, so that strategies do not share their luck.

    Raises:
        KeyError: no strategy of that name.
    """
    machine, space = truths.machine, truths.space
    machine.restart_noise(strategy)
    session = Session(machine, Journal(), clock=lambda: machine.now_s)
    session.run(search.skip_impossible(space))
    if strategy != LARGEST:
        session.run(search.run_own_plan(space))
    if strategy in PEERS_AND_BASELINES:
        session.run(PEERS_AND_BASELINES[strategy](space, machine.seed))
    else:
        session.run(search.STRATEGIES[strategy](space))
    if strategy == LARGEST:
        ran = [row.plan for row in session.rows if row.status == "ok"]
        recommended = winner = max(ran, key=lambda plan: plan["batch_size"], default=None)
    else:
        recommended, winner = _finish(session, truths)
    rows = (*session.rows, *session.turns, *session.probes)
    counts = Counter(row.kind for row in rows if row.status != "skipped")
    regret_pct = truths.compute_regret_pct(recommended)
    is_wrong = regret_pct > WORTH_PCT
    return Score(
        recommended=recommended,
        regret_pct=regret_pct,
        regret_by_error_pct=regret_pct * is_wrong,
        regret_before_restraint_pct=truths.compute_regret_pct(winner),
        kept_own=int(recommended == space.user_plan and is_wrong),
        trials=counts.total() - counts["memory"],
        end_to_end_trials=counts[WHOLE_RUN],
        turns=counts[IN_TURNS],
        groups=len({row.group for row in session.turns}),
        seconds=machine.now_s,
        out_of_memory=sum(row.status == "out_of_memory" for row in rows),
    )


def is_known(strategy: str) -> bool:
    """Tell whether it can be run here: TPE needs Optuna."""
    if strategy.startswith("tpe"):
        return _tpe.is_available()
    return strategy in PEERS_AND_BASELINES or strategy in search.STRATEGIES


def try_at_random(space: Space, *, n_trials: int, seed: int) -> Strategy:
    """Ask for plans of the grid drawn without putting back."""
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
    while fails - fits > 1:
        trial = yield Ask(plan=space.with_value(start, COUPLED, sizes[at]), why=f"does batch {sizes[at]} fit?")
        fits, fails = (at, fails) if trial.status == "ok" else (fits, at)
        doubled = next((i for i, size in enumerate(sizes) if size >= 2 * sizes[at]), len(sizes))
        at = doubled if fits == at and doubled < fails else (fits + fails) // 2


def _finish(session: Session, truths: Truths) -> tuple[Plan | None, Plan | None]:
    """Run the last stage of ``tune``; return what it recommends, and what won the race."""
    space = truths.space
    proof = run_proof(session, space)
    table = select_rows(session.rows, session.turns, space.user_plan)
    if all(row.status != "ok" for row in table):
        return None, None
    picks = pick(table, proof, user_plan=space.user_plan, memory_limit_gib=truths.machine.memory_gib)
    return picks.recommended.trial.plan, proof.winner


PEERS_AND_BASELINES: Mapping[str, Callable[[Space, int], Strategy]] = {
    "coordinate_descent_1": lambda space, seed: search.coordinate_descent(space, max_rounds=1),
    "coordinate_descent_2": lambda space, seed: search.coordinate_descent(space, max_rounds=2),
    LARGEST: lambda space, seed: find_largest_that_fits(space),
    "tpe_24": lambda space, seed: _tpe.run_tpe(space, n_trials=24, seed=seed),
    "tpe_60": lambda space, seed: _tpe.run_tpe(space, n_trials=60, seed=seed),
    "random_24": lambda space, seed: try_at_random(space, n_trials=24, seed=seed),
}
"""What a search is compared with, beside the strategies of the product."""
