"""Switches that are not in force in the recommended plan: tried and what came of it, or what trying them needs."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from fulltilt.levers import Facts, Lever, load_catalogue
from fulltilt.records import Plan, Trial
from fulltilt.tuner.answer.busy import list_busy
from fulltilt.tuner.answer.savings import Interval
from fulltilt.tuner.picks.recommend import CONFIRMING

LeverState = Literal[
    "tried alone", "probed alone", "tried in company", "failed", "cannot apply", "not reached", "not in the space"
]

NOT_FOR_SPEED = ("activation_checkpointing",)  # buys memory with time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeverAdvice:
    """One value of a switch that the recommended plan does not have.

    Attributes:
        state: "tried alone" differs from the recommended plan in this lever only, "in company" in others too; "probed
            alone" is a part of the step with and without it.
        trial_id: The row that says so; None where none has the value.
        effect_pct: samples/s of that row against the recommended one, or of a probe against the one without the value;
            negative is slower.
        effect_ci95_pct: From the intervals inside the two runs; it does not hold what differs between processes.
        busy_ids: Of the rows that say so, those that a busy machine ran.
    """

    lever: str
    value: Any
    state: LeverState
    text: str
    trial_id: str | None = None
    effect_pct: float | None = None
    effect_ci95_pct: Interval | None = None
    busy_ids: tuple[str, ...] = ()


def build_lever_advice(
    recommended: Trial,
    rows: Sequence[Trial],
    *,
    probes: Sequence[Trial] = (),
    axes: Mapping[str, Sequence[object]],
    facts: Facts,
    noise_pct: float | None = None,
    tied: Collection[Plan] = (),
) -> tuple[LeverAdvice, ...]:
    """One entry per switch and value not in force; those that were never run come first.

    Args:
        tied: Plans that the search does not tell from the recommended one, whatever one run of them showed.
    """
    found = []
    plans = {row.id: row.plan for row in rows}
    for lever in load_catalogue().values():
        for value in _list_values(lever, recommended):
            made = _find_run(lever, value, recommended, rows, probes, noise_pct or 0.0)
            if made is not None and plans.get(made.trial_id or "") in tied:
                said = f"{made.text}; its plan is among the ties: all runs together do not tell the two apart"
                made = dataclasses.replace(made, text=said)
            found.append(made or _explain_missing(lever, value, recommended, rows, axes, facts))
    return tuple(sorted(found, key=lambda advice: _ORDER.index(advice.state)))


_ORDER: tuple[LeverState, ...] = (
    "not in the space", "not reached", "failed", "tried alone", "probed alone", "tried in company", "cannot apply",
)  # fmt: skip


def _list_values(lever: Lever, recommended: Trial) -> list[Any]:
    """Values that are meant to be faster and are not in force: the other side of a switch, other precisions."""
    now = recommended.plan.get(lever.name, lever.default)
    if lever.name in NOT_FOR_SPEED or not lever.is_offered:
        return []
    if lever.type is bool or True in typing.get_args(lever.type):
        return [] if now else [True]
    if typing.get_origin(lever.type) is Literal:
        return [value for value in typing.get_args(lever.type) if value not in (now, lever.default)]
    return []


def _find_run(
    lever: Lever, value: Any, recommended: Trial, rows: Sequence[Trial], probes: Sequence[Trial], noise_pct: float
) -> LeverAdvice | None:
    """What a run says about the value: one that differs in it alone, else a probe of it alone, else any."""
    ran = [row for row in rows if row.plan.get(lever.name) == value and row.status == "ok" and row.samples_per_s]
    alone = [row for row in ran if not _list_differences(row, recommended, lever.name)]
    if alone:
        beside = [row for row in alone if row.kind in CONFIRMING] or alone
        ranked = sorted(beside, key=lambda row: row.samples_per_s or 0.0)
        return _describe_tried(lever.name, value, recommended, ranked[(len(ranked) - 1) // 2], noise_pct)
    pair = _find_probe_pair(lever.name, value, recommended, probes)
    if pair is not None:
        return _describe_probed(lever.name, value, *pair)
    if not ran:
        return None
    fastest = max(ran, key=lambda row: (row.kind in CONFIRMING, row.samples_per_s or 0.0))
    return _describe_tried(lever.name, value, recommended, fastest, noise_pct)


def _find_probe_pair(lever: str, value: Any, recommended: Trial, probes: Sequence[Trial]) -> tuple[Trial, Trial] | None:
    """The newest probes of one part without and with the value, equal in everything else."""
    fine = {(p.kind, p.plan): p for p in probes if p.status == "ok" and p.samples_per_s and p.kind != "memory"}
    for (kind, plan), probe in reversed(fine.items()):
        without = fine.get((kind, plan.replace(**{lever: recommended.plan[lever]})))
        if plan.get(lever) == value and without is not None:
            return without, probe
    return None


def _describe_probed(lever: str, value: Any, without: Trial, probe: Trial) -> LeverAdvice:
    effect_pct, ci95 = compute_effect(without, probe)
    part = "the step alone" if probe.kind == "device" else "the loader alone"
    text = f"{_name(lever, value)}, {part} ({probe.id} against {without.id}), {_say_effect(effect_pct, ci95, 0.0)}"
    return LeverAdvice(
        lever=lever, value=value, state="probed alone", text=text, trial_id=probe.id, effect_pct=effect_pct,
        effect_ci95_pct=ci95, busy_ids=list_busy(without, probe),
    )  # fmt: skip


def _explain_missing(
    lever: Lever,
    value: Any,
    recommended: Trial,
    rows: Sequence[Trial],
    axes: Mapping[str, Sequence[object]],
    facts: Facts,
) -> LeverAdvice:
    """Why no run says anything about the value, and what one would need."""
    name, plan = _name(lever.name, value), recommended.plan.replace(**{lever.name: value})
    having = [row for row in rows if row.plan.get(lever.name) == value]
    ran = [row for row in having if row.status != "skipped"]
    row = ran[-1] if ran else having[-1] if having else None
    obstacle = lever.guard(value, plan, facts) or (row.reason if row is not None and not ran else None)
    state: LeverState
    if obstacle is not None:
        state, text = "cannot apply", f"{name}: {obstacle}"
    elif row is not None:
        state, text = "failed", f"{name}: no run of it ended well; {row.id} {row.status}: {row.reason}"
    elif value in axes.get(lever.name, ()):
        text = f"{name}: was not run, though it is in the space; a larger --budget or --exhaustive reaches it"
        state = "not reached"
    else:
        note = lever.note(value, plan, facts)
        text = f"{name}: was not run, the space of this search does not hold it; {_say_how_to_add(lever, value)}"
        state, text = "not in the space", text + (f" ({note})" if note else "")
    return LeverAdvice(lever=lever.name, value=value, state=state, text=text, trial_id=row.id if row else None)


def _name(lever: str, value: Any) -> str:
    return f"{lever} {'yes' if value is True else value}"


def _say_how_to_add(lever: Lever, value: Any) -> str:
    """The setting that makes it an axis."""
    values = ["false", "true"] if value is True else [str(lever.default), str(value)]
    return f"benchmark.levers.{lever.name}: [{', '.join(values)}] tries it"


def _describe_tried(lever: str, value: Any, recommended: Trial, row: Trial, noise_pct: float) -> LeverAdvice:
    effect_pct, ci95 = compute_effect(recommended, row)
    others = _list_differences(row, recommended, lever)
    where = f"in {row.id}, which differs in {', '.join(others)} too," if others else f"({row.id})"
    text = f"{_name(lever, value)} {where} {_say_effect(effect_pct, ci95, noise_pct)}"
    return LeverAdvice(
        lever=lever,
        value=value,
        state="tried in company" if others else "tried alone",
        text=text,
        trial_id=row.id,
        effect_pct=effect_pct,
        effect_ci95_pct=ci95,
        busy_ids=list_busy(recommended, row),
    )


def _list_differences(row: Trial, recommended: Trial, lever: str) -> list[str]:
    return [name for name, value in recommended.plan.items() if name != lever and row.plan.get(name) != value]


def compute_effect(base: Trial, row: Trial) -> tuple[float, Interval | None]:
    """Change of samples/s from ``base`` to ``row`` in %, with the interval that the two runs' own intervals give."""
    base_rate, rate = base.samples_per_s or math.nan, row.samples_per_s or math.nan
    effect_pct = 100 * (rate / base_rate - 1)
    if base.samples_per_s_ci95 is None or row.samples_per_s_ci95 is None:
        return effect_pct, None
    half = math.hypot(_compute_half(base.samples_per_s_ci95, base_rate), _compute_half(row.samples_per_s_ci95, rate))
    low, high = (100 * (rate / base_rate * math.exp(side) - 1) for side in (-half, half))
    return effect_pct, (low, high)


def _compute_half(interval: Interval, rate: float) -> float:
    """Of the logarithm, of which an interval of a quotient is: no speed is more than 100 % slower than another."""
    low, high = interval
    return math.log(high / low) / 2 if low > 0 else math.log(high / rate)


def _say_effect(effect_pct: float, ci95: Interval | None, noise_pct: float) -> str:
    """With the interval named for what it is: blocks inside a run of each, not runs."""
    spread = f" ({ci95[0]:+.1f} to {ci95[1]:+.1f} % by the blocks of one run each)" if ci95 is not None else ""
    if ci95 is not None and ci95[0] <= 0 <= ci95[1]:
        return f"made no difference that shows: {effect_pct:+.1f} %{spread}"
    said = f"was {abs(effect_pct):.1f} % {'slower' if effect_pct < 0 else 'faster'}{spread}"
    if abs(effect_pct) <= noise_pct:
        said += f", less than the {noise_pct:.0f} % that runs of one plan lay apart"
    return said
