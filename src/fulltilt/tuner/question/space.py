"""What a search may try: values for some levers around the user's own plan.

The effective batch (``batch_size × accumulate``) stays the user's unless batch sizes are named, in the configuration or
by a flag, or freed. While it stays, a batch size brings its ``accumulate`` with it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.config import Config, parse_on_bad_sample, plan_of
from fulltilt.errors import ConfigError, format_nearest
from fulltilt.levers import Facts, load_catalogue
from fulltilt.levers.placement import resolve as resolve_placement
from fulltilt.levers.precision import resolve as resolve_precision
from fulltilt.records import Plan

SMALLEST_SHARE = 16  # of the effective batch: micro-batches below it pay the cost of a step too often
N_DIVISORS = 6  # batch sizes tried while the effective batch stays
N_DOUBLINGS = 6  # batch sizes above the user's when the effective batch is free
COUNTABLE = 5_000  # combinations up to which every plan of a grid is made
COUPLED = "batch_size"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Levers with the values to try, the plan they vary, and the values that cannot apply."""

    axes: Mapping[str, tuple[Any, ...]]  # lever → values, in the order given; batch sizes ascend
    base: Plan  # the user's, moved onto the axes where it lies off them; batch size aside
    user_plan: Plan  # made applicable
    facts: Facts
    effective_batch_size: int | None = None  # of every plan; None when it is free
    memory_gib: float | None = None  # that a plan may use of the device; None: not known
    skipped: tuple[tuple[Plan, str], ...] = ()  # values that apply in no plan of the grid, with the reason
    notes: tuple[str, ...] = ()  # what was changed about the user's own plan, in words

    def with_value(self, plan: Plan, lever: str, value: Any) -> Plan:
        """Return the plan with one lever moved, made canonical."""
        return canonicalize(plan.replace(**self.list_changes(lever, value)), self.facts, keep=(lever,))

    def list_changes(self, lever: str, value: Any) -> dict[str, Any]:
        """Return the lever and those that must move with it, as far as the search may try their values."""
        changes = {lever: value}
        if lever == COUPLED and self.effective_batch_size is not None:
            changes["accumulate"] = self.effective_batch_size // value
        needs = load_catalogue()[lever].needs(value, self.facts)
        return changes | {other: needed for other, needed in needs.items() if needed in self.axes.get(other, ())}

    def grid(self) -> list[Plan]:
        """List every plan once: the other levers in their order, batch sizes ascending within each combination."""
        others = [name for name in self.axes if name != COUPLED]
        plans: dict[Plan, None] = {}
        for values in itertools.product(*(self.axes[name] for name in others)):
            plan = self.base.replace(**dict(zip(others, values, strict=True)))
            for batch_size in self.axes.get(COUPLED, (plan["batch_size"],)):
                plans[self.with_value(plan, COUPLED, batch_size)] = None
        return list(plans)

    def holds(self, plan: Plan) -> bool:
        """Whether the plan is one of ``grid()``, where a value that its guard refuses stands at the default."""
        catalogue = load_catalogue()
        chosen = {}
        for name, values in self.axes.items():
            refused = (value for value in values if catalogue[name].guard(value, plan, self.facts))
            fitting = [plan[name]] if plan[name] in values else [*refused]
            if not fitting:
                return False
            chosen[name] = fitting[0]
        made = self.base.replace(**chosen)
        return self.with_value(made, COUPLED, made[COUPLED]) == plan

    @property
    def n_combinations(self) -> int:
        """Size of the product of the axes, before equal plans are folded together."""
        return math.prod(len(values) for values in self.axes.values())


