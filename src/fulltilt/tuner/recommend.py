"""Four picks from the rows of a search, each by a rule that can be checked against the same rows.

Only rows with status ok are considered. A plan that ran several times stands in the table with the row of its median
run; a plan of which any run failed stands with the failed row, and is not picked.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from fulltilt.errors import NoPlanError
from fulltilt.levers import load_catalogue
from fulltilt.records import WHOLE_RUNS, Plan, Trial
from fulltilt.stats import find_ties
from fulltilt.tuner.confirm import compute_run_error
from fulltilt.tuner.picks import Pick, Picks, build_pick

LearningRateRule = Literal["sqrt", "linear", "none"]

CONFIRMING = ("repeat", "baseline")
"""Kinds of run that were made beside each other, for the comparison that decides."""

MEMORY_SAFETY_PCT = 80.0
INDIFFERENCE_PCT = 1.0  # of speed: closer than that a smaller batch or a simpler plan is worth more
MEMORY_TIE_PCT = 2.0
FINALIST_GAP_PCT = 5.0  # twice what two processes of one plan usually differ by, and what drift adds
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
    def from_json(cls, data: Mapping[str, Any]) -> LearningRate:
        return cls(rule=data["rule"], start=data["from"], to=data["to"])


def merge_repeats(trials: Sequence[Trial]) -> tuple[list[Trial], list[Trial]]:
    """One row a plan, and the rows left over. Probes are neither: they ran a part of the step.

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
    """The plans to measure again: the simplest of the fastest under the memory limit, and others that may be as fast.

    A row may be as fast as the fastest when it came within ``FINALIST_GAP_PCT`` of it, or the intervals overlap. With
    the simplest among them, searches that are repeated meet at the same plan where many are equally fast.
    """
    rows, _ = merge_repeats(trials)
    fine = _filter_safe([row for row in rows if row.status == "ok"], limit_gib)
    if not fine:
        return []
    first, _ = _choose(fine, [row.samples_per_s or 0.0 for row in fine])
    fastest = max(fine, key=lambda row: row.samples_per_s or 0.0)
    close = [row for row in fine if row is not first and _may_be_as_fast(row, fastest)]
    others = sorted(close, key=lambda row: -(row.samples_per_s or 0.0))
    return [row.plan for row in (first, *others[: n - 1])]


def _may_be_as_fast(row: Trial, fastest: Trial) -> bool:
    rate, best = row.samples_per_s or 0.0, fastest.samples_per_s or 0.0
    if rate >= best * (1 - FINALIST_GAP_PCT / 100):
        return True
    high = row.samples_per_s_ci95[1] if row.samples_per_s_ci95 else rate
    low = fastest.samples_per_s_ci95[0] if fastest.samples_per_s_ci95 else best
    return high >= low


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
        raise NoPlanError(describe_failures(rows))
    limit_gib = None if memory_limit_gib is None else memory_limit_gib * memory_safety_pct / 100
    return Picks(
        throughput=_pick_throughput(fine, user_plan),
        efficiency=_pick_efficiency(fine, user_plan),
        recommended=_pick_recommended(fine, user_plan, limit_gib, memory_limit_gib, memory_safety_pct, runs),
        memory=_pick_memory(fine, user_plan),
    )


def describe_failures(rows: Sequence[Trial]) -> str:
    """``no plan can run: 3 out_of_memory, 1 error; first error: …; …``."""
    counts: dict[str, list[Trial]] = {}
    for row in rows:
        counts.setdefault(row.status, []).append(row)
    if not counts:
        return "no plan can run: the search ran no trial; give it a larger --budget"
    parts = ", ".join(f"{len(found)} {status}" for status, found in counts.items())
    reasons = "; ".join(f"{status}, {found[0].id}: {found[0].reason}" for status, found in counts.items())
    remedy = ""
    if "out_of_memory" in counts:
        remedy = "; try smaller batch sizes, or a larger --memory-limit"
    return f"no plan can run: {parts}. {reasons}{remedy}"


def _pick_throughput(rows: Sequence[Trial], user_plan: Plan) -> Pick:
    chosen, tied = _choose(rows, [row.samples_per_s or 0.0 for row in rows])
    rule = f"highest samples/s of {len(rows)} rows that ran{_say_tie(tied)}"
    return build_pick(chosen, tied, rule, user_plan)


