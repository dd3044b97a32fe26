"""Hours saved and payback, from runs that were made side by side."""

import dataclasses
import math

import pytest
from tests.unit.tuner.tuner_cases import USER, make_row

from fulltilt.tuner.answer.savings import build_savings, compute_speedup_ci95

FAST = USER.replace(num_workers=4)


def make_run(number, rate, plan, *, kind="repeat", status="ok"):
    return make_row(number, rate, plan=plan, kind=kind, status=status, spread_pct=1.0)


def make_rounds(user_rates, fast_rates):
    """Runs in the order of the rounds; the pick's row and the baseline's are the first ones here."""
    runs = []
    for number, (before, after) in enumerate(zip(user_rates, fast_rates, strict=True), start=5):
        runs += [make_run(2 * number, after, FAST), make_run(2 * number + 1, before, USER, kind="baseline")]
    return runs


GIVEN = {"n_samples": 3600, "n_epochs": 10, "search_s": 60.0}


def build(user_rates, fast_rates, *, more=(), **changes):
    """Savings of these rounds and of further runs."""
    runs = make_rounds(user_rates, fast_rates)
    given = {"baseline": runs[1], "recommended": runs[0]} | GIVEN
    return build_savings([*runs, *more], **(given | changes))


def test_hours_saved_and_payback_follow_from_the_two_rows():
    savings, reasons = build([100.0, 101.0, 99.0], [150.0, 151.0, 149.0])
    assert (savings.verdict, reasons) == ("faster", {})
    assert (savings.before_s, savings.after_s, savings.saved_s) == pytest.approx((360.0, 240.0, 120.0), rel=1e-3)
    assert savings.gain_pct == pytest.approx(100 / 3, rel=1e-3)
    assert savings.payback_s == pytest.approx(120.0, rel=1e-3)  # each second of training saves half a second
    assert savings.gain_ci95_pct[0] < savings.gain_pct < savings.gain_ci95_pct[1]
    assert savings.saved_s_ci95[0] < savings.saved_s < savings.saved_s_ci95[1]
    assert savings.payback_s_ci95[0] < savings.payback_s < savings.payback_s_ci95[1]
    savings, reasons = build([100.0, 101.0], [200.0, 202.0], n_samples=None)
    assert (savings.gain_pct, savings.before_s) == (pytest.approx(50.0), None)
    assert reasons["savings.before_s"] == "the dataset has no length"
    low, high = compute_speedup_ci95([100.0, 200.0, 50.0], [110.0, 230.0, 54.0])
    mean = (1.1 * 1.15 * 1.08) ** (1 / 3)
    assert math.sqrt(low * high) == pytest.approx(mean)
    assert low < 1.08 < 1.15 < high


def test_an_interval_that_holds_0_is_no_gain_and_neither_that_nor_a_slower_plan_pays_anything_back():
    savings, reasons = build([100.0, 130.0, 90.0], [110.0, 95.0, 120.0])
    assert (savings.verdict, savings.payback_s) == ("no gain", None)
    assert savings.gain_ci95_pct[0] <= 0 <= savings.gain_ci95_pct[1]
    assert "no gain" in reasons["savings.payback_s"]
    assert savings.before_s == pytest.approx(36000 / (100.0 * 130.0 * 90.0) ** (1 / 3))
    savings, reasons = build([100.0, 101.0, 99.0], [80.0, 81.0, 79.0])
    assert (savings.verdict, savings.payback_s, savings.gain_pct < 0) == ("slower", None, True)
    assert reasons["savings.payback_s"].startswith("slower")


@pytest.mark.parametrize("more", [make_run(20, 180.0, FAST), make_run(1, 900.0, FAST, kind="end_to_end")])
def test_the_gain_is_that_of_the_rounds_that_both_ran_in(more):
    """A third run of the pick alone, or one before the rounds, moves it by luck; drift hits both of a round alike."""
    savings, _ = build([100.0, 100.0], [150.0, 150.0], more=[more])
    assert (savings.n_pairs, savings.gain_pct, savings.after_s) == (2, pytest.approx(100 / 3), pytest.approx(240.0))
    assert savings.gain_ci95_pct == pytest.approx((100 / 3, 100 / 3), abs=1.0)
    drift = [1.0, 0.6, 1.4, 0.9]
    savings, _ = build([100.0 * d for d in drift], [120.0 * d for d in drift])
    assert savings.verdict == "faster"
    assert savings.gain_ci95_pct == pytest.approx((100 / 6, 100 / 6), abs=1.0)


