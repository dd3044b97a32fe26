"""What a search can tell apart by a few runs of each plan."""

import numpy as np
import pytest

from fulltilt.levers import default_plan
from fulltilt.records import Measurement
from fulltilt.tuner.rows import build_row
from fulltilt.tuner.undecided import PRIOR_SPREAD, choose, compute_detectable_pct, compute_doubt, compute_run_error

PLANS = [default_plan({"batch_size": 16, "threads": threads}) for threads in (1, 2)]


def build_run(plan, rate):
    measured = Measurement(
        phases_ms=None,
        samples_per_s=rate,
        samples_per_s_ci95=(rate * 0.998, rate * 1.002),
        block_samples_per_s=(rate,),
        n_steps=8,
        n_warmup_steps=2,
    )
    return build_row(plan, id="t1", why="", kind="repeat", status="ok", reason=None, measurement=measured)


def draw_runs(rng, spread, *, n_rounds, gap=0.0):
    """By plan; the second one is faster by ``gap`` of the logarithm."""
    return [
        [build_run(plan, float(100 * np.exp(rng.normal(k * gap, spread)))) for _ in range(n_rounds)]
        for k, plan in enumerate(PLANS)
    ]


@pytest.mark.parametrize("spread", [0.003, 0.02, 0.06])
@pytest.mark.parametrize("n_rounds", [2, 3])
def test_equal_plans_are_rarely_called_different_however_far_processes_lie_apart(spread, n_rounds):
    n_told = 0
    for seed in range(300):
        runs = draw_runs(np.random.default_rng(seed), spread, n_rounds=n_rounds)
        _, tied = choose([found[0] for found in runs], [run for found in runs for run in found])
        n_told += not tied
    assert n_told <= 0.08 * 300


def test_a_gap_that_is_wide_against_the_spread_is_told():
    runs = draw_runs(np.random.default_rng(0), 0.002, n_rounds=3, gap=0.1)
    chosen, tied = choose([found[0] for found in runs], [run for found in runs for run in found])
    assert (chosen.plan, tied) == (PLANS[1], [])


def test_of_plans_that_ran_once_nothing_is_learnt_of_how_runs_differ():
    runs = [[build_run(plan, 100.0)] for plan in PLANS]
    assert compute_doubt(runs) == compute_run_error(runs) == pytest.approx(PRIOR_SPREAD)


@pytest.mark.parametrize(("spread", "n_rounds"), [(0.02, 8), (0.06, 5)])
def test_a_gap_that_is_said_to_be_detectable_is_told_in_80_of_100_cases(spread, n_rounds):
    def draw(seed, gap):
        return [
            run for found in draw_runs(np.random.default_rng(seed), spread, n_rounds=n_rounds, gap=gap) for run in found
        ]

    gap = np.log1p(np.median([compute_detectable_pct(draw(seed, 0.0)) for seed in range(100)]) / 100)
    n_told = 0
    for seed in range(200):
        runs = draw(seed, gap)
        _, tied = choose([runs[0], runs[-1]], runs)
        n_told += not tied
    assert 0.65 * 200 <= n_told <= 0.95 * 200


def test_without_runs_side_by_side_nothing_is_said_to_be_detectable():
    assert compute_detectable_pct([]) is None