def _pick_efficiency(rows: Sequence[Trial], user_plan: Plan) -> Pick | None:
    known = [(row, memory) for row in rows if (memory := row.device_memory_peak_gib)]
    if not known:
        return None
    chosen, tied = _choose(
        [row for row, _ in known],
        [(row.samples_per_s or 0.0) / memory for row, memory in known],
        scale=[1 / memory for _, memory in known],
    )
    rule = f"highest samples/s per GiB of {len(known)} rows with a memory figure{_say_tie(tied)}"
    return build_pick(chosen, tied, rule, user_plan)


def _pick_memory(rows: Sequence[Trial], user_plan: Plan) -> Pick | None:
    """The least memory that still trains at an acceptable speed; of rows with the same memory the fastest."""
    confirmed = find_confirmed(rows)
    best = max(confirmed or rows, key=lambda row: row.samples_per_s or 0.0)
    best_rate = best.samples_per_s or 0.0
    fast = [row for row in rows if (row.samples_per_s or 0.0) >= best_rate * MEMORY_SPEED_SHARE_PCT / 100]
    known = [(row, memory) for row in fast if (memory := row.device_memory_peak_gib) is not None]
    if not known:
        return None
    least_gib = min(memory for _, memory in known)
    small = [row for row, memory in known if memory <= least_gib * (1 + MEMORY_TIE_PCT / 100)]
    chosen, tied = _choose(small, [row.samples_per_s or 0.0 for row in small])
    best_name = "best confirmed speed" if confirmed else "best speed"
    among = f", the fastest of {len(small)} within {MEMORY_TIE_PCT:g} % of it" if len(small) > 1 else ""
    count = "1 row" if len(known) == 1 else f"{len(known)} rows"
    rule = (
        f"least memory of {count} with at least {MEMORY_SPEED_SHARE_PCT:g} % of the {best_name} "
        f"({best_rate:,.0f} samples/s, {best.id}){among}{_say_tie(tied)}"
    )
    return build_pick(chosen, tied, rule, user_plan)


def _pick_recommended(
    rows: Sequence[Trial],
    user_plan: Plan,
    limit_gib: float | None,
    memory_gib: float | None,
    safety_pct: float,
    runs: Sequence[Trial],
) -> Pick:
    if limit_gib is None:
        safe, where = list(rows), "the memory of the device is not known, so no limit was applied"
    else:
        safe = _filter_safe(rows, limit_gib)
        where = f"memory at most {limit_gib:.2f} GiB, {safety_pct:g} % of {memory_gib:.2f} GiB"
    if not safe:
        smallest = min(rows, key=lambda row: (row.device_memory_peak_gib or math.inf, -(row.samples_per_s or 0.0)))
        rule = f"no row has {where}; this is the row with the least memory"
        return build_pick(smallest, [], rule, user_plan)
    confirmed = find_confirmed(safe)
    if not confirmed:
        chosen, tied = _choose(safe, [row.samples_per_s or 0.0 for row in safe])
        return build_pick(chosen, tied, f"highest samples/s of {len(safe)} rows ({where}){_say_tie(tied)}", user_plan)
    again = find_confirmed(runs or rows)
    chosen, tied = _choose_by_means(confirmed, again)
    rule = (
        f"highest mean samples/s of {len(confirmed)} plans that were measured again, side by side, of {len(rows)} that "
        f"ran ({where}){_say_undecided(tied)}"
    )
    rates = tuple(run.samples_per_s or 0.0 for run in again if run.plan == chosen.plan)
    return dataclasses.replace(build_pick(chosen, tied, rule, user_plan), runs_samples_per_s=rates)


