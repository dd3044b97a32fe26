"""Which plans take turns: the fastest that may be recommended."""

import pytest
from tests.unit.tuner.tuner_cases import make_row

from fulltilt.tuner.picks.finalists import select_finalists
from fulltilt.tuner.picks.speed import PRIOR_ERROR, estimate_error, is_noisy, measure_noise

RATES = {64: 1170.0, 128: 1200.0, 32: 1100.0, 16: 1050.0, 8: 730.0, 4: 600.0}


def make_rows(rates, **options):
    return [make_row(number, rate, batch_size=size, **options) for number, (size, rate) in enumerate(rates.items())]


@pytest.mark.parametrize(
    ("spread_pct", "sizes"),
    [
        (1.0, [128, 64, 32, 16]),  # the last place is for the simplest within reach
        (20.0, [128, 64, 32, 8]),  # by noisy runs 8 may be as fast, and 4 not
    ],
)
def test_finalists_are_the_fastest_and_the_simplest_that_may_be_as_fast(spread_pct, sizes):
    rows = make_rows(RATES, spread_pct=spread_pct)
    assert [plan["batch_size"] for plan in select_finalists(rows, limit_gib=None)] == sizes


def test_a_plan_that_is_far_slower_takes_no_place():
    assert [plan["batch_size"] for plan in select_finalists(make_rows({64: 1000.0, 8: 840.0}), limit_gib=None)] == [64]
    assert select_finalists([], limit_gib=1.0) == []


def test_plans_above_the_memory_limit_or_that_failed_are_no_finalists_while_there_are_others():
    rows = [make_row(1, 900.0, memory=9.0, num_workers=2), make_row(2, 2000.0, memory=9.5)]
    rows.append(make_row(3, None, status="error", num_workers=4))
    assert [plan["num_workers"] for plan in select_finalists(rows, limit_gib=8.0)] == [2], "else those with the least"
    rows.append(make_row(4, 100.0, memory=7.0, num_workers=1))
    assert [plan["num_workers"] for plan in select_finalists(rows, limit_gib=8.0)] == [1]


def test_a_run_is_as_uncertain_as_its_blocks_say_and_without_them_as_runs_usually_are():
    quiet, noisy = make_row(1, 100.0, spread_pct=1.0), make_row(2, 100.0, spread_pct=20.0)
    assert estimate_error(quiet) == pytest.approx(0.02 / (2 * 1.96), rel=1e-3)
    assert estimate_error(make_row(3, None, status="error")) == PRIOR_ERROR
    assert (is_noisy([quiet, quiet, noisy]), is_noisy([quiet, noisy, noisy])) == (False, True)
    assert measure_noise([]) == 0.0
