"""Strategies: which plans to run, in which order, and when to stop.

Each is a generator function of a Space (see ``session``). ``confirm`` runs after any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fulltilt.records import Plan, Trial
from fulltilt.tuner.session import REPEAT, Ask, Skip, Strategy
from fulltilt.tuner.space import COUPLED, Space

MAX_ROUNDS = 4  # of coordinate descent; the third rarely moves anything, the limit is for noise that never settles


def skip_impossible(space: Space) -> Strategy:
    """A row for every value that was dropped from the axes, so that nothing asked for is silent."""
    for plan, reason in space.skipped:
        yield Skip(plan=plan, reason=reason, why="asked for, or suggested for this machine")


def exhaustive(space: Space) -> Strategy:
    """Every plan of the grid. Batch sizes ascend; past one that ran out of memory the rest of its line is skipped."""
    lines: dict[Plan, list[Plan]] = {}
    for plan in space.grid():
        lines.setdefault(_without_batch(plan), []).append(plan)
    for line in lines.values():
        too_large: int | None = None
        for plan in sorted(line, key=lambda p: p[COUPLED]):
            if too_large is not None:
                yield Skip(plan=plan, reason=f"larger than batch {too_large}, which ran out of memory")
                continue
            trial = yield Ask(plan=plan, why="part of the grid")
            if trial.status == "out_of_memory":
                too_large = plan[COUPLED]


def coordinate_descent(space: Space, *, max_rounds: int = MAX_ROUNDS) -> Strategy:
    """Move one lever at a time, each time from the best plan so far, until a round changes nothing.

    The first round tries every value of a lever, batch sizes upward until memory ends; later rounds try the
    neighbours of the best value on ordered axes, and every value on the others.
    """
    if not space.axes:
        return
    climb = _Climb(space)
    yield from climb.start()
    for number in range(1, max_rounds + 1):
        before = climb.plan
        for lever in space.axes:
            yield from climb.move(lever, number)
        if climb.plan == before:
            return


class _Climb:
    """The state of one descent: the best plan so far, and which batch sizes are known not to fit."""

    def __init__(self, space: Space):
        self._space = space
        self.plan = _project(space)
        self._rate = 0.0
        self._too_large: dict[Plan, int] = {}

    def start(self) -> Strategy:
        yield from self._try(self.plan, "the user's plan, or the nearest one in the space")

    def move(self, lever: str, number: int) -> Strategy:
        values = self._space.axes[lever]
        if len(values) < 2 and self.plan[lever] in values:
            return
        if number == 1 or lever != COUPLED:
            yield from self._sweep(lever, values, number)
        else:
            yield from self._walk(lever, values, number)

    def _sweep(self, lever: str, values: Sequence[Any], number: int) -> Strategy:
        """Every value around the plan that was best when the sweep began."""
        start = self.plan
        for value in values:
            plan = self._space.with_value(start, lever, value)
            yield from self._try(plan, f"round {number}: {lever} {value}, the rest as in the best plan so far")

    def _walk(self, lever: str, values: Sequence[Any], number: int) -> Strategy:
        """From the best value outward on both sides, as long as that gains."""
        for step in (1, -1):
            at = values.index(self.plan[lever]) if self.plan[lever] in values else 0
            while 0 <= (at := at + step) < len(values):
                plan = self._space.with_value(self.plan, lever, values[at])
                yield from self._try(plan, f"round {number}: {lever} {values[at]}, next to the best so far")
                if self.plan != plan:
                    break

    def _try(self, plan: Plan, why: str) -> Strategy:
        others = _without_batch(plan)
        limit = self._too_large.get(others)
        if limit is not None and plan[COUPLED] > limit:
            yield Skip(plan=plan, reason=f"larger than batch {limit}, which ran out of memory", why=why)
            return
        trial: Trial = yield Ask(plan=plan, why=why)
        if trial.status == "out_of_memory":
            self._too_large[others] = min(plan[COUPLED], limit or plan[COUPLED])
        elif trial.status == "ok" and (trial.samples_per_s or 0.0) > self._rate:
            self._rate, self.plan = trial.samples_per_s or 0.0, plan


def confirm(candidates: Sequence[Plan], *, n_rounds: int = 2, baseline: Ask | None = None) -> Strategy:
    """Run the finalists again in fresh processes, interleaved (A B, then B A), so that drift hits them alike.

    Args:
        baseline: The user's own plan; runs in the same rounds, so that the gain over it is a fair one.
    """
    for number in range(n_rounds):
        why = f"finalist, measured again (round {number + 1} of {n_rounds})"
        asked = [Ask(plan=plan, why=why, kind=REPEAT) for plan in candidates]
        if baseline is not None and baseline.plan not in candidates:
            asked.append(baseline)
        for wish in asked if number % 2 == 0 else reversed(asked):  # noqa: UP028  (a list takes no send)
            yield wish


STRATEGIES: Mapping[str, Callable[[Space], Strategy]] = {
    "exhaustive": exhaustive,
    "coordinate_descent": coordinate_descent,
    "quick": lambda space: coordinate_descent(space, max_rounds=1),
}


def count_planned(space: Space, strategy: str) -> int:
    """Trials at most, for a progress display: the grid, or the sweeps of two rounds."""
    size = len(space.grid()) if space.axes else 0
    if strategy == "exhaustive":
        return size + len(space.skipped)
    sweep = 1 + sum(len(values) - 1 for values in space.axes.values())
    return min(size, sweep if strategy == "quick" else 2 * sweep) + len(space.skipped)


def _project(space: Space) -> Plan:
    """The user's plan, each lever moved to the nearest value of its axis."""
    plan = space.base
    for lever, values in space.axes.items():
        if plan[lever] not in values:
            plan = space.with_value(plan, lever, _find_nearest(plan[lever], values))
        elif lever == COUPLED:
            plan = space.with_value(plan, lever, plan[lever])
    return plan


def _find_nearest(value: Any, values: Sequence[Any]) -> Any:
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in (value, *values)):
        return min(values, key=lambda v: (abs(v - value), v))
    return values[0]


def _without_batch(plan: Plan) -> Plan:
    return plan.replace(batch_size=0, accumulate=0)
