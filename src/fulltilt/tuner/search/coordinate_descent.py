"""Coordinate descent: move one lever at a time. It takes over where models fail."""

from collections.abc import Sequence
from typing import Any

from fulltilt.levers import find_obstacles
from fulltilt.records import Plan, Trial
from fulltilt.tuner.question.space import COUPLED, Space, find_nearest
from fulltilt.tuner.search.journal import LARGER
from fulltilt.tuner.search.session import Ask, Skip, Strategy

MAX_ROUNDS = 4  # the third rarely moves anything, the limit is for noise that never settles


def coordinate_descent(space: Space, *, max_rounds: int = MAX_ROUNDS) -> Strategy:
    """Move one lever at a time, each time from the best plan so far, until a round changes nothing.

    The first round tries every value of a lever, batch sizes upward until memory ends; later rounds try the
    neighbours of the best value on ordered axes, and every value on the others.
    """
    if not space.axes:
        return
    climb = _Climb(space)
    yield from climb.visit(climb.plan, "the user's plan, or the nearest one in the space")
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
        self.plan = project(space)
        self._rate = 0.0
        self._too_large: dict[Plan, int] = {}

    def move(self, lever: str, number: int) -> Strategy:
        """Try values of one lever, in the round of this number."""
        values = self._space.axes[lever]
        if len(values) < 2 and self.plan[lever] in values:
            return
        if number > 1 and lever == COUPLED:
            yield from self._walk(lever, values, number)
            return
        start = self.plan  # every value around the plan that was best when the sweep began
        for value in values:
            plan = self._space.with_value(start, lever, value)
            yield from self.visit(plan, f"round {number}: {lever} {value}, the rest as it is so far")

    def _walk(self, lever: str, values: Sequence[Any], number: int) -> Strategy:
        """Try values from the best one outward on both sides, as long as that gains."""
        for step in (1, -1):
            at = values.index(self.plan[lever]) if self.plan[lever] in values else 0
            while 0 <= (at := at + step) < len(values):
                plan = self._space.with_value(self.plan, lever, values[at])
                yield from self.visit(plan, f"round {number}: {lever} {values[at]}, next to the best so far")
                if self.plan != plan:
                    break

    def visit(self, plan: Plan, why: str) -> Strategy:
        """Run a plan, unless it is known not to run, and move there where it is the fastest so far."""
        others = without_batch(plan)
        limit = self._too_large.get(others)
        if limit is not None and plan[COUPLED] > limit:
            yield Skip(plan=plan, reason=f"larger than batch {limit}, {LARGER}", why=why)
            return
        obstacles = find_obstacles(plan, self._space.facts)
        if obstacles:  # a lever by itself, while the one it needs has not moved: no workers, nothing to prefetch
            yield Skip(plan=plan, reason="; ".join(obstacles), why=why)
            return
        trial: Trial = yield Ask(plan=plan, why=why)
        if trial.status == "out_of_memory":
            self._too_large[others] = min(plan[COUPLED], limit or plan[COUPLED])
        elif trial.status == "ok" and (trial.samples_per_s or 0.0) > self._rate:
            self._rate, self.plan = trial.samples_per_s or 0.0, plan


def project(space: Space) -> Plan:
    """Return the user's plan with each lever moved to the nearest value of its axis."""
    plan = space.base
    for lever, values in space.axes.items():
        if plan[lever] not in values or lever == COUPLED:
            plan = space.with_value(plan, lever, find_nearest(plan[lever], values))
    return plan


def without_batch(plan: Plan) -> Plan:
    """Return the part of a plan that is the same at every batch size."""
    return plan.replace(batch_size=0, accumulate=0)