@pytest.mark.parametrize(
    ("n_rounds", "changes", "words"),
    [
        (2, {"baseline": None}, "was not run"),
        (2, {"baseline": make_run(1, None, USER, status="out_of_memory")}, "ended with out_of_memory"),
        (1, {}, "side by side in 1 round, 2 are needed"),
    ],
)
def test_without_the_users_row_or_a_second_round_nothing_is_claimed(n_rounds, changes, words):
    savings, reasons = build([100.0] * n_rounds, [150.0] * n_rounds, **changes)
    assert savings is None
    assert words in reasons["savings"]


@pytest.mark.parametrize(("pressure_pct", "verdict"), [(10.0, "faster"), (90.0, "no gain")])
def test_on_a_busy_machine_earlier_runs_of_the_two_plans_widen_the_interval(pressure_pct, verdict):
    """A minute of contention may hold both rounds."""
    earlier = [make_run(1, 300.0, USER, kind="end_to_end"), make_run(2, 150.0, FAST, kind="end_to_end")]
    rounds = make_rounds([100.0, 100.0], [150.0, 150.0])
    rounds = [dataclasses.replace(run, cpu_pressure_pct=pressure_pct) for run in rounds]
    savings, _ = build_savings([*earlier, *rounds], baseline=rounds[1], recommended=rounds[0], **GIVEN)
    assert savings.verdict == verdict
    # Pairs that agree are no surer than the blocks of their runs.
    noisy = [dataclasses.replace(run, samples_per_s_ci95=(run.samples_per_s / 2, 400.0)) for run in rounds]
    unclear, _ = build_savings(noisy, baseline=rounds[1], recommended=rounds[0], **GIVEN)
    assert (unclear.verdict, unclear.gain_pct) == ("no gain", pytest.approx(savings.gain_pct))


def test_a_saving_of_a_busy_machine_names_its_runs_and_pays_nothing_back():
    rounds = [*make_rounds([100.0, 101.0], [150.0, 151.0]), make_run(20, 150.0, FAST)]
    given = {"baseline": rounds[1], "recommended": rounds[0]} | GIVEN
    quiet, reasons = build_savings(rounds, **given)
    assert (quiet.compared_ids, quiet.payback_s is None, reasons) == (("t10", "t11", "t12", "t13"), False, {})
    alone = [*rounds[:-1], dataclasses.replace(rounds[-1], cpu_pressure_pct=90.0)]
    assert build_savings(alone, **given)[0] == quiet, "the run that no other one was compared with"
    busy = [dataclasses.replace(rounds[0], cpu_pressure_pct=90.0), *rounds[1:]]
    savings, reasons = build_savings(busy, **given)
    assert (savings.verdict, savings.payback_s, savings.payback_s_ci95) == ("faster", None, None)
    assert set(reasons) == {"savings.payback_s", "savings.payback_s_ci95"}
    assert reasons["savings.payback_s"].startswith("runs of a busy machine were compared")


@pytest.mark.parametrize(("status", "verdict"), [("ok", "same plan"), ("out_of_memory", None)])
def test_the_users_own_plan_as_the_pick_has_nothing_to_compare(status, verdict):
    row, other = make_run(1, 100.0, USER), make_run(2, 90.0 if status == "ok" else None, FAST, status=status)
    savings, reasons = build_savings([row, other], baseline=row, recommended=row, **GIVEN)
    if verdict is None:
        assert savings is None
        assert reasons == {"savings": "only one plan ran to its end, the settings as they were"}
    else:
        assert savings.verdict == verdict
        nulls = {f"savings.{name}" for name, value in dataclasses.asdict(savings).items() if value is None}
        assert set(reasons) == nulls
