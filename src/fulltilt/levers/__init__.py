"""The catalogue of performance levers: one file a lever, found here, read by everyone else.

Adding a lever is adding one file with a ``LEVER``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from fulltilt.levers._spec import STAGES, Facts, Lever, Setup, Stage, Trade
from fulltilt.records import Plan

__all__ = ["STAGES", "Facts", "Lever", "Setup", "Stage", "Trade", "default_plan", "find_obstacles", "load_catalogue"]


@functools.cache
def load_catalogue() -> Mapping[str, Lever]:
    """All levers by name, in the order the engine applies them."""
    found = [
        importlib.import_module(f"{__name__}.{module.name}").LEVER
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_")
    ]
    found.sort(key=lambda lever: (STAGES.index(lever.stage), lever.name))
    return {lever.name: lever for lever in found}


def default_plan(values: Mapping[str, Any] | None = None) -> Plan:
    """A complete plan: every lever at its default, but for ``values``."""
    catalogue = load_catalogue()
    given = dict(values or {})
    unknown = given.keys() - catalogue.keys()
    if unknown:
        raise KeyError(f"no lever named {', '.join(sorted(unknown))}; levers: {', '.join(catalogue)}")
    return Plan({name: lever.default for name, lever in catalogue.items()} | given)


def find_obstacles(plan: Mapping[str, Any], facts: Facts) -> list[str]:
    """Why this plan cannot apply here, one line a lever; empty when it can."""
    catalogue = load_catalogue()
    reasons = ((name, catalogue[name].guard(value, plan, facts)) for name, value in plan.items())
    return [f"{name}={plan[name]}: {reason}" for name, reason in reasons if reason]
