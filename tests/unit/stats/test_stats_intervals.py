"""Intervals: exact values where they are known, coverage by simulation where they are not."""

import math

import numpy as np
import pytest

from fulltilt.stats import (
    compute_contrast_interval,
    compute_interval,
    compute_proportion_interval,
    compute_quantile_interval,
    compute_rate_interval,
    compute_t_quantile,
    compute_trimmed_interval,
)

# Two-sided 95 % and one-sided 99.5 % points of Student's t as printed tables have them.
TABLE = {(0.975, 1): 12.7062, (0.975, 2): 4.3027, (0.975, 4): 2.7764, (0.975, 9): 2.2622, (0.995, 3): 5.8409}


def test_t_quantile_matches_the_printed_table_is_antisymmetric_and_nears_the_normal_one():
    assert {key: compute_t_quantile(*key) for key in TABLE} == pytest.approx(TABLE, abs=5e-5)
    assert compute_t_quantile(0.025, 7) == -compute_t_quantile(0.975, 7)
    assert compute_t_quantile(0.5, 3) == pytest.approx(0, abs=1e-12)
    assert compute_t_quantile(0.975, 2000) == pytest.approx(1.95996, abs=2e-3)


NAN = math.nan


def assert_covers(n_hits, n_runs):
    assert compute_proportion_interval(n_hits, n_runs)[1] >= 0.95, f"{n_hits} of {n_runs} hold the truth"
    assert n_hits < n_runs, "an interval that always holds the truth says nothing"


@pytest.mark.parametrize(
    ("compute", "refused", "message"),
    [
        (compute_t_quantile, [(0, 3), (1, 3), (0.9, 0)], "no t quantile"),
        (compute_interval, [([],), ([1.0, NAN],), ([math.inf],)], r"finite|no values"),
        (compute_rate_interval, [([1, 2], [1.0]), ([0, 2], [1.0, 1.0]), ([1, 2], [1.0, 0.0])], r"rate needs|durations"),
        (
            compute_quantile_interval,
            [([], 0.5), ([1.0, NAN], 0.5), ([1.0], 0.0), ([1.0], 1.0)],
            "values|finite|quantile",
        ),
        (compute_proportion_interval, [(11, 10)], "no share"),
        (
            compute_contrast_interval,
            [(x, 0, 1) for x in ([[1.0, 2.0]], [[1.0], [2.0]], [[1.0, NAN], [1.0, 2.0]])],
            "at least 2 arms by 2 rounds",
        ),
    ],
)
def test_what_has_no_interval_is_refused(compute, refused, message):
    for arguments in refused:
        with pytest.raises(ValueError, match=message):
            compute(*arguments)


def test_t_interval_by_hand_and_one_value_has_none():
    # mean 3, sd sqrt(2.5), n 5: half-width 2.7764 * sqrt(2.5 / 5)
    assert compute_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - 1.96328, 3 + 1.96328), abs=1e-4)
    centre, *bounds = compute_trimmed_interval([3.0])
    assert centre == 3.0
    assert all(math.isnan(bound) for bound in (*bounds, *compute_interval([3.0]), *compute_rate_interval([8], [0.1])))


def test_bootstrap_repeats_itself_and_holds_the_mean():
    values = np.random.default_rng(3).gamma(2.0, size=40)
    assert compute_interval(values) == compute_interval(values)
    low, high = compute_interval(values)
    assert low < values.mean() < high
    assert compute_interval(values, 0.99)[0] < low


def simulate_blocks(rng, n_runs, n_blocks, correlation):
    """Seconds of blocks of 8 steps with AR(1) jitter of 2 % around 1 s a step."""
    steps = np.empty((n_runs, n_blocks * 8))
    steps[:, 0] = rng.normal(0, 0.02, n_runs)
    for i in range(1, steps.shape[1]):
        steps[:, i] = correlation * steps[:, i - 1] + rng.normal(0, 0.02 * math.sqrt(1 - correlation**2), n_runs)
    return (1 + steps).reshape(n_runs, n_blocks, 8).sum(axis=2)


@pytest.mark.parametrize(("n_blocks", "correlation"), [(5, 0.0), (14, 0.0), (15, 0.5), (40, 0.5)])
def test_coverage_of_95_pct_intervals(n_blocks, correlation):
    """1,000 runs (400 of the bootstrap); fails when the binomial interval of the hits lies below the nominal share."""
    n_runs = 1000 if n_blocks < 15 else 400
    seconds = simulate_blocks(np.random.default_rng(n_blocks), n_runs, n_blocks, correlation)
    for true, bounds in (
        (8.0, [compute_interval(run) for run in seconds]),
        (1.0, [compute_rate_interval(np.full(n_blocks, 8), run) for run in seconds]),
    ):
        assert_covers(sum(low <= true <= high for low, high in bounds), n_runs)


def test_the_width_follows_correlation_number_and_spread():
    values = np.random.default_rng(2).normal(size=60)
    (shuffled,), (ordered,) = np.diff(compute_interval(values)), np.diff(compute_interval(np.sort(values)))
    assert ordered > 2 * shuffled
    low, high = compute_interval(np.random.default_rng(4).normal(10, 1, 3000))  # resampled in parts
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(3000), rel=0.15)
    assert compute_interval([2.0] * 20) == (2.0, 2.0)
    assert compute_rate_interval([8] * 20, [0.5] * 20) == pytest.approx((16, 16))


