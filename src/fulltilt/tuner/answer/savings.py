"""What the recommended plan saves of the user's own run, and when the search has paid for itself."""

import dataclasses
from typing import Any, Literal

from fulltilt.records import Trial
from fulltilt.stats import Comparison
from fulltilt.tuner.answer.picks import Picks

SavingsVerdict = Literal["faster", "slower", "equal", "undecided", "same plan"]
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Savings:
    """The configured run with the user's plan (before) and with the plan that came out ahead (after).

    Times are of training alone, evaluation and checkpoints left out.

    Attributes:
        verdict: Of the turns; "same plan" when no other came out ahead, or what did learned worse. Only "faster" is a
            saving.
        gain_pct: Share of the training time saved.
        search_s: What the search took, rows of earlier runs in the folder included.
        before_samples_per_s, after_samples_per_s: In the turns, which are what was compared.
        payback_s: Training time with the plan after which it has saved what the search took; only where it is proven.
    """

    verdict: SavingsVerdict
    baseline_id: str
    recommended_id: str
    search_s: float
    n_groups: int = 0
    n_samples: int | None = None
    n_epochs: int | None = None
    before_samples_per_s: float | None = None
    after_samples_per_s: float | None = None
    before_s: float | None = None
    after_s: float | None = None
    saved_s: float | None = None
    saved_s_ci: Interval | None = None
    gain_pct: float | None = None
    gain_ci_pct: Interval | None = None
    payback_s: float | None = None
    payback_s_ci: Interval | None = None


def build_savings(
    picks: Picks,
    *,
    baseline: Trial | None,
    before_samples_per_s: float,
    n_samples: int | None,
    n_epochs: int | None,
    search_s: float,
) -> tuple[Savings | None, dict[str, str]]:
    """Compute the savings of the plan that came out ahead, and why figures are missing, by dotted name.

    Args:
        baseline: The row of the user's own plan.
        before_samples_per_s: Of the user's own plan in its turns.
    """
    best = picks.best
    if baseline is None:
        return None, {"savings": "the user's own plan was not run"}
    if baseline.status != "ok":
        return None, {"savings": f"the user's own plan ended with {baseline.status}: {baseline.reason}"}
    ids: dict[str, Any] = {"baseline_id": baseline.id, "recommended_id": best.trial.id, "search_s": search_s}
    if best.trial.plan == baseline.plan:
        same = Savings(verdict="same plan", **ids)
        return same, _explain_nulls(same, "the settings as they were are the recommended ones")
    gain = best.gain
    if gain is None or gain.n_groups < 2:
        return None, {"savings": "the plan and the user's own took no turns that could be compared"}
    figures = _compute_times(gain, before_samples_per_s, n_samples, n_epochs)
    verdict = gain.verdict if best.proven or gain.verdict != "faster" else "undecided"
    if verdict == "faster":  # each second of training with the faster plan saves ``speedup − 1`` seconds
        low, high = gain.ci_pct
        figures["payback_s"] = search_s / (gain.gain_pct / 100)
        figures["payback_s_ci"] = (search_s / (high / 100), search_s / (low / 100))
    savings = Savings(verdict=verdict, n_groups=gain.n_groups, n_samples=n_samples, n_epochs=n_epochs, **ids, **figures)
    reasons = _explain_nulls(
        savings, "the dataset has no length" if n_samples is None else "the length of the run is not known"
    )
    unpaid = f"{verdict}: nothing pays the search back"
    return savings, reasons | {name: unpaid for name in reasons if "payback" in name}


def _compute_times(gain: Comparison, before: float, n_samples: int | None, n_epochs: int | None) -> dict[str, Any]:
    low_pct, high_pct = map(_compute_saved_pct, gain.ci_pct)
    figures: dict[str, Any] = {
        "before_samples_per_s": before,
        "after_samples_per_s": before * gain.speedup,
        "gain_pct": _compute_saved_pct(gain.gain_pct),
        "gain_ci_pct": (low_pct, high_pct),
    }
    if n_samples is not None and n_epochs is not None:
        before_s = n_samples * n_epochs / before
        after_s = before_s / gain.speedup
        figures |= {"before_s": before_s, "after_s": after_s, "saved_s": before_s - after_s}
        figures["saved_s_ci"] = (before_s * low_pct / 100, before_s * high_pct / 100)
    return figures


def _explain_nulls(savings: Savings, reason: str) -> dict[str, str]:
    names = [field.name for field in dataclasses.fields(savings) if getattr(savings, field.name) is None]
    return {f"savings.{name}": reason for name in names}


def _compute_saved_pct(gain_pct: float) -> float:
    """Turn a gain in samples/s into the share of the time that it saves."""
    return 100 * (1 - 1 / (1 + gain_pct / 100))
