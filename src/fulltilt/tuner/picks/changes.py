"""What a plan changes of the user's: recipe, numerics, simplicity, and the learning rate that goes with it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fulltilt.levers import BATCH, load_catalogue
from fulltilt.records import Plan
from fulltilt.tuner.question.options import LearningRateRule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """The learning rate that goes with the recommended plan; ``from`` and ``to`` in the JSON."""

    rule: LearningRateRule
    start: float | None
    to: float | None

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.rule, "from": self.start, "to": self.to}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LearningRate":
        return cls(rule=data["rule"], start=data["from"], to=data["to"])


def describe_changes(user_plan: Plan, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Describe what differs from the user's plan in a way that can change what is learned."""
    recipe, numerics = [], []
    before, after = user_plan.effective_batch_size, plan.effective_batch_size
    if before != after:
        recipe.append(f"effective batch {before} → {after}")
    elif user_plan["batch_size"] != plan["batch_size"]:
        recipe.append(
            f"micro-batch {user_plan['batch_size']} → {plan['batch_size']}, effective batch as before: only layers and "
            "losses that look across a batch (batch normalisation, contrastive losses) see the difference"
        )
    catalogue = load_catalogue()
    for name, value in plan.items():
        lever, old = catalogue[name], user_plan.get(name, catalogue[name].default)
        if name in BATCH or old == value:
            continue
        if "numerics" in lever.trades:
            numerics.append(f"{name} {old} → {value}")
        if lever.changes_recipe(old) or lever.changes_recipe(value):
            recipe.append(f"{name} {old} → {value}")
    return {"recipe": tuple(recipe), "numerics": tuple(numerics)}


def changes_learning(user_plan: Plan, plan: Plan) -> bool:
    """Whether a plan changes anything that can change what is learned."""
    return any(describe_changes(user_plan, plan).values())


def compute_simplicity(plan: Plan) -> tuple[int, int, float]:
    """Compute a key that is smaller for simpler plans: effective batch, batch, sum of the levers' complexities."""
    catalogue = load_catalogue()
    complexity = sum(catalogue[n].complexity(v) for n, v in plan.items() if n in catalogue and n != "batch_size")
    return plan.effective_batch_size, plan["batch_size"], complexity


def plan_learning_rate(
    rate: float | None, *, user_plan: Plan, plan: Plan, rule: LearningRateRule, is_batch_free: bool
) -> LearningRate:
    """Scale the learning rate with the effective batch, only when that was allowed to change.

    sqrt: lr × √(new / old), the usual choice for adaptive optimizers; linear: lr × new / old, for SGD with warm-up.
    """
    ratio = plan.effective_batch_size / user_plan.effective_batch_size
    if not is_batch_free or rule == "none" or ratio == 1:
        return LearningRate(rule="none" if not is_batch_free else rule, start=rate, to=rate)
    factor = math.sqrt(ratio) if rule == "sqrt" else ratio
    return LearningRate(rule=rule, start=rate, to=None if rate is None else rate * factor)
