"""The catalogue of performance levers: one file a lever, found here, read by everyone else.

Adding a lever is adding one file with a ``LEVER``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from fulltilt.levers._interval import read_interval
from fulltilt.levers._spec import STAGES, Facts, Lever, Setup, Stage, Trade
from fulltilt.records import Plan

__all__ = [
    "STAGES",
    "Facts",
    "Lever",
    "Setup",
    "Stage",
    "Trade",
    "compute_plan_digest",
    "default_plan",
    "find_notes",
    "find_obstacles",
    "find_reports",
    "load_catalogue",
    "read_interval",
    "settle_plan",
]


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


def compute_plan_digest(plan: Mapping[str, Any]) -> str:
    """A short name of what a plan changes; a lever that a later release adds leaves it as it is."""
    catalogue = load_catalogue()
    changed = {name: v for name, v in plan.items() if name not in catalogue or v != catalogue[name].default}
    return Plan(changed).digest


def find_obstacles(plan: Mapping[str, Any], facts: Facts) -> list[str]:
    """Why this plan cannot apply here, one line a lever; empty when it can."""
    catalogue = load_catalogue()
    reasons = ((name, catalogue[name].guard(value, plan, facts)) for name, value in plan.items())
    return [f"{name}={plan[name]}: {reason}" for name, reason in reasons if reason]


NEVER_SETTLED = ("accumulate", "batch_size", "num_workers", "precision")
"""Levers whose value the user must change: another one would change what is learned, or how it is computed."""


def settle_plan(plan: Plan, facts: Facts) -> tuple[Plan, list[str]]:
    """A user's plan made applicable here: what cannot apply is taken at its default, one note a lever.

    For training from a configuration that was written for another machine (``pin_memory: true`` on a CPU). A trial is
    never settled: its row would be of another plan.
    """
    catalogue = load_catalogue()
    notes = []
    for name, value in plan.items():
        default = catalogue[name].default
        reason = None if name in NEVER_SETTLED or value == default else catalogue[name].guard(value, plan, facts)
        if reason:
            plan = plan.replace(**{name: default})
            notes.append(f"{name}={value} cannot apply and is taken as {default}: {reason}")
    return plan, notes


def find_notes(plan: Mapping[str, Any], facts: Facts) -> list[str]:
    """What a user should know about values that do apply, one line a lever."""
    catalogue = load_catalogue()
    notes = ((name, catalogue[name].note(value, plan, facts)) for name, value in plan.items())
    return [f"{name}={plan[name]}: {note}" for name, note in notes if note]


def find_reports(plan: Mapping[str, Any], setup: Setup) -> list[str]:
    """What a run measured of its levers, one line a lever; for its end."""
    catalogue = load_catalogue()
    reports = ((name, catalogue[name].report(setup)) for name in plan)
    return [f"{name}={plan[name]}: {report}" for name, report in reports if report]
