"""Pick four rows of a search, each by a rule that can be checked against the same rows.

Only rows with status ok are considered. A plan that ran several times stands in the table with the row of its median
run; a plan of which any run failed stands with the failed row, and is not picked.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fulltilt.errors import NoPlanError
from fulltilt.records import WHOLE_RUNS, Plan, Trial, format_gib, format_rate
from fulltilt.tuner.picks.failures import describe_failures, find_failure_remedy
from fulltilt.tuner.picks.pick_rules import (
    BY_SPEED,
    BY_SPEED_OF_THE_SMALL,
    BY_SPEED_PER_GIB,
    TieWords,
    count_compared,
    count_plans,
    filter_beside,
    name_mean,
    say_earlier,
    say_fastest,
    say_kept_recipe,
    say_tie,
)
from fulltilt.tuner.picks.picks import Pick, Picks, build_pick, keeps_recipe
from fulltilt.tuner.picks.undecided import choose, compute_simplicity, estimate_speeds, find_ties
from fulltilt.tuner.question.options import LearningRateRule

CONFIRMING = ("repeat", "baseline")
"""Kinds of run that were made side by side, for the comparison that decides."""

MEMORY_SAFETY_PCT = 80.0
MEMORY_TIE_PCT = 2.0
FINALIST_TIE_PCT = 3.0  # of speed: of rows that close to the fastest, and not told from it, the simplest is a finalist
FINALIST_GAP_PCT = 5.0  # twice what two processes of one plan usually differ by, and what drift adds
RECIPE_WORTH_PCT = 3.0  # of speed: what keeping the recipe may cost in a tie, by the means
MEMORY_SPEED_SHARE_PCT = 90.0  # of the best speed: what the pick with the least memory may cost


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


def merge_repeats(trials: Sequence[Trial]) -> tuple[list[Trial], list[Trial]]:
    """Select one row a plan → these, and the rows left over. Probes are neither: they ran a part of the step.

    The row of a plan is that of its median run by samples/s (the lower of the two middle ones). Where a plan was
    measured again, the run that made it a finalist does not count: it was chosen for being fast, luck included. A run
    that failed takes the plan's place in the table, because a plan that fails once out of three is not safe.
    """
    groups: dict[Plan, list[Trial]] = {}
    whole = [trial for trial in trials if trial.kind in WHOLE_RUNS]
    for trial in whole:
        groups.setdefault(trial.plan, []).append(trial)
    confirmed = {row.id for row in find_confirmed(whole)}
    kept = [_select_row(rows, confirmed) for rows in groups.values()]
    ids = {trial.id for trial in kept}
    return kept, [trial for trial in whole if trial.id not in ids]


def _select_row(rows: Sequence[Trial], confirmed: Collection[str]) -> Trial:
    failed = [row for row in rows if row.status != "ok"]
    if failed:
        return failed[0]
    fresh = [row for row in rows if row.id in confirmed] or [row for row in rows if row.kind in CONFIRMING] or rows
    ranked = sorted(fresh, key=lambda row: row.samples_per_s or 0.0)
    return ranked[(len(ranked) - 1) // 2]


def select_finalists(trials: Sequence[Trial], *, limit_gib: float | None, n: int = 2) -> list[Plan]:
    """Select the plans to measure again: the simplest of the fastest that may be recommended, and others as fast.

    A row may be as fast as the fastest when it came within ``FINALIST_GAP_PCT`` of it, or cannot be told from it. With
    the simplest among them, searches that are repeated meet at the same plan where many are equally fast.
    """
    rows, _ = merge_repeats(trials)
    fine = find_recommendable([row for row in rows if row.status == "ok"], limit_gib)
    if not fine:
        return []
    chosen, tied = choose(fine)
    best = max(_read_rate(row) for row in fine)
    alike = [row for row in (chosen, *tied) if _read_rate(row) >= best * (1 - FINALIST_TIE_PCT / 100)]
    first = chosen if n == 1 else min(alike, key=lambda row: (*compute_simplicity(row.plan), -_read_rate(row), row.id))
    least = best * (1 - FINALIST_GAP_PCT / 100)
    close = [row for row in fine if row is not first and (row in tied or row is chosen or _read_rate(row) >= least)]
    others = sorted(close, key=_read_rate, reverse=True)
    return [row.plan for row in (first, *others[: n - 1])]


def _read_rate(row: Trial) -> float:
    return row.samples_per_s or 0.0


def pick(
    rows: Sequence[Trial],
    *,
    user_plan: Plan,
    memory_limit_gib: float | None,
    memory_safety_pct: float = MEMORY_SAFETY_PCT,
    runs: Sequence[Trial] = (),
) -> Picks:
    """Pick from the rows of the table (one a plan).

    Args:
        runs: Every whole run. Plans that ran side by side are compared by the mean of those runs.
        memory_limit_gib: What the device, or the limit of the search, allows; None when it is not known.

    Raises:
        NoPlanError: no row is ok; says how the rows ended.
    """
    fine = [row for row in rows if row.status == "ok" and row.kind in WHOLE_RUNS]
    if not fine:
        raise NoPlanError(describe_failures(rows, runs), remedy=find_failure_remedy(rows, runs))
    history = [run for run in runs or rows if run.status == "ok" and run.kind in WHOLE_RUNS]
    past = _Past(user_plan, runs or rows, find_confirmed(runs or rows), history)
    limit_gib = None if memory_limit_gib is None else memory_limit_gib * memory_safety_pct / 100
    where = "the memory of the device is not known, so no limit was applied"
    if memory_limit_gib is not None and limit_gib is not None:
        where = f"memory at most {format_gib(limit_gib)}, {memory_safety_pct:g} % of {format_gib(memory_limit_gib)}"
    return Picks(
        throughput=_pick_throughput(fine, past),
        efficiency=_pick_efficiency(fine, past),
        recommended=_pick_recommended(fine, past, limit_gib, where),
        memory=_pick_memory(fine, past),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Past:
    """What the rows are judged by."""

    user_plan: Plan
    runs: Sequence[Trial]  # all of them
    again: Sequence[Trial]  # runs that were made side by side
    history: Sequence[Trial]  # whole runs that ended well

    def list_rates(self, plan: Plan) -> tuple[float, ...]:
        return tuple(_read_rate(run) for run in self.again if run.plan == plan)


def _pick_throughput(rows: Sequence[Trial], past: _Past) -> Pick:
    chosen, tied = _choose_by_speed(rows, past)
    rule = f"highest {name_mean(past.history)}samples/s of {count_compared(chosen, rows, past.again)} that ran"
    return _build_compared(chosen, tied, rule, past)


def _choose_by_speed(rows: Sequence[Trial], past: _Past) -> tuple[Trial, list[Trial]]:
    """Choose the fastest row and its ties.

    Where it ran side by side with others, the ties are those that ``_pick_recommended`` names: two lists for one plan
    would contradict each other.
    """
    chosen, tied = choose(rows, past.again, history=past.history, prefers=_prefer_beside(past.again))
    beside = filter_beside(rows, past.again)
    if chosen not in beside:
        return chosen, tied
    chosen, tied = choose(beside, past.again, history=past.history)
    return chosen, [*tied, *_find_earlier(chosen, tied, rows, past)]


def _find_earlier(chosen: Trial, tied: Sequence[Trial], rows: Sequence[Trial], past: _Past) -> list[Trial]:
    """Find the rows from before the runs side by side that are not proven slower than the fastest of these."""
    fastest = max((chosen, *tied), key=lambda row: estimate_speeds([row], past.again, past.history)[0].log_rate)
    beside = filter_beside(rows, past.again)
    others = [row for row in rows if row not in beside]
    groups = [[run for run in past.history if run.plan == row.plan] for row in others]
    return [others[position] for position in find_ties(fastest, past.again, groups, past.history)]


def _pick_efficiency(rows: Sequence[Trial], past: _Past) -> Pick | None:
    known = [(row, memory) for row in rows if (memory := row.device_memory_peak_gib)]
    if not known:
        return None
    chosen, tied = choose(
        [row for row, _ in known],
        past.again,
        history=past.history,
        per=[memory for _, memory in known],
        prefers=_prefer_beside(past.again),
    )
    compared = count_compared(chosen, [row for row, _ in known], past.again)
    rule = f"highest {name_mean(past.history)}samples/s per GiB of {compared} with a memory figure"
    return _build_compared(chosen, tied, rule, past, question=BY_SPEED_PER_GIB)


def _pick_memory(rows: Sequence[Trial], past: _Past) -> Pick | None:
    """Pick the least memory that still trains at an acceptable speed; of rows with the same memory the fastest."""
    confirmed = find_confirmed(rows)
    speeds = estimate_speeds(rows, past.again, past.history)
    rates = {id(row): math.exp(speed.log_rate) for row, speed in zip(rows, speeds, strict=True)}
    best = max(confirmed or rows, key=lambda row: rates[id(row)])
    fast = [row for row in rows if rates[id(row)] >= rates[id(best)] * MEMORY_SPEED_SHARE_PCT / 100]
    known = [row for row in fast if row.device_memory_peak_gib is not None]
    if not known:
        return None
    small = _filter_smallest(known)
    chosen, tied = _choose_by_speed(small, past)
    best_name = "best confirmed speed" if confirmed else "best speed"
    among = f", {say_fastest(chosen, small, past.again)} within {MEMORY_TIE_PCT:g} % of it"
    n_averaged = len(past.list_rates(best.plan)) or sum(run.plan == best.plan for run in past.history)
    mean = f", the geometric mean of {n_averaged} runs" if n_averaged > 1 else ""
    rule = (
        f"least memory of {count_plans(known)} with at least {MEMORY_SPEED_SHARE_PCT:g} % of the {best_name} "
        f"({format_rate(rates[id(best)])} samples/s{mean}, {best.id}){among if len(small) > 1 else ''}"
    )
    return _build_compared(chosen, tied, rule, past, question=BY_SPEED_OF_THE_SMALL)


def _prefer_beside(again: Sequence[Trial]) -> Callable[[Plan], bool]:
    """Prefer plans that ran side by side over those that they tie with: of many single runs the luckiest would win."""
    plans = {run.plan for run in again}
    return lambda plan: plan in plans


def _build_compared(
    chosen: Trial, tied: Sequence[Trial], rule: str, past: _Past, *, question: TieWords = BY_SPEED
) -> Pick:
    """Build the pick of a comparison between plans that ran side by side and plans that ran once, earlier."""
    plans = {run.plan for run in past.again}
    earlier = [row for row in tied if row.plan not in plans] if chosen.plan in plans else []
    beside = [row for row in tied if row not in earlier]
    above = _find_above(chosen, earlier, past, per_gib=question is BY_SPEED_PER_GIB)
    rule += say_tie(beside, question) + say_earlier(earlier, above, question)
    made = build_pick(chosen, tied, rule, past.user_plan)
    return dataclasses.replace(made, runs_samples_per_s=past.list_rates(chosen.plan))


def _find_above(chosen: Trial, rows: Sequence[Trial], past: _Past, *, per_gib: bool = False) -> list[Trial]:
    """Find those of ``rows`` that showed more than the pick that was taken before them."""
    all_rows = (chosen, *rows)
    first, *others = (
        speed.log_rate - (math.log(row.device_memory_peak_gib or math.nan) if per_gib else 0.0)
        for row, speed in zip(all_rows, estimate_speeds(all_rows, past.again, past.history), strict=True)
    )
    return [row for row, other in zip(rows, others, strict=True) if other > first]


def _pick_recommended(rows: Sequence[Trial], past: _Past, limit_gib: float | None, where: str) -> Pick:
    """Pick the fastest of the rows that may be recommended, by runs side by side where there are any.

    Args:
        where: The limit in words.
    """
    user_plan, again, history = past.user_plan, past.again, past.history
    may_be = find_recommendable(rows, limit_gib)
    prefix = ""
    if not _filter_safe(rows, limit_gib):
        least_gib = min(row.device_memory_peak_gib or math.inf for row in may_be)
        prefix = f"no row has {where}; of those with the least memory "
        where = f"{format_gib(least_gib)}, and up to {MEMORY_TIE_PCT:g} % more"
    confirmed = find_confirmed(may_be)
    field, beside = confirmed or may_be, again if confirmed else ()
    chosen, tied = choose(
        field,
        beside,
        history=history,
        prefers=lambda plan: keeps_recipe(user_plan, plan),
        for_up_to_pct=RECIPE_WORTH_PCT,
    )
    passed_over, _ = choose(field, beside, history=history)
    rates: tuple[float, ...] = ()
    earlier: list[Trial] = []
    if confirmed:
        earlier = _find_earlier(chosen, tied, may_be, past)
        rates = past.list_rates(chosen.plan)
        among = f"highest mean samples/s of {count_compared(chosen, may_be, again)} that ran"
    else:
        among = f"highest {name_mean(history)}samples/s of {count_plans(may_be)}"
    rule = f"{prefix}{among} ({where}){say_tie(tied)}"
    rule += say_kept_recipe(user_plan, chosen, passed_over)
    rule += say_earlier(earlier, _find_above(chosen, earlier, past))
    if not any(run.plan == user_plan for run in past.runs):
        rule += "; the settings as they were did not run: nothing is known of how it compares with them"
    return dataclasses.replace(build_pick(chosen, [*tied, *earlier], rule, user_plan), runs_samples_per_s=rates)


def find_confirmed(rows: Sequence[Trial]) -> list[Trial]:
    """Find the rows of plans that were measured again side by side: those of the newest such comparison.

    Only these are compared for the recommendation: the speed of a machine drifts, and a row from a faster minute, or
    of the day before, would win by the time it ran at.
    """
    again = [row for row in rows if row.status == "ok" and row.kind in CONFIRMING]
    newest = max(again, key=_read_number, default=None)
    return [row for row in again if newest is not None and row.comparison == newest.comparison]


def _read_number(row: Trial) -> int:
    """Rows are numbered in the order they ran."""
    return int(row.id[1:]) if row.id[1:].isdigit() else 0


def find_recommendable(rows: Sequence[Trial], limit_gib: float | None) -> list[Trial]:
    """Find the rows under the limit; else those with the least memory, up to ``MEMORY_TIE_PCT`` more."""
    return _filter_safe(rows, limit_gib) or _filter_smallest(rows)


def _filter_safe(rows: Sequence[Trial], limit_gib: float | None) -> list[Trial]:
    """Keep the rows under the limit. A row without a memory figure passes only when no row has one."""
    if limit_gib is None or all(row.device_memory_peak_gib is None for row in rows):
        return list(rows)
    return [row for row in rows if (memory := row.device_memory_peak_gib) is not None and memory <= limit_gib]


def _filter_smallest(rows: Sequence[Trial]) -> list[Trial]:
    known = [(row, memory) for row in rows if (memory := row.device_memory_peak_gib) is not None]
    least_gib = min((memory for _, memory in known), default=0.0)
    return [row for row, memory in known if memory <= least_gib * (1 + MEMORY_TIE_PCT / 100)]


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


def compute_spread_pct(rows: Sequence[Trial]) -> float | None:
    """Compute the range of a plan's repeats over their median: how far processes differ on this machine."""
    rates = [row.samples_per_s for row in rows if row.samples_per_s]
    if len(rates) < 2:
        return None
    return 100 * (max(rates) - min(rates)) / statistics.median(rates)
