"""The catalogue of performance levers. Adding a lever is adding one file here that defines ``LEVER``."""

# ruff: noqa: F401

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fulltilt.levers._environment import set_before_torch
from fulltilt.levers._interval import read_interval
from fulltilt.levers._spec import STAGES, Facts, Lever, PlanValues, Setup, Stage
from fulltilt.records import Plan

BATCH = ("batch_size", "accumulate")
"""One choice: the effective batch is their product."""


@functools.cache
def load_catalogue() -> Mapping[str, Lever]:
    """Return all levers by name, in the order in which the engine applies them."""
    return _load(importlib.import_module(__name__))


@functools.cache
def load_inference_catalogue() -> Mapping[str, Lever]:
    """Return the levers of inference by name, in the order in which they are applied.

    precision and threads are keys of training too; what they do to a model that only infers is their own.
    """
    return _load(importlib.import_module(f"{__name__}.inference"))


def _load(package: ModuleType) -> dict[str, Lever]:
    found = [
        importlib.import_module(f"{package.__name__}.{module.name}").LEVER
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_") and not module.ispkg
    ]
    found.sort(key=lambda lever: (STAGES.index(lever.stage), lever.name))
    return {lever.name: lever for lever in found}


def select_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select what trained weights depend on, and drop levers of speed and memory from ``values`` of a configuration."""
    for lever in load_catalogue().values():
        section, _, name = lever.key.rpartition(".")
        if set(lever.trades) <= {"speed", "memory"} and not lever.changes_recipe(values[section][name]):
            values[section].pop(name)
    return {name: values[name] for name in ("task", "model", "loss", "data", "optim", "speed")}


def default_plan(values: PlanValues | None = None) -> Plan:
    """Build a plan with every lever at its default, except ``values``."""
    catalogue = load_catalogue()
    given = dict(values or {})
    unknown = given.keys() - catalogue.keys()
    if unknown:
        raise KeyError(f"no lever named {', '.join(sorted(unknown))}; levers: {', '.join(catalogue)}")
    return Plan({name: lever.default for name, lever in catalogue.items()} | given)


def compute_plan_digest(plan: PlanValues) -> str:
    """Hash what a plan changes; a lever that a later release adds does not change the result."""
    catalogue = load_catalogue()
    changed = {name: v for name, v in plan.items() if name not in catalogue or v != catalogue[name].default}
    return Plan(changed).digest


def list_changed(own: PlanValues, plan: PlanValues) -> list[tuple[str, ...]]:
    """List what a plan changes, each by itself: the names of levers, batch size and accumulation as one."""
    changed = [name for name in load_catalogue() if name in plan and plan[name] != own.get(name)]
    batch = tuple(name for name in changed if name in BATCH)
    return [*([batch] if batch else []), *((name,) for name in changed if name not in BATCH)]


def list_environment(plan: PlanValues) -> dict[str, str]:
    """List the variables that this plan needs before a process loads torch."""
    catalogue = load_catalogue()
    return {n: text for name, value in plan.items() for n, text in catalogue[name].environment(value).items()}


def find_obstacles(plan: PlanValues, facts: Facts, catalogue: Mapping[str, Lever] | None = None) -> list[str]:
    """Say why this plan cannot apply here, one line per lever; empty when it can.

    Args:
        catalogue: The plan is over these levers; None: over those of training.
    """
    return _ask(plan, lambda lever, value: lever.guard(value, plan, facts), catalogue)


NEVER_SETTLED = ("accumulate", "batch_size", "num_workers", "precision")
"""Levers that only the user may change: another value changes what is learned, or how it is computed."""


def settle_plan(plan: Plan, facts: Facts) -> tuple[Plan, list[str]]:
    """Replace values that cannot apply here by their defaults, with one note per lever.

    For training from a configuration written for another machine (``pin_memory: true`` on a CPU); trials never do it.
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


def find_notes(plan: PlanValues, facts: Facts) -> list[str]:
    """Say what a user should know about values that do apply, one line per lever."""
    return _ask(plan, lambda lever, value: lever.note(value, plan, facts))


def find_reports(plan: PlanValues, setup: Setup) -> list[str]:
    """Say what a run measured of its levers, one line per lever."""
    return _ask(plan, lambda lever, value: lever.report(setup))


def _ask(
    plan: PlanValues, question: Callable[[Lever, Any], str | None], catalogue: Mapping[str, Lever] | None = None
) -> list[str]:
    """Put a question to every lever of a plan; return one line for each that has something to say."""
    catalogue = load_catalogue() if catalogue is None else catalogue
    said = ((name, value, question(catalogue[name], value)) for name, value in plan.items())
    return [f"{name}={value}: {text}" for name, value, text in said if text]
