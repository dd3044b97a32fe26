"""List the plans and probes that a search may ask for, lever by lever from one plan."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records import Plan
from fulltilt.tuner.question.space import COUNTABLE, COUPLED, Space


class Candidates:
    """Lists plans of a space, and values of its axes to probe; ``base`` is the user's plan, moved onto the axes."""

    def __init__(self, space: Space, base: Plan):
        self._space = space
        self.batches: tuple[int, ...] = tuple(space.axes.get(COUPLED, (base[COUPLED],)))
        self.counts: list[int] = sorted(space.axes.get("num_workers", (base["num_workers"],)))

    def list_levers(self, *, of_loader: bool) -> list[str]:
        """List the levers but batch and workers, precision first: what others gain depends on it most."""
        catalogue = load_catalogue()
        names = [
            name
            for name in self._space.axes
            if name not in (COUPLED, "num_workers") and (catalogue[name].stage == "loader") == of_loader
        ]
        return sorted(names, key=lambda name: name != "precision")

    def flip(self, plan: Plan, lever: str, values: Sequence[Any] | None = None) -> list[Plan]:
        """Return the plan with each other value of one lever, or of these values, as far as it can apply."""
        values = self._space.axes[lever] if values is None else values
        flipped = [self._space.with_value(plan, lever, v) for v in values if v != plan[lever]]
        guard = load_catalogue()[lever].guard
        return [p for p in flipped if not guard(p[lever], p, self._space.facts)]

    def find_nearest_batch(self, wanted: float) -> int:
        return min(self.batches, key=lambda b: abs(math.log(b / wanted)))

    def choose_counts(self) -> list[int]:
        """Choose numbers of workers to begin with: the fewest, next to half the cores, and next to all."""
        least, *above = self.counts
        n_cores = self._space.facts.n_cores_usable
        wanted = [min(above, key=lambda n: abs(n - target)) for target in (n_cores / 2, n_cores)] if above else []
        return list(dict.fromkeys([least, *wanted]))

    def list_plans(self, fast: Plan, feed: Plan | None) -> list[Plan]:
        """List the grid; of a large one the fastest settings so far and each lever moved from them.

        What is left out differs in two levers at least from what probes found to be fastest: ``fast`` on the device,
        ``feed`` for the loader, None where it was not probed.
        """
        if self._space.n_combinations <= COUNTABLE:
            return self._space.grid()
        of_device, of_loader = self.list_levers(of_loader=False), self.list_levers(of_loader=True)
        if feed is not None:
            for lever in of_loader:
                fast = self._space.with_value(fast, lever, feed[lever])
        moved = [fast, *(plan for lever in (*of_device, *of_loader) for plan in self.flip(fast, lever))]
        placed = [self._space.with_value(plan, "num_workers", count) for plan in moved for count in self.counts]
        return list({self._space.with_value(plan, COUPLED, batch): None for plan in placed for batch in self.batches})

    def list_neighbours(self, plan: Plan, levers: Collection[str]) -> list[Plan]:
        """Move one of the levers: to the next value on an ordered axis, to any value on the others.

        A value that cannot apply beside the rest is left out: with no workers there is nothing to keep alive.
        """
        plans: dict[Plan, None] = {}
        for lever in levers:
            values = self._space.axes.get(lever, ())
            if lever in (COUPLED, "num_workers") and plan[lever] in values:
                values = sorted(values)  # those of workers are in the order that they were named in
                at = values.index(plan[lever])
                values = (*values[max(at - 1, 0) : at], *values[at + 1 : at + 2])
            plans |= dict.fromkeys(self.flip(plan, lever, values))
        return list(plans)

    def list_onward(self, before: Plan, plan: Plan) -> list[Plan]:
        """Take one more step the way that led from one plan to the other; empty without a single ordered step."""
        changed = [lever for lever in self._space.axes if before[lever] != plan[lever]]
        if len(changed) != 1 or changed[0] not in (COUPLED, "num_workers"):
            return []
        values = self.batches if changed == [COUPLED] else self.counts
        start, at = (values.index(found[changed[0]]) for found in (before, plan))
        onward = at + (1 if at > start else -1)
        return [self._space.with_value(plan, changed[0], values[onward])] if 0 <= onward < len(values) else []


def strip_loader(plan: Plan) -> Plan:
    """Reset every lever of the loader to its default: a probe of the device uses none of them."""
    catalogue = load_catalogue()
    names = [name for name in plan if catalogue[name].stage == "loader" and name != COUPLED]
    return plan.replace(**{name: catalogue[name].default for name in names})


def spread(values: Sequence[Any], n: int) -> list[Any]:
    """Choose ``n`` of the values or fewer, both ends among them, evenly by position."""
    if len(values) <= n:
        return list(values)
    return [values[round(i * (len(values) - 1) / (n - 1))] for i in range(n)]
