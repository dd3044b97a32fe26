"""Levers that are off in the recommended plan: what came of trying them, or what trying them needs."""

import dataclasses
import math
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from fulltilt.levers import Facts, Lever, load_catalogue
from fulltilt.records import IN_TURNS, Plan, Roof, Trial
from fulltilt.report.advice import TIED, UNTRIED, describe_effect, describe_probed, describe_tried, name_lever
from fulltilt.tuner.answer.savings import Interval

LeverState = Literal[
    "not in the space", "not reached", "failed", "tried alone", "probed alone", "tried in company", "cannot apply"
]
_ORDER = typing.get_args(LeverState)

NOT_FOR_SPEED = ("activation_checkpointing",)  # buys memory with time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeverAdvice:
    """One value of a lever that the recommended plan does not have.

    Attributes:
        state: "tried alone" differs from the recommended plan in this lever only, "in company" in others too; "probed
            alone" is a part of the step with and without it.
        trial_id: The row behind the text; None where no row has the value.
        effect_pct: samples/s of that row against the recommended one, or of a probe against the one without the value;
            negative is slower.
        effect_ci95_pct: From the intervals inside the two runs; it does not cover differences between processes.
        busy_ids: Rows behind the figures that a busy machine ran.
    """

    lever: str
    value: Any
    state: LeverState
    text: str
    trial_id: str | None = None
    effect_pct: float | None = None
    effect_ci95_pct: Interval | None = None
    busy_ids: tuple[str, ...] = ()


def list_busy(*rows: Trial) -> tuple[str, ...]:
    """List the rows that a busy machine ran: on a quiet one another part may bound the step."""
    return tuple(row.id for row in rows if row.is_busy)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What a search found, as far as advice rests on it.

    Attributes:
        rows: The whole runs to compare ``recommended`` with, repeats included.
        roofs: Measured in this search, on this device.
        axes: Lever → values that the search could try.
        tied: Plans that the search does not tell from the recommended one, whatever one run of them showed.
    """

    recommended: Trial
    rows: Sequence[Trial]
    probes: Sequence[Trial] = ()
    roofs: Sequence[Roof] = ()
    axes: Mapping[str, Sequence[object]]
    facts: Facts
    tied: Collection[Plan] = ()


def build_lever_advice(found: Findings) -> tuple[LeverAdvice, ...]:
    """Build one entry per lever and value that is off; values that were never run come first."""
    advice = [
        _find_run(lever, value, found) or _explain_missing(lever, value, found)
        for lever in load_catalogue().values()
        for value in _list_values(lever, found.recommended)
    ]
    return tuple(sorted(advice, key=lambda each: _ORDER.index(each.state)))


def _list_values(lever: Lever, recommended: Trial) -> list[Any]:
    """List the values that are meant to be faster and are off: the other side of a switch, other precisions."""
    now = recommended.plan.get(lever.name, lever.default)
    if lever.name in NOT_FOR_SPEED or not lever.is_offered:
        return []
    if lever.type is bool or True in typing.get_args(lever.type):
        return [] if now else [True]
    if typing.get_origin(lever.type) is Literal:
        return [value for value in typing.get_args(lever.type) if value not in (now, lever.default)]
    return []


def _find_run(lever: Lever, value: Any, found: Findings) -> LeverAdvice | None:
    """Describe a run that differs in the value alone, else a probe of the value alone, else any run that has it."""
    recommended = found.recommended
    whole = [row for row in found.rows if row.kind != IN_TURNS and row.status == "ok" and row.samples_per_s]
    ran = [row for row in whole if row.plan.get(lever.name) == value]
    ranked = sorted(ran, key=lambda row: row.samples_per_s or 0.0)
    alone = [row for row in ranked if not _list_differences(row, recommended, lever.name)]
    pair = None if alone else _find_probe_pair(lever.name, value, found)
    state: LeverState
    if pair is not None:
        base, row = pair
        state, where = "probed alone", describe_probed(*pair)
    elif ran:
        base, row = recommended, alone[(len(alone) - 1) // 2] if alone else ranked[-1]
        others = _list_differences(row, recommended, lever.name)
        state, where = "tried in company" if others else "tried alone", describe_tried(row, others)
    else:
        return None
    effect_pct, ci95_pct = compute_effect(base, row)
    said = f"{name_lever(lever.name, value)}{where} {describe_effect(effect_pct, ci95_pct)}"
    return LeverAdvice(
        lever=lever.name,
        value=value,
        state=state,
        text=said + (TIED if pair is None and row.plan in found.tied else ""),
        trial_id=row.id,
        effect_pct=effect_pct,
        effect_ci95_pct=ci95_pct,
        busy_ids=list_busy(base, row),
    )


def _find_probe_pair(lever: str, value: Any, found: Findings) -> tuple[Trial, Trial] | None:
    """Find the newest probes of one part without and with the value, equal in everything else."""
    fine = {(p.kind, p.plan): p for p in found.probes if p.status == "ok" and p.samples_per_s and p.kind != "memory"}
    for (kind, plan), probe in reversed(fine.items()):
        without = fine.get((kind, plan.replace(**{lever: found.recommended.plan[lever]})))
        if plan.get(lever) == value and without is not None:
            return without, probe
    return None


def _explain_missing(lever: Lever, value: Any, found: Findings) -> LeverAdvice:
    """Say why no run tells anything about the value, and what one would need."""
    plan, facts = found.recommended.plan.replace(**{lever.name: value}), found.facts
    having = [row for row in found.rows if row.plan.get(lever.name) == value]
    ran = [row for row in having if row.status != "skipped"]
    row = (ran or having or [None])[-1]
    obstacle = lever.guard(value, plan, facts) or (row.reason if row is not None and not ran else None)
    state: LeverState = "not reached" if value in found.axes.get(lever.name, ()) else "not in the space"
    if obstacle is not None or row is not None:
        state = "failed" if obstacle is None else "cannot apply"
    note = lever.note(value, plan, facts) if state == "not in the space" else None
    why = UNTRIED[state].format(
        obstacle=obstacle,
        row=row,
        lever=lever.name,
        values="false, true" if value is True else f"{lever.default}, {value}",
        note=f" ({note})" if note else "",
    )
    text = f"{name_lever(lever.name, value)}: {why}"
    return LeverAdvice(lever=lever.name, value=value, state=state, text=text, trial_id=row.id if row else None)


def _list_differences(row: Trial, recommended: Trial, lever: str) -> list[str]:
    return [name for name, value in recommended.plan.items() if name != lever and row.plan.get(name) != value]


def compute_effect(base: Trial, row: Trial) -> tuple[float, Interval | None]:
    """Compute the change of samples/s from ``base`` to ``row`` in %, with an interval from those of the two runs."""
    base_rate, rate = base.samples_per_s or math.nan, row.samples_per_s or math.nan
    effect_pct = 100 * (rate / base_rate - 1)
    if base.samples_per_s_ci95 is None or row.samples_per_s_ci95 is None:
        return effect_pct, None
    half = math.hypot(_compute_half(base.samples_per_s_ci95, base_rate), _compute_half(row.samples_per_s_ci95, rate))
    low, high = (100 * (rate / base_rate * math.exp(side) - 1) for side in (-half, half))
    return effect_pct, (low, high)


def _compute_half(interval: Interval, rate: float) -> float:
    """Compute half the interval of the logarithm, so that no speed is more than 100 % slower than another."""
    low, high = interval
    return math.log(high / low) / 2 if low > 0 else math.log(high / rate)