def _choose_by_means(rows: Sequence[Trial], runs: Sequence[Trial]) -> tuple[Trial, list[Trial]]:
    """The best by the mean of its runs side by side, and those that this many runs cannot tell from the best.

    Only within ``INDIFFERENCE_PCT`` of the best mean a smaller batch or a simpler plan wins. A gap that these runs
    cannot tell from none is still the best guess: taking the simpler plan across up to 3 % of it cost more than twice
    the regret in the median (simulation, 75 workloads: 0.39 instead of 0.18 %). It is named, however wide: on a noisy
    machine two runs of each cannot tell 10 % from none, and a search that is repeated may end at either.
    """
    groups = [[run for run in runs if run.plan == row.plan] or [row] for row in rows]
    error = compute_run_error(groups)
    figures = []
    for group in groups:
        mean = statistics.geometric_mean([run.samples_per_s or 0.0 for run in group])
        half = 1.96 * error / math.sqrt(len(group))
        figures.append((mean, (mean * math.exp(-half), mean * math.exp(half))))
    chosen, _ = _settle_ties(rows, [(mean, None) for mean, _ in figures])
    tied = [rows[i] for i in find_ties(figures, INDIFFERENCE_PCT, max_gap_pct=100.0)]
    return chosen, [row for row in tied if row is not chosen]


def find_confirmed(rows: Sequence[Trial]) -> list[Trial]:
    """Rows of plans that were measured again beside each other: those of the newest such comparison.

    Only these are compared for the recommendation: the speed of a machine drifts, and a row from a faster minute, or
    from a search that was started again the day after, would win against them by the time it ran at.
    """
    again = [row for row in rows if row.status == "ok" and row.kind in CONFIRMING]
    newest = max(again, key=_read_number, default=None)
    return [row for row in again if newest is not None and row.comparison == newest.comparison]


def _read_number(row: Trial) -> int:
    """Rows are numbered in the order they ran."""
    return int(row.id[1:]) if row.id[1:].isdigit() else 0


def _filter_safe(rows: Sequence[Trial], limit_gib: float | None) -> list[Trial]:
    """Rows under the limit. A row without a memory figure passes only when no row has one."""
    if limit_gib is None or all(row.device_memory_peak_gib is None for row in rows):
        return list(rows)
    return [row for row in rows if (memory := row.device_memory_peak_gib) is not None and memory <= limit_gib]


def _choose(
    rows: Sequence[Trial], values: Sequence[float], *, scale: Sequence[float] | None = None
) -> tuple[Trial, list[Trial]]:
    """The best row and those tied with it; of these the smaller batch, then the simpler plan, is taken."""
    factors = scale or [1.0] * len(rows)
    figures = []
    for row, value, factor in zip(rows, values, factors, strict=True):
        interval = row.samples_per_s_ci95
        figures.append((value, None if interval is None else (interval[0] * factor, interval[1] * factor)))
    return _settle_ties(rows, figures)


def _settle_ties(
    rows: Sequence[Trial], figures: Sequence[tuple[float, tuple[float, float] | None]]
) -> tuple[Trial, list[Trial]]:
    indices = find_ties(figures, INDIFFERENCE_PCT)
    tied = [rows[i] for i in indices]
    order = {id(rows[i]): figures[i][0] for i in indices}
    chosen = min(tied, key=lambda row: (*_compute_simplicity(row.plan), -order[id(row)], row.id))
    return chosen, [row for row in tied if row is not chosen]


def _compute_simplicity(plan: Plan) -> tuple[int, int, float]:
    return plan.effective_batch_size, plan["batch_size"], compute_complexity(plan)


def compute_complexity(plan: Plan) -> float:
    """Sum of the levers' own complexities, batch left out: it is compared by size first."""
    catalogue = load_catalogue()
    return sum(
        catalogue[name].complexity(value) for name, value in plan.items() if name in catalogue and name != "batch_size"
    )


def _say_tie(tied: Sequence[Trial]) -> str:
    return f"; tied with {_count(tied)}, of which it is the smaller batch or the simpler plan" if tied else ""


def _say_undecided(tied: Sequence[Trial]) -> str:
    """Of means: within ``INDIFFERENCE_PCT`` the simpler plan was taken, beyond that the faster mean."""
    return f"; tied with {_count(tied)}, which these runs cannot tell from the fastest" if tied else ""


def _count(tied: Sequence[Trial]) -> str:
    return "1 other" if len(tied) == 1 else f"{len(tied)} others"


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
    """Range of the repeats of a plan over their median: how far processes differ on this machine."""
    rates = [row.samples_per_s for row in rows if row.samples_per_s]
    if len(rates) < 2:
        return None
    return 100 * (max(rates) - min(rates)) / statistics.median(rates)