@pytest.mark.parametrize("n", [6, 40])
def test_rate_interval_weighs_blocks_by_their_length_and_is_positive_even_when_they_disagree_widely(n):
    low, high = compute_rate_interval([64, 64], [0.1, 1.0])
    assert 0 < low < 128 / 1.1 < high
    seconds = np.random.default_rng(1).uniform(0.9, 1.1, size=n)
    low, high = compute_rate_interval(np.full(n, 100), seconds)
    assert low < 100 * n / seconds.sum() < high
    assert (high - low) / (100 * n / seconds.sum()) < 0.2


def test_quantile_interval_by_hand():
    # Ranks 2 and 9 of 10 leave 11 of 1,024 outside on either side of the median.
    assert compute_quantile_interval(range(1, 11), 0.5) == (2, 9)
    assert compute_quantile_interval([3.0], 0.75) == (3.0, 3.0)


def test_quantile_interval_of_thousands_of_values():
    """The number of ways to choose 500 of 1,030 is no float; a check of a fast model has as many latencies."""
    low, high = compute_quantile_interval(range(4000), 0.99)
    spread = 1.96 * (4000 * 0.99 * 0.01) ** 0.5  # of the normal approximation
    assert (low, high) == (pytest.approx(3960 - spread, abs=2), pytest.approx(3960 + spread, abs=2))


@pytest.mark.parametrize(("n", "quantile"), [(6, 0.5), (13, 0.75), (40, 0.75)])
def test_coverage_of_quantile_intervals(n, quantile):
    """2,000 runs; ranks are whole numbers, so the interval covers at least what is asked for."""
    n_runs = 2000
    runs = np.random.default_rng(n).uniform(size=(n_runs, n))
    bounds = [compute_quantile_interval(run, quantile) for run in runs]
    assert_covers(sum(low <= quantile <= high for low, high in bounds), n_runs)


def test_wilson_interval_by_hand():
    # 8 of 10 at 95 %: 0.4902 to 0.9433 in the literature
    assert compute_proportion_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    for n in (3, 7, 13, 2000):
        assert compute_proportion_interval(0, n)[0] == 0.0
        assert compute_proportion_interval(n, n)[1] == 1.0


def test_far_values_do_not_hide_the_rest():
    x = np.random.default_rng(3).normal(0, 1, 30)
    x[[4, 17, 22]] = [400.0, -250.0, 900.0]
    centre, low, high = compute_trimmed_interval(x)
    assert -2 < low < 0 < high < low + 2
    assert abs(centre) < 1
    assert np.diff(compute_interval(x)) > 50
    few = [1.0, 2.0, 3.0, 4.0, 50.0]  # are not trimmed
    assert compute_trimmed_interval(few) == pytest.approx((12.0, *compute_interval(few)))


def test_the_trimmed_interval_by_hand():
    """20 values, four cut at either end: deviation of those winsorized to 5…16, t with 11 degrees of freedom."""
    x = np.arange(1.0, 21.0)
    error = np.clip(x, 5, 16).std(ddof=1) * math.sqrt(19 / (12 * 11))
    centre, low, high = compute_trimmed_interval(np.random.default_rng(0).permutation(x))
    assert centre == pytest.approx(10.5)
    assert (low, high) == pytest.approx((10.5 - 2.200985 * error, 10.5 + 2.200985 * error), rel=1e-5)


@pytest.mark.parametrize("n", [8, 15, 36])
def test_the_trimmed_interval_covers_the_centre(n):
    """Normal values of which a tenth lie far out on either side: the centre is covered in 95 %."""
    rng, n_runs = np.random.default_rng(n), 1500
    x = rng.normal(0, 1, (n_runs, n)) * np.where(rng.random((n_runs, n)) < 0.1, 20, 1)
    assert_covers(sum(low <= 0 <= high for _, low, high in map(compute_trimmed_interval, x)), n_runs)


def test_a_contrast_drops_what_a_round_adds_to_all_of_its_arms():
    rounds = np.array([0.0, 5.0, -3.0])
    noise = np.array([[0.1, -0.1, 0.0], [0.0, 0.1, -0.1], [-0.1, 0.0, 0.1]])
    arms = np.array([[1.0], [2.0], [4.0]]) + rounds
    low, high = compute_contrast_interval(arms, 0, 1)
    assert (low, high) == pytest.approx((1.0, 1.0))
    low, high = compute_contrast_interval(arms + noise, 0, 1)
    assert low < 1.0 < high
    assert high - low < 1.0, "rounds five apart do not count as spread"


def test_a_contrast_covers_the_truth_as_often_as_it_says():
    rng, n_hits = np.random.default_rng(5), 0
    for _ in range(2000):
        x = rng.normal(size=(3, 2)) + np.array([[0.0], [0.7], [2.0]]) + 3 * rng.normal(size=(1, 2))
        low, high = compute_contrast_interval(x, 0, 1)
        n_hits += low <= 0.7 <= high
    low, high = compute_proportion_interval(n_hits, 2000, 0.999)
    assert low <= 0.95 <= high
