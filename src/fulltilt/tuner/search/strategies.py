"""Strategies: generators over a Space that choose which plans to run, in which order, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fulltilt.levers import find_obstacles
from fulltilt.records import Plan, Trial
from fulltilt.tuner.picks.undecided import is_noisy
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.question.space import COUPLED, Space
from fulltilt.tuner.search.confirm import MAX_CONFIRM_ROUNDS
from fulltilt.tuner.search.coordinate_descent import coordinate_descent, project, without_batch
from fulltilt.tuner.search.model_first import FULL, QUICK, count_trials, model_first
from fulltilt.tuner.search.session import END_TO_END, REPEAT, Ask, Skip, Strategy


def skip_impossible(space: Space) -> Strategy:
    """Write a row for every value that was dropped from the axes, so that nothing asked for is silent."""
    for plan, reason in space.skipped:
        yield Skip(plan=plan, reason=reason, why="asked for, or suggested for this machine")


def run_own_plan(space: Space, *, is_limited: bool) -> Strategy:
    """Run the user's own plan first, where the search may end before its last stage.

    There it runs beside the finalists; without it nothing that is found says what it gains. Where it cannot apply, a
    row says why.
    """
    if not space.axes:
        return
    obstacles = find_obstacles(space.user_plan, space.facts)
    if obstacles:
        yield Skip(plan=space.user_plan, reason="; ".join(obstacles), why="the settings as they were")
    elif is_limited:
        yield Ask(plan=space.user_plan, why="the settings as they were: what others are held against")


def run_nearest(space: Space) -> Strategy:
    """Run the user's plan, or the nearest one in the space."""
    yield Ask(plan=project(space), why="the user's plan, or the nearest one in the space")


def exhaustive(space: Space) -> Strategy:
    """Run every plan of the grid by ascending batch size; what follows an out of memory is skipped."""
    lines: dict[Plan, list[Plan]] = {}
    for plan in space.grid():
        lines.setdefault(without_batch(plan), []).append(plan)
    for line in lines.values():
        too_large: int | None = None
        for plan in sorted(line, key=lambda p: p[COUPLED]):
            if too_large is not None:
                yield Skip(plan=plan, reason=f"larger than batch {too_large}, which ran out of memory")
                continue
            trial = yield Ask(plan=plan, why="part of the grid")
            if trial.status == "out_of_memory":
                too_large = plan[COUPLED]


STRATEGIES: Mapping[str, Callable[[Space], Strategy]] = {
    "model_first": model_first,
    "exhaustive": exhaustive,
    "coordinate_descent": coordinate_descent,
    "quick": lambda space: model_first(space, QUICK),
}


def name_strategy(strategy: str) -> str:
    """Name the mechanism of a strategy: ``--quick`` is a smaller model-first search."""
    return "model_first" if strategy == "quick" else strategy


def count_finalists(strategy: str, rows: Sequence[Trial] = ()) -> int:
    """Choose how many plans are measured again, by how noisy the rows of the search are.

    The fastest of a whole grid's noisy rows are mostly lucky ones: over 20 simulated workloads the exhaustive search
    lost 1.72 % on average with two of them and 1.14 % with four (``benchmarks/results/search_replay-cpu.json``).
    Searches that run few plans, each for a reason, lost no less with a third.
    """
    whole = [row for row in rows if row.kind == END_TO_END and row.status == "ok"]
    return {"exhaustive": 4, "quick": 1}.get(strategy, 4 if is_noisy(whole) else 2)


def count_planned(space: Space, strategy: str, *, is_limited: bool) -> dict[str, int]:
    """Estimate the number of trials by kind, for a progress display; with a budget the user's own plan runs first."""
    if strategy in ("model_first", "quick"):
        counts = count_trials(space, QUICK if strategy == "quick" else FULL)
    elif strategy == "exhaustive":
        counts = {END_TO_END: count_grid(space)}
    else:
        counts = {END_TO_END: min(count_grid(space), 2 * (1 + sum(len(values) - 1 for values in space.axes.values())))}
    counts[END_TO_END] += len(space.skipped) + is_limited
    counts[REPEAT] = MAX_CONFIRM_ROUNDS * (1 + min(count_grid(space), count_finalists(strategy)))
    return counts
