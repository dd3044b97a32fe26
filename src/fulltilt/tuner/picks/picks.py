"""The picks of a search: whole rows of its table, each with the rule that chose it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records import Plan, Trial, decode, encode


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """A whole row of the table, and why it was picked.

    Attributes:
        tied_with: Ids of rows that cannot be told from this one (``undecided``): those that ran beside it, the fastest
            first, then those that ran once, earlier, and last the settings as they were where only their pairs of
            runs leave them undecided. Of the earlier ones some may stand above it: their run is no mean.
        changes: "recipe" and "numerics": what differs from the user's plan in a way that can change what is
            learned, one sentence each; empty where nothing does.
        runs_samples_per_s: Of the plan's runs side by side with others, in their order; their mean was compared.
    """

    trial: Trial
    rule: str
    tied_with: tuple[str, ...] = ()
    changes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    runs_samples_per_s: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: encode(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return fields.pop("trial") | fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Pick:
        return cls(
            trial=decode(Trial, data),
            rule=data["rule"],
            tied_with=tuple(data["tied_with"]),
            changes={name: tuple(lines) for name, lines in data["changes"].items()},
            runs_samples_per_s=tuple(data["runs_samples_per_s"]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Picks:
    """The four picks of a search."""

    throughput: Pick
    efficiency: Pick | None  # None when no row has a memory figure
    recommended: Pick
    memory: Pick | None = None  # likewise


def build_pick(trial: Trial, tied: Sequence[Trial], rule: str, user_plan: Plan) -> Pick:
    """Build a pick with what it changes of the user's plan."""
    changes = describe_changes(user_plan, trial.plan)
    return Pick(trial=trial, rule=rule, tied_with=tuple(row.id for row in tied), changes=changes)


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
        if name in ("batch_size", "accumulate") or old == value:
            continue
        if "numerics" in lever.trades:
            numerics.append(f"{name} {old} → {value}")
        if lever.changes_recipe(old) or lever.changes_recipe(value):
            recipe.append(f"{name} {old} → {value}")
    return {"recipe": tuple(recipe), "numerics": tuple(numerics)}


def keeps_recipe(user_plan: Plan, plan: Plan) -> bool:
    """Whether ``plan`` trains on the user's recipe: the same effective batch, and no lever that trades it moved.

    Another micro-batch with the same effective batch is named among the changes and still keeps it.
    """
    same_batch = plan.replace(batch_size=user_plan["batch_size"], accumulate=user_plan["accumulate"])
    is_as_large = plan.effective_batch_size == user_plan.effective_batch_size
    return is_as_large and not describe_changes(user_plan, same_batch)["recipe"]
