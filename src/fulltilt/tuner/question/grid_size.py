"""Count the plans of a grid without making them: a GPU's has tens of thousands, and each costs 18 µs.

Plans come to the same where a guard resets a value. A guard is a function of the levers that it reads, so levers of
which none reads another are counted apart, and the counts multiplied.
"""

from __future__ import annotations

import itertools
import math
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from fulltilt.levers import Lever, load_catalogue
from fulltilt.tuner.question.space import COUPLED, Space


def count_grid(space: Space) -> int:
    """Count the distinct plans of ``space.grid()``, exactly; 0 without axes."""
    if not space.axes:
        return 0
    return math.prod(_count_part(space, part) for part in _part_levers(space))


def _count_part(space: Space, part: frozenset[str]) -> int:
    """Count the distinct values of these levers; the others, which they do not read, stay put."""
    axes = {name: space.axes[name] for name in space.axes if name in part}
    found = set()
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        batch_size = chosen.pop(COUPLED, space.base[COUPLED])
        plan = space.with_value(space.base.replace(**chosen), COUPLED, batch_size)
        found.add(tuple(plan[name] for name in sorted(part)))
    return len(found)


def _part_levers(space: Space) -> list[frozenset[str]]:
    """Divide the levers into parts: two are in one where a guard of one reads the other, or moves it."""
    catalogue = load_catalogue()
    values = {
        name: tuple(dict.fromkeys((*space.axes.get(name, ()), space.base[name], catalogue[name].default)))
        for name in space.base
    }
    parts = {name: frozenset((name,)) for name in space.base}
    links = [(COUPLED, "accumulate")]
    links += [(COUPLED, n) for value in values[COUPLED] for n in catalogue[COUPLED].needs(value, space.facts)]
    links += [(name, other) for name in space.base for other in _find_reads(catalogue[name], space, values)]
    for name, other in links:
        joined = parts[name] | parts[other]
        parts.update(dict.fromkeys(joined, joined))
    return list(dict.fromkeys(parts.values()))


def _find_reads(lever: Lever, space: Space, values: Mapping[str, tuple[Any, ...]]) -> set[str]:
    """Find the levers that the guard reads; which it reads next may depend on what it read before."""
    known, reads = set[str](), set[str]()
    while not known or not reads <= known:
        known |= reads
        names = sorted(known)
        for own, *others in itertools.product(values[lever.name], *(values[name] for name in names)):
            plan = _ReadPlan({**space.base, **dict(zip(names, others, strict=True)), lever.name: own}, reads)
            lever.guard(own, plan, space.facts)
        if not reads:
            break
    return known


class _ReadPlan(UserDict[str, Any]):
    """A plan that notes which of its levers were read."""

    def __init__(self, values: Mapping[str, Any], reads: set[str]):
        super().__init__(values)
        self._reads = reads

    def __getitem__(self, name: str) -> Any:
        self._reads.add(name)
        return super().__getitem__(name)