def build_space(
    config: Config,
    facts: Facts,
    *,
    batch_sizes: Sequence[int] | None = None,
    num_workers: Sequence[int] | None = None,
    free_batch: bool = False,
    all_levers: bool = False,
    named_only: bool = False,
) -> Space:
    """Choose the axes by flag, then by the ``benchmark`` section, then by what levers suggest here.

    Args:
        all_levers: Where ``benchmark.levers`` is null, try every lever that leaves the recipe alone: for searches
            whose cost does not grow with the grid.
        named_only: Suggest nothing: what neither flag nor configuration asks for stays as it is.

    Raises:
        ConfigError: ``benchmark.levers`` names an unknown lever or a lever that has its own key.
    """
    user, notes = _resolve_base(config, facts)
    benchmark = config.benchmark
    named = batch_sizes or benchmark.batch_sizes
    is_free = bool(named) or free_batch
    effective = None if is_free else user.effective_batch_size
    if named_only:
        named = named or [user[COUPLED]]
    axes: dict[str, tuple[Any, ...]] = {
        COUPLED: tuple(sorted(set(named))) if named else _suggest_batch_sizes(user, facts, is_free=is_free)
    }
    workers = num_workers if num_workers is not None else benchmark.num_workers_options
    workers = workers or ([user["num_workers"]] if named_only else None)
    axes["num_workers"] = _unique(workers) if workers else _suggest("num_workers", user, facts)
    axes |= _build_switch_axes(config, user, facts, asked_only=named_only)
    if benchmark.levers is not None:
        axes |= _read_further_axes(benchmark.levers)
    elif all_levers and not named_only:
        axes |= _suggest_further_axes(user, facts, axes)
    draft = Space(axes=axes, base=user, user_plan=user, facts=facts, effective_batch_size=effective, notes=tuple(notes))
    return _drop_impossible(draft)


def canonicalize(plan: Plan, facts: Facts, *, keep: Sequence[str] = ()) -> Plan:
    """Reset values that cannot apply to their lever's default, so that plans that come to the same are equal.

    Batch size and accumulate are never reset (that would change what is trained), nor are the levers in ``keep``
    while another lever's value is the cause.
    """
    catalogue = load_catalogue()
    fixed = {COUPLED, "accumulate", *keep}
    for name, value in plan.items():
        lever = catalogue[name]
        if name not in fixed and value != lever.default and lever.guard(value, plan, facts):
            plan = plan.replace(**{name: lever.default})
    return plan


def _resolve_base(config: Config, facts: Facts) -> tuple[Plan, list[str]]:
    plan, notes = plan_of(config), []
    value, note = resolve_precision(plan["precision"], facts)
    plan = plan.replace(precision=value)
    notes += [note] if note else []
    may_hold = parse_on_bad_sample(config.data.on_bad_sample) is None
    value, note = resolve_placement(plan["placement"], plan, facts, may_hold=may_hold)
    plan = plan.replace(placement=value)
    notes += [f"placement: {note}"] if note else []
    made = canonicalize(plan, facts)
    for name in made:
        if made[name] != plan[name]:
            reason = load_catalogue()[name].guard(plan[name], plan, facts)
            notes.append(f"{name}={plan[name]} of the configuration cannot apply ({reason}); taken as {made[name]}")
    return made, notes


def _build_switch_axes(
    config: Config, user: Plan, facts: Facts, *, asked_only: bool = False
) -> dict[str, tuple[Any, ...]]:
    """Build the axes of ``test_mixed_precision`` and ``test_pin_memory``; null means what suits the machine.

    Args:
        asked_only: Null means no.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    asked, pin = config.benchmark.test_mixed_precision, config.benchmark.test_pin_memory
    if asked or (asked is None and not asked_only):
        axes["precision"] = _suggest("precision", user, facts)
        if asked and len(axes["precision"]) == 1 and facts.device_type == "cpu":
            axes["precision"] = _unique((*axes["precision"], "bf16"))  # asked for, though it may be emulated
    if pin or (pin is None and not asked_only):
        axes["pin_memory"] = (False, True) if pin else _suggest("pin_memory", user, facts)
    return {name: values for name, values in axes.items() if len(values) > 1}


def _read_further_axes(levers: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    catalogue = load_catalogue()
    axes = {}
    for name, values in levers.items():
        if name not in catalogue:
            raise ConfigError(
                f"no lever named {name}; {format_nearest(name, catalogue)}", key=f"benchmark.levers.{name}"
            )
        if name in (COUPLED, "num_workers", "accumulate"):
            own = {"num_workers": "num_workers_options"}.get(name, "batch_sizes")
            raise ConfigError(f"{name} has its own key; use benchmark.{own}", key=f"benchmark.levers.{name}")
        axes[name] = _unique(values)
    return axes


def _suggest_further_axes(user: Plan, facts: Facts, taken: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Suggest levers that may help here, without those that the configuration settles."""
    asked = {COUPLED, "num_workers", "precision", "pin_memory", *taken}
    levers = [lever for name, lever in load_catalogue().items() if name not in asked and lever.is_offered]
    free = [lever.name for lever in levers if not lever.changes_recipe(user[lever.name])]
    suggested = {name: _suggest(name, user, facts) for name in free}
    return {name: values for name, values in suggested.items() if len(values) > 1}


