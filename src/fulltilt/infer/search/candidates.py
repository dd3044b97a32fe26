"""List the plans of inference that are worth trying here, and say why the others are not."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.levers import Facts, Lever
from fulltilt.records import Plan

STRUCTURE = ("engine", "quantization", "precision")
"""Levers whose values are tried in all combinations; of the others, each by itself on the best of those."""

PRIOR = (("onnx", "int8"), ("onnx", "none"), ("eager", "int8"), ("aot", "none"), ("compile", "none"))
"""Which (engine, quantization) is tried first: what was fastest most often, and builds fast."""


def build_baseline(catalogue: Mapping[str, Lever], own: Mapping[str, Any]) -> Plan:
    """Return eager fp32 with the user's own threads: the plan that every other one is compared with."""
    plan = Plan({name: lever.default for name, lever in catalogue.items()})
    return plan.replace(threads=own["threads"]) if "threads" in plan and own.get("threads") else plan


def list_structures(catalogue: Mapping[str, Lever], facts: Facts, baseline: Plan) -> tuple[list[Plan], dict[str, str]]:
    """List the combinations of ``STRUCTURE`` beside the baseline, the most promising first; why others cannot apply."""
    found, refused = list[Plan](), dict[str, str]()
    names = [name for name in STRUCTURE if name in catalogue]
    for values in itertools.product(*(_list_values(catalogue[name], facts) for name in names)):
        plan = baseline.replace(**dict(zip(names, values, strict=True)))
        if plan == baseline:
            continue
        if obstacle := find_obstacle(catalogue, facts, plan):
            refused[name_plan(plan, baseline)] = obstacle
        else:
            found.append(plan)
    return sorted(found, key=_rank), refused


def list_variants(catalogue: Mapping[str, Lever], facts: Facts, plan: Plan) -> list[Plan]:
    """List the plans that differ from ``plan`` in one lever beside those of ``STRUCTURE``."""
    names = [name for name in catalogue if name not in STRUCTURE]
    plans = [plan.replace(**{name: value}) for name in names for value in _list_values(catalogue[name], facts)]
    return [p for p in dict.fromkeys(plans) if p != plan and not find_obstacle(catalogue, facts, p)]


def list_all(catalogue: Mapping[str, Lever], facts: Facts, baseline: Plan) -> list[Plan]:
    """List every combination of all levers that can apply, beside the baseline: for the exhaustive search."""
    values = [_list_values(lever, facts) for lever in catalogue.values()]
    plans = [Plan(dict(zip(catalogue, chosen, strict=True))) for chosen in itertools.product(*values)]
    return sorted((p for p in plans if p != baseline and not find_obstacle(catalogue, facts, p)), key=_rank)


def find_obstacle(catalogue: Mapping[str, Lever], facts: Facts, plan: Plan) -> str | None:
    """Say why a plan cannot apply here; None where it can."""
    said = (lever.guard(plan[name], plan, facts) for name, lever in catalogue.items())
    return next((text for text in said if text), None)


def name_plan(plan: Plan, baseline: Plan) -> str:
    """Name a plan by what it changes: ``onnx int8``, ``compile bf16, 1 thread``."""
    plain = {"none", "fp32"}
    numbers = [each for each in (plan["quantization"], plan.get("precision", "fp32")) if each not in plain] or ["fp32"]
    words = [" ".join([plan["engine"], *numbers]).replace("_", " ")]
    for name, value in plan.items():
        if name in STRUCTURE or value == baseline.get(name):
            continue
        if name == "threads":
            words.append("all threads" if value is None else f"{value} thread{'s' * (value != 1)}")
        else:
            words.append(name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


def _list_values(lever: Lever, facts: Facts) -> Sequence[Any]:
    return tuple(dict.fromkeys((lever.default, *lever.candidates(facts))))


def _rank(plan: Plan) -> tuple[int, str]:
    key = (plan["engine"], plan["quantization"])
    return (PRIOR.index(key) if key in PRIOR and plan.get("precision") == "fp32" else len(PRIOR), plan.key)
