"""List the plans of inference that are worth trying here, and say why the others are not."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fulltilt.levers import Facts, Lever, find_obstacles
from fulltilt.records import Plan

NAMED = ("engine", "quantization", "precision")
STRUCTURE = (*NAMED, "cuda_graphs")
"""Levers whose values are tried in all combinations; of the others, each by itself on the best of those."""

PRIOR = (
    "onnx int8 fp32", "onnx none fp32", "eager int8 fp32", "eager none bf16 graphs", "compile none bf16 graphs",
    "eager none fp16 graphs", "compile none bf16", "aot none bf16", "aot none fp32", "compile none fp32",
)  # fmt: skip
"""Which engine, quantization and precision (with CUDA graphs) is tried first: what was fastest most often."""


def build_baseline(catalogue: Mapping[str, Lever], own: Mapping[str, Any]) -> Plan:
    """Return eager fp32 with the user's own threads: the plan that every other one is compared with."""
    plan = Plan({name: lever.default for name, lever in catalogue.items()})
    return plan.replace(threads=own["threads"]) if own.get("threads") else plan


def list_combinations(
    catalogue: Mapping[str, Lever], facts: Facts, baseline: Plan, names: Collection[str] = STRUCTURE
) -> tuple[list[Plan], dict[str, str]]:
    """List all combinations of these levers beside the baseline, the most promising first; why others cannot apply."""
    found, refused = list[Plan](), dict[str, str]()
    for values in itertools.product(*(_list_values(catalogue[name], facts) for name in names)):
        plan = baseline.replace(**dict(zip(names, values, strict=True)))
        if obstacles := find_obstacles(plan, facts, catalogue):
            refused[name_plan(plan, baseline)] = obstacles[0]
        elif plan != baseline:
            found.append(plan)
    return sorted(found, key=_rank), refused


def list_variants(catalogue: Mapping[str, Lever], facts: Facts, plan: Plan) -> list[Plan]:
    """List the plans that differ from ``plan`` in one lever beside those of ``STRUCTURE``."""
    names = [name for name in catalogue if name not in STRUCTURE]
    plans = [plan.replace(**{name: value}) for name in names for value in _list_values(catalogue[name], facts)]
    return [p for p in plans if p != plan and not find_obstacles(p, facts, catalogue)]


def name_plan(plan: Plan, baseline: Plan) -> str:
    """Name a plan by what it changes: ``onnx int8``, ``compile bf16, 1 thread``."""
    numbers = [each for each in (plan["quantization"], plan["precision"]) if each not in ("none", "fp32")] or ["fp32"]
    words = [" ".join([plan["engine"], *numbers]).replace("_", " ")]
    for name, value in plan.items():
        if name in NAMED or value == baseline[name]:
            continue
        if name == "threads":
            words.append("all threads" if value is None else f"{value} thread{'s' * (value != 1)}")
        else:
            words.append(name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


def _list_values(lever: Lever, facts: Facts) -> Sequence[Any]:
    return tuple(dict.fromkeys((lever.default, *lever.candidates(facts))))


def _rank(plan: Plan) -> tuple[Any, ...]:
    key = " ".join(plan[name] for name in NAMED) + " graphs" * plan["cuda_graphs"]
    known = PRIOR.index(key) if key in PRIOR else len(PRIOR)
    return known, plan["quantization"] != "none", plan["engine"] != "eager", plan.key