def _suggest(name: str, user: Plan, facts: Facts) -> tuple[Any, ...]:
    """Return the lever's candidates for this machine, with the user's own value."""
    values = tuple(load_catalogue()[name].candidates(facts))
    if user[name] in values:
        return values
    both = (*values, user[name])
    return tuple(sorted(both)) if all(isinstance(v, int) for v in both) else both


def _suggest_batch_sizes(user: Plan, facts: Facts, *, is_free: bool) -> tuple[int, ...]:
    if not is_free:
        return suggest_divisors(user.effective_batch_size, user["batch_size"])
    first = user["batch_size"]
    values = {max(1, first // 2), *(first * 2**i for i in range(N_DOUBLINGS + 1))}
    return tuple(sorted(v for v in values if facts.n_samples is None or v <= facts.n_samples or v == first))


def suggest_divisors(effective: int, own: int | None = None) -> tuple[int, ...]:
    """Suggest up to six divisors of the effective batch, from itself down to its sixteenth, spaced by ⅔ or more.

    ``own`` joins them, and where it is the smallest so does the next one below it, so that both sides of it are tried.
    """
    kept: list[int] = []
    for value in range(effective, max(1, effective // SMALLEST_SHARE) - 1, -1):
        if effective % value == 0 and (not kept or value <= kept[-1] / 1.5):
            kept.append(value)
        if len(kept) == N_DIVISORS:
            break
    if own and own <= kept[-1]:
        kept += [value for value in range(own // 2, 0, -1) if effective % value == 0][:1]
    return tuple(sorted({*kept, own} if own else kept))


def _drop_impossible(draft: Space) -> Space:
    """Take out values that no plan can have; each is kept once, as a row that says why."""
    possible: dict[str, tuple[Any, ...]] = dict.fromkeys(draft.axes, ())
    skipped: list[tuple[Plan, str]] = []
    for name, values in draft.axes.items():
        for value in values:
            reason = _find_reason(draft, name, value)
            if reason is None:
                possible[name] += (value,)
            else:
                skipped.append((draft.base.replace(**draft.list_changes(name, value)), f"{name}={value}: {reason}"))
    if not possible[COUPLED]:
        return dataclasses.replace(draft, axes={}, skipped=tuple(skipped))
    axes, base = {name: values for name, values in possible.items() if values}, draft.base
    for name, values in axes.items():
        if base[name] not in values and name != COUPLED:
            base = base.replace(**{name: find_nearest(base[name], values)})
    return dataclasses.replace(draft, axes=axes, base=canonicalize(base, draft.facts), skipped=tuple(skipped))


def find_nearest(value: Any, values: Sequence[Any]) -> Any:
    """Return the nearest number, the smaller of two equally near; of other values the first."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in (value, *values)):
        return min(values, key=lambda v: (abs(v - value), v))
    return values[0]


def _find_reason(space: Space, name: str, value: Any) -> str | None:
    """Say why no plan can have this value: its guard refuses it whatever other levers say."""
    catalogue = load_catalogue()
    moved = [{other: each} for other, values in space.axes.items() if other != name for each in values]
    reason = None
    for change in ({}, *moved):  # one other lever at a time: guards look at one other at most
        made = space.base.replace(**(change | space.list_changes(name, value)))
        reason = catalogue[name].guard(value, made, space.facts)
        if reason is None and name == COUPLED:
            reason = catalogue["accumulate"].guard(made["accumulate"], made, space.facts)
        if reason is None:
            return None
    return reason


def _unique(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
