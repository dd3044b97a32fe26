"""What the recommended plan saves of the user's own run, and when the search has paid for itself.

The two plans ran in the same rounds, so each pair of runs had the same minute of the machine. The process is the unit
of replication: the interval is over runs, and every plan of the rounds tells how much runs differ here.

Two pairs that happen to agree do not make the interval narrow. It is never narrower than the errors that the runs' own
blocks show, and where a busy machine ran a compared run, than the spread of all runs of the two plans in the search:
pairing cancels drift that a whole round shares, and contention comes and goes within a round.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from fulltilt.records import WHOLE_RUNS, Plan, Trial
from fulltilt.report.summary import count
from fulltilt.stats import compute_contrast_interval
from fulltilt.tuner.picks.recommend import find_confirmed
from fulltilt.tuner.picks.undecided import CLEAR, compute_spread, estimate_error

SavingsVerdict = Literal["faster", "slower", "no gain", "same plan"]
Interval = tuple[float, float]

MIN_PAIRS = 2  # one pair says nothing about its own spread


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Savings:
    """The configured run with the user's plan (before) and with the recommended one (after).

    Times are of training alone, evaluation and checkpoints left out. Intervals are 95 %.

    Attributes:
        verdict: "no gain" when the interval of the gain holds 0; "same plan" when there is nothing to compare.
        gain_pct: Share of the training time saved, by the means over the ``n_pairs`` rounds that both plans ran in.
        search_s: What the search took, rows of earlier runs in the folder included.
        compared_ids: Of the runs that the means are over, in the order they ran: ``n_pairs`` of each plan.
        payback_s: Training time with the recommended plan after which it has saved what the search took.
            None where a compared run is a busy machine's: what it showed is no promise for a quiet one.
    """

    verdict: SavingsVerdict
    baseline_id: str
    recommended_id: str
    search_s: float
    n_pairs: int = 0
    compared_ids: tuple[str, ...] = ()
    n_samples: int | None = None
    n_epochs: int | None = None
    before_s: float | None = None
    after_s: float | None = None
    saved_s: float | None = None
    saved_s_ci95: Interval | None = None
    gain_pct: float | None = None
    gain_ci95_pct: Interval | None = None
    payback_s: float | None = None
    payback_s_ci95: Interval | None = None


def build_savings(
    runs: Sequence[Trial],
    *,
    baseline: Trial | None,
    recommended: Trial,
    n_samples: int | None,
    n_epochs: int | None,
    search_s: float,
) -> tuple[Savings | None, dict[str, str]]:
    """Compute the savings, and why figures of them are missing, by dotted name.

    Args:
        runs: Every whole run of the search, repeats included.
        baseline: The row of the user's own plan.
    """
    if baseline is None:
        return None, {"savings": "the user's own plan was not run"}
    ids: dict[str, Any] = {"baseline_id": baseline.id, "recommended_id": recommended.id, "search_s": search_s}
    if baseline.plan == recommended.plan:
        if not any(run.status == "ok" and run.plan != baseline.plan for run in runs):
            return None, {"savings": "only one plan ran to its end, the settings as they were"}
        same = Savings(verdict="same plan", **ids)
        return same, _explain_nulls(same, "the settings as they were are the recommended ones")
    if baseline.status != "ok":
        return None, {"savings": f"the user's own plan ended with {baseline.status}: {baseline.reason}"}
    before, after = (_find_beside(runs, plan) for plan in (baseline.plan, recommended.plan))
    n_pairs = min(len(before), len(after))
    if n_pairs < MIN_PAIRS:
        missing = "the recommended plan and the user's own ran side by side in"
        return None, {"savings": f"{missing} {count(n_pairs, 'round')}, {MIN_PAIRS} are needed"}
    others = [_find_beside(runs, plan) for plan in {run.plan for run in runs} - {baseline.plan, recommended.plan}]
    paired_ci95 = compute_speedup_ci95(_read_rates(before), _read_rates(after), list(map(_read_rates, others)))
    compared = sorted([*before[:n_pairs], *after[:n_pairs]], key=_read_order)
    before_rate, after_rate = (statistics.geometric_mean(_read_rates(side[:n_pairs])) for side in (before, after))
    speedup, reach = after_rate / before_rate, math.exp(_compute_reach(runs, compared, n_pairs))
    low, high = min(paired_ci95[0], speedup / reach), max(paired_ci95[1], speedup * reach)
    low_pct, high_pct = _compute_gain_pct(low), _compute_gain_pct(high)
    verdict: SavingsVerdict = "no gain" if low <= 1 <= high else "faster" if low > 1 else "slower"
    figures: dict[str, Any] = {"gain_pct": _compute_gain_pct(speedup), "gain_ci95_pct": (low_pct, high_pct)}
    unpaid = f"{verdict}: nothing pays the search back"
    if verdict == "faster" and any(run.is_busy for run in compared):
        unpaid = "runs of a busy machine were compared: what they show is no claim for a quiet one"
    elif verdict == "faster":  # each second of training with the faster plan saves ``speedup − 1`` seconds
        figures["payback_s"] = search_s / (speedup - 1)
        figures["payback_s_ci95"] = (search_s / (high - 1), search_s / (low - 1))
    if n_samples is not None and n_epochs is not None:
        before_s, after_s = n_samples * n_epochs / before_rate, n_samples * n_epochs / after_rate
        figures |= {"before_s": before_s, "after_s": after_s, "saved_s": before_s - after_s}
        figures["saved_s_ci95"] = (before_s * low_pct / 100, before_s * high_pct / 100)
    savings = Savings(
        verdict=verdict,
        n_pairs=n_pairs,
        compared_ids=tuple(run.id for run in compared),
        n_samples=n_samples,
        n_epochs=n_epochs,
        **ids,
        **figures,
    )
    no_run = "the dataset has no length" if n_samples is None else "the length of the run is not known"
    reasons = _explain_nulls(savings, no_run)
    return savings, reasons | {name: unpaid for name in reasons if "payback" in name}


def _explain_nulls(savings: Savings, reason: str) -> dict[str, str]:
    names = [field.name for field in dataclasses.fields(savings) if getattr(savings, field.name) is None]
    return {f"savings.{name}": reason for name in names}


def _find_beside(runs: Sequence[Trial], plan: Plan) -> list[Trial]:
    """Find the runs of a plan that were made beside others, in the order they ran."""
    found = {run.id: run for run in find_confirmed(runs) if run.plan == plan}
    return sorted(found.values(), key=_read_order)


def _read_order(run: Trial) -> tuple[int, str]:
    """Rows are numbered in the order they ran."""
    return len(run.id), run.id


def _read_rates(runs: Sequence[Trial]) -> list[float]:
    return [run.samples_per_s or 0.0 for run in runs]


def _compute_reach(runs: Sequence[Trial], compared: Sequence[Trial], n_pairs: int) -> float:
    """Compute how uncertain the logarithm of the speedup is by the runs themselves, whatever the pairs say."""
    reach = CLEAR * math.hypot(*map(estimate_error, compared)) / n_pairs
    if not any(run.is_busy for run in compared):
        return reach
    fine = {run.id: run for run in runs if run.status == "ok" and run.kind in WHOLE_RUNS}.values()
    plans = dict.fromkeys(run.plan for run in compared)
    spread = compute_spread([[run for run in fine if run.plan == plan] for plan in plans])
    return max(reach, CLEAR * spread * math.sqrt(2 / n_pairs))


def compute_speedup_ci95(
    before: Sequence[float], after: Sequence[float], others: Sequence[Sequence[float]] = ()
) -> Interval:
    """Compute the interval of after over before. The i-th rates of all plans ran in the same round.

    Args:
        others: Rates of further plans of those rounds: they say how much runs differ, too.
    """
    n_rounds = min(len(before), len(after))
    arms = [before, after, *(rates for rates in others if len(rates) >= n_rounds)]
    low, high = compute_contrast_interval([list(map(math.log, rates[:n_rounds])) for rates in arms], 0, 1)
    return math.exp(low), math.exp(high)


def _compute_gain_pct(speedup: float) -> float:
    return 100 * (1 - 1 / speedup)
