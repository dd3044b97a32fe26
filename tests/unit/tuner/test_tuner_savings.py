"""Hours saved and payback, from the turns of the two plans."""

import dataclasses
import math

import pytest
from tests.unit.tuner.tuner_cases import USER, make_row, pick_from

from fulltilt.stats.alternation import compare_pairs
from fulltilt.tuner.answer.savings import build_savings

FAST = USER.replace(num_workers=4)
OWN, OTHER = make_row(1, 100.0), make_row(2, 900.0, plan=FAST)  # whole runs, which nothing is read from here
GIVEN = {"n_samples": 3600, "n_epochs": 10, "search_s": 60.0}


def build(gains, *, before=100.0, baseline=OWN, **changes):
    """Savings where the other plan was so much faster in each group."""
    found = compare_pairs([math.log(gain) for gain in gains])
    picks = pick_from([OWN, OTHER], {USER: 1000.0, FAST: 1000.0}, best=FAST)
    is_proven = found.verdict == "faster"
    best = dataclasses.replace(picks.best, gain=found, proven=is_proven)
    picks = dataclasses.replace(picks, **({"recommended": best, "unproven": None} if is_proven else {"unproven": best}))
    return build_savings(picks, baseline=baseline, before_samples_per_s=before, **(GIVEN | changes))


def test_hours_saved_and_payback_follow_from_the_turns():
    savings, reasons = build([1.49, 1.5, 1.51, 1.5])
    assert (savings.verdict, reasons, savings.n_groups) == ("faster", {}, 4)
    assert (savings.before_samples_per_s, savings.after_samples_per_s) == (100.0, pytest.approx(150.0, rel=1e-3))
    assert (savings.before_s, savings.after_s, savings.saved_s) == pytest.approx((360.0, 240.0, 120.0), rel=1e-3)
    assert savings.gain_pct == pytest.approx(100 / 3, rel=1e-3), "of the time"
    assert savings.payback_s == pytest.approx(120.0, rel=1e-3)  # each second of training saves half a second
    assert savings.gain_ci_pct[0] < savings.gain_pct < savings.gain_ci_pct[1]
    assert savings.saved_s_ci[0] < savings.saved_s < savings.saved_s_ci[1]
    assert savings.payback_s_ci[0] < savings.payback_s < savings.payback_s_ci[1]


def test_without_a_length_of_the_data_the_share_of_the_time_is_still_told():
    savings, reasons = build([2.0, 2.01, 1.99, 2.0], n_samples=None)
    assert (savings.gain_pct, savings.before_s) == (pytest.approx(50.0, rel=1e-3), None)
    assert reasons["savings.before_s"] == "the dataset has no length"
    savings, reasons = build([2.0, 2.01, 1.99, 2.0], n_epochs=None)
    assert (savings.saved_s, reasons["savings.saved_s"]) == (None, "the length of the run is not known")


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([1.1, 0.8, 1.3, 1.0], "undecided"),
        ([1.0, 1.001, 0.999, 1.0], "equal"),
        ([0.8, 0.81, 0.79, 0.8], "slower"),
    ],
)
def test_what_is_not_proven_faster_pays_nothing_back(gains, verdict):
    savings, reasons = build(gains)
    assert (savings.verdict, savings.payback_s, savings.payback_s_ci) == (verdict, None, None)
    assert set(reasons) == {"savings.payback_s", "savings.payback_s_ci"}
    assert reasons["savings.payback_s"] == f"{verdict}: nothing pays the search back"
    assert savings.gain_ci_pct[0] <= savings.gain_pct <= savings.gain_ci_pct[1]
    assert (savings.gain_ci_pct[1] < 0) == (verdict == "slower")


@pytest.mark.parametrize(
    ("gains", "changes", "words"),
    [
        ([1.5] * 4, {"baseline": None}, "was not run"),
        ([1.5] * 4, {"baseline": make_row(1, None, status="out_of_memory")}, "ended with out_of_memory"),
        ([1.5], {}, "took no turns that could be compared"),
        ([], {}, "took no turns that could be compared"),
    ],
)
def test_without_the_users_row_or_a_second_group_nothing_is_claimed(gains, changes, words):
    savings, reasons = build(gains, **changes)
    assert savings is None
    assert words in reasons["savings"]


def test_the_users_own_plan_as_the_best_has_nothing_to_compare_and_a_reason_for_every_null():
    savings, reasons = build_savings(pick_from([OWN]), baseline=OWN, before_samples_per_s=math.nan, **GIVEN)
    assert (savings.verdict, savings.baseline_id, savings.recommended_id) == ("same plan", "t1", "t1")
    nulls = {f"savings.{name}" for name, value in dataclasses.asdict(savings).items() if value is None}
    assert set(reasons) == nulls != set()
