"""What a search can tell apart by a few runs of each plan."""

import numpy as np
import pytest
from tests.unit.tuner.tuner_cases import build_bare_row

from fulltilt.levers import default_plan
from fulltilt.tuner.picks.undecided import (
    PRIOR_SPREAD,
    choose,
    compute_detectable_pct,
    compute_doubt,
    compute_run_error,
)

PLANS = [default_plan({"batch_size": 16, "threads": threads}) for threads in (1, 2)]


def build_run(plan, rate, id="t1"):
    interval = (rate * 0.998, rate * 1.002)
    return build_bare_row(plan, "repeat", id=id, samples_per_s=rate, samples_per_s_ci95=interval)


def draw_runs(seed, spread, *, n_rounds, gap=0.0):
    """Runs of the first plan, then of the second one, which is faster by ``gap`` of the logarithm."""
    rng = np.random.default_rng(seed)
    return [
        build_run(plan, float(100 * np.exp(rng.normal(k * gap, spread))))
        for k, plan in enumerate(PLANS)
        for _ in range(n_rounds)
    ]


def tell(runs):
    """The plan that is chosen, where the runs tell the two apart."""
    chosen, tied = choose([runs[0], runs[-1]], runs)
    return None if tied else chosen.plan


@pytest.mark.parametrize("spread", [0.003, 0.02, 0.06])
@pytest.mark.parametrize("n_rounds", [2, 3])
def test_equal_plans_are_rarely_called_different_however_far_processes_lie_apart(spread, n_rounds):
    n_told = sum(tell(draw_runs(seed, spread, n_rounds=n_rounds)) is not None for seed in range(300))
    assert n_told <= 0.08 * 300


def test_a_gap_that_is_wide_against_the_spread_is_told_and_of_plans_that_ran_once_nothing_is_learnt():
    assert tell(draw_runs(0, 0.002, n_rounds=3, gap=0.1)) == PLANS[1]
    runs = [[build_run(plan, 100.0)] for plan in PLANS]
    assert compute_doubt(runs) == compute_run_error(runs) == pytest.approx(PRIOR_SPREAD)
    assert compute_detectable_pct([]) is None


@pytest.mark.parametrize(("spread", "n_rounds"), [(0.02, 8), (0.06, 5)])
def test_a_gap_that_is_said_to_be_detectable_is_told_in_80_of_100_cases(spread, n_rounds):
    said = [compute_detectable_pct(draw_runs(seed, spread, n_rounds=n_rounds)) for seed in range(100)]
    gap = np.log1p(np.median(said) / 100)
    n_told = sum(tell(draw_runs(seed, spread, n_rounds=n_rounds, gap=gap)) is not None for seed in range(200))
    assert 0.65 * 200 <= n_told <= 0.95 * 200


USER = default_plan({"batch_size": 16, "threads": 3})


def draw_search(seed, spread, *, gap=0.0, drift=0.0):
    """Eight plans run once, the fastest two and the user's, far slower, twice more: rows, rounds, every run.

    Of the finalists the second one is faster by ``gap``; the rounds are slower than the search by ``drift``.
    """
    rng = np.random.default_rng(seed)
    names = iter(range(1, 100))
    lucky = rng.permutation(np.sort(rng.normal(0, spread, 8))[-2:])
    levels = dict(zip((*PLANS, USER), (0.0, gap, -0.5), strict=True))

    def run(plan, noise):
        return build_run(plan, float(100 * np.exp(levels[plan] + noise)), id=f"t{next(names)}")

    earlier = [run(plan, luck + drift) for plan, luck in zip(PLANS, lucky, strict=True)]
    rounds = [run(plan, rng.normal(0, spread)) for plan in (*PLANS, USER, USER, *reversed(PLANS))]
    return rounds[:3], rounds, [*earlier, *rounds]


@pytest.mark.parametrize("spread", [0.003, 0.02, 0.06, 0.2])
def test_earlier_runs_call_equal_finalists_no_more_often_different_though_luck_chose_them(spread):
    found = [draw_search(seed, spread) for seed in range(1000)]
    n_told = sum(not choose(rows, rounds, history=history)[1] for rows, rounds, history in found)
    assert n_told <= 0.06 * 1000


def test_earlier_runs_of_the_finalists_tell_gaps_that_two_rounds_leave_open_whatever_minute_they_ran_in():
    found = [draw_search(seed, 0.02, gap=0.07) for seed in range(400)]
    n_alone = sum(not choose(rows, rounds)[1] for rows, rounds, _ in found)
    n_told = sum(not choose(rows, rounds, history=history)[1] for rows, rounds, history in found)
    assert n_told >= n_alone + 0.08 * 400
    rounds, history = draw_search(0, 0.01)[1:]
    _, faster = draw_search(0, 0.01, drift=0.12)[1:]
    assert compute_detectable_pct(rounds, faster) == pytest.approx(compute_detectable_pct(rounds, history))
    assert compute_detectable_pct(rounds, history) != pytest.approx(compute_detectable_pct(rounds))
