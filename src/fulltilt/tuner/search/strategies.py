"""Strategies: generators over a Space that choose which plans to run, in which order, and when to stop."""

from collections.abc import Callable, Mapping

from fulltilt.levers import find_obstacles, load_catalogue
from fulltilt.records import IN_TURNS, WHOLE_RUN, Plan
from fulltilt.stats.alternation import LOOKS
from fulltilt.tuner.picks.finalists import N_FINALISTS
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.question.space import COUPLED, Space, canonicalize
from fulltilt.tuner.search.coordinate_descent import coordinate_descent, project, without_batch
from fulltilt.tuner.search.journal import LARGER
from fulltilt.tuner.search.model_first import FULL, QUICK, count_trials, model_first
from fulltilt.tuner.search.session import Ask, Skip, Strategy


def skip_impossible(space: Space) -> Strategy:
    """Write a row for every value that was dropped from the axes, so that nothing asked for is silent."""
    for plan, reason in space.skipped:
        yield Skip(plan=plan, reason=reason, why="asked for, or suggested for this machine")


def run_own_plan(space: Space) -> Strategy:
    """Run the user's own plan first: without it nothing that is found says what it gains.

    Where it cannot apply, a row says why. Where it fails, a plain plan tells whether one of its levers is at fault.
    """
    obstacles = find_obstacles(space.user_plan, space.facts)
    if obstacles:
        yield Skip(plan=space.user_plan, reason="; ".join(obstacles), why="the settings as they were")
    else:
        trial = yield Ask(plan=space.user_plan, why="the settings as they were: what others are held against")
        if trial.status == "error" and (plain := _find_plain(space)) is not None:
            yield Ask(plan=plain, why="the settings as they were failed: with plain ones, as far as the search may")


def _find_plain(space: Space) -> Plan | None:
    """Find the user's plan with levers at their defaults; where they are, the nearest one that has another value."""
    user, catalogue = space.user_plan, load_catalogue()
    plain = user
    for name, values in space.axes.items():
        if catalogue[name].default in values and name != COUPLED:
            plain = plain.replace(**{name: catalogue[name].default})
    beside = [space.with_value(user, name, value) for name, values in space.axes.items() for value in values]
    plans = [canonicalize(plain, space.facts), *beside]
    return next((plan for plan in plans if plan != user and not find_obstacles(plan, space.facts)), None)


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
                yield Skip(plan=plan, reason=f"larger than batch {too_large}, {LARGER}")
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


def count_planned(space: Space, strategy: str) -> dict[str, int]:
    """Estimate the number of trials by kind, for a progress display; the user's own plan runs first."""
    if strategy in ("model_first", "quick"):
        counts = count_trials(space, QUICK if strategy == "quick" else FULL)
    elif strategy == "exhaustive":
        counts = {WHOLE_RUN: count_grid(space)}
    else:
        counts = {WHOLE_RUN: min(count_grid(space), 2 * (1 + sum(len(values) - 1 for values in space.axes.values())))}
    counts[WHOLE_RUN] += len(space.skipped) + 1
    counts[IN_TURNS] = LOOKS[0] * (1 + min(count_grid(space), N_FINALISTS))
    return counts
