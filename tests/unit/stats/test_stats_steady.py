"""Warm-up ends where the series says so: ramps, steps, spikes, correlated noise."""

import numpy as np
import pytest

from fulltilt.stats import compute_proportion_interval, find_steady_start

N_RUNS = 300


def simulate_noise(rng, n_runs, n, jitter=0.02, correlation=0.5, slow_share=0.03):
    """Factors with AR(1) jitter and single slow steps, as step times of a training run show them."""
    noise = np.empty((n_runs, n))
    noise[:, 0] = rng.normal(0, jitter, n_runs)
    for i in range(1, n):
        fresh = rng.normal(0, jitter * np.sqrt(1 - correlation**2), n_runs)
        noise[:, i] = correlation * noise[:, i - 1] + fresh
    return np.exp(noise) * np.where(rng.random((n_runs, n)) < slow_share, 3.0, 1.0)


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ([1.0] * 6, 0),
        ([10.0, 1, 1, 1, 1], 1),
        ([2.0] * 8 + [1.0] * 12, 8),
        ([1.0] * 10 + [2.0] * 10, 10),  # a change for the worse is a change too
        ([5.0, 1, 5, 4, 3, 2, *[1.0] * 12], 6),
        ([1.0] * 6 + [9.0] + [1.0] * 6, 0),  # one slow step is not warm-up
        ([1.0] * 20 + [9.0] * 3, 0),  # nor is a slow moment at the end
        ([0.0] * 4, 0),
    ],
)
def test_start_of_plain_series(series, expected):
    assert find_steady_start(series) == expected


STILL_FASTER = [1.2 - 0.01 * i for i in range(20)]  # 1 % a sample
WILD = [2.0 ** (i % 7) * (1 + i) for i in range(9)]


@pytest.mark.parametrize("series", [[], [1.0], [1.0, 1.0], [3.0, 2.0, 1.0], STILL_FASTER, WILD])
def test_no_evidence_means_no_start(series):
    assert find_steady_start(series) == len(series)


def test_scale_and_unit_do_not_matter():
    series = simulate_noise(np.random.default_rng(5), 1, 60)[0] * (1 + 2 * np.exp(-np.arange(60) / 4))
    assert find_steady_start(series) == find_steady_start(series * 1e6) == find_steady_start(series / 1e6)


def test_a_steady_tail_is_never_shorter_than_the_least():
    """Halves of a short, noisy tail may agree while its head lies outside of the band."""
    rng = np.random.default_rng(11)
    for n in range(3, 12):
        for series in np.exp(rng.normal(0, 0.02, (300, n))):
            start = find_steady_start(series)
            assert start == n or n - start >= 3, series


def test_long_series_are_judged_alike():
    series = np.concatenate([np.full(500, 2.0), np.full(2000, 1.0)])
    assert abs(find_steady_start(series) - 500) <= 10


@pytest.mark.parametrize(("n", "jitter"), [(8, 0.02), (40, 0.02), (40, 0.05), (200, 0.02)])
def test_steady_series_lose_little_to_false_warmup(n, jitter):
    """At most one steady run in ten may lose more than a quarter of its samples."""
    runs = simulate_noise(np.random.default_rng(n), N_RUNS, n, jitter)
    n_false = sum(find_steady_start(run) > n / 4 for run in runs)
    assert compute_proportion_interval(n_false, N_RUNS)[0] <= 0.10, f"{n_false} of {N_RUNS}"


@pytest.mark.parametrize("shape", ["ramp", "decay", "step"])
def test_warm_samples_do_not_count(shape):
    """What is more than 10 % slow lies before the start; one run in fifty may miss it."""
    i = np.arange(40)
    extra = {"ramp": np.maximum(0, 1 - i / 12), "decay": 2 * np.exp(-i / 4), "step": 0.5 * (i < 10)}[shape]
    warm = int(np.flatnonzero(extra > 0.1)[-1]) + 1
    runs = simulate_noise(np.random.default_rng(7), N_RUNS, 40) * (1 + extra)
    starts = np.array([find_steady_start(run) for run in runs])
    n_missed = int(np.sum(starts < warm))
    assert compute_proportion_interval(n_missed, N_RUNS)[0] <= 0.02, f"{n_missed} of {N_RUNS} begin before {warm}"
    assert np.median(starts) <= warm + 6


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_samples_that_were_not_measured_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        find_steady_start([1.0, bad, 1.0])
