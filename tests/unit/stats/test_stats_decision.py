"""Decisions from rounds and from runs: direction, verdicts, what could be detected, looks that share the 5 %."""

import math

import numpy as np
import pytest

from fulltilt.stats import compute_proportion_interval, decide, decide_apart


def test_the_effect_is_the_change_from_baseline_to_arm():
    found = decide([10.0, 10.0, 10.0, 10.0], [9.0, 9.01, 8.99, 9.0])
    assert found.effect_pct == pytest.approx(-10, abs=0.1)
    assert found.ci_pct[0] < -10 < found.ci_pct[1] < 0
    assert (found.verdict, found.n, found.confidence) == ("faster", 4, 0.95)


def test_rates_turn_the_verdict_round():
    slow, fast = [100.0, 101, 99], [90.0, 91, 89]
    assert decide(slow, fast).verdict == "faster"
    assert decide(slow, fast, higher_is_better=True).verdict == "slower"


def test_pairing_removes_what_both_arms_share():
    drift = np.array([1.0, 1.5, 2.2, 3.1, 4.0])
    arm = drift * 1.05 * [1, 1.001, 0.999, 1, 1]
    assert decide(drift, arm).verdict == "slower"
    assert decide_apart(drift, arm).verdict == "too_noisy"


def test_a_real_but_small_difference_is_a_tie():
    found = decide([1.0, 1.0, 1.0, 1.0], [1.005, 1.0051, 1.0049, 1.005])
    assert found.ci_pct[0] > 0
    assert found.verdict == "tie"
    assert decide([1.0, 1.0, 1.0, 1.0], [1.005, 1.0051, 1.0049, 1.005], margin_pct=0.2).verdict == "slower"


def test_noise_is_too_noisy_and_one_round_has_no_interval():
    noisy = decide([1.0, 1.0, 1.0], [1.2, 0.8, 1.1])
    assert (noisy.verdict, noisy.is_settled) == ("too_noisy", False)
    single = decide([1.0], [2.0])
    assert (single.verdict, single.n) == ("too_noisy", 1)
    assert math.isnan(single.ci_pct[0])
    assert math.isnan(single.detectable_pct)


def test_all_values_of_a_round_count_by_their_geometric_mean():
    found = decide([[1.0, 4.0], [4.0, 1.0]], [[2.0, 2.2], [2.2, 2.0]])
    assert found.effect_pct == pytest.approx(100 * (math.sqrt(2.0 * 2.2) / 2 - 1))
    assert found.n == 2


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1.0], [1.0, 2.0], "pairs"),
        ([], [], "shape"),
        ([1.0, 0.0], [1.0, 1.0], "got 0.0"),
        ([1.0], [math.nan], "got nan"),
    ],
)
def test_rounds_that_cannot_be_compared_are_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        decide(a, b)
    with pytest.raises(ValueError, match="margin_pct"):
        decide([1.0, 1.0], [1.0, 1.0], -1.0)


@pytest.mark.parametrize("n_rounds", [6, 20])
def test_the_detectable_effect_is_detected_in_four_of_five(n_rounds):
    """A difference of the size that the decisions themselves name is found in 80 % of the comparisons."""
    rng = np.random.default_rng(5)
    noise = rng.normal(0, 0.02, (300, n_rounds))
    named = float(np.median([decide(np.ones(n_rounds), np.exp(x), 0.0).detectable_pct for x in noise]))
    shifted = np.exp(rng.normal(0, 0.02, (300, n_rounds))) * (1 + named / 100)
    n_found = sum(decide(np.ones(n_rounds), x, 0.0).verdict == "slower" for x in shifted)
    low, high = compute_proportion_interval(n_found, 300, 0.999)
    assert low <= 0.8 + 0.05  # the spread is estimated anew in every comparison
    assert high >= 0.8 - 0.05


def test_runs_apart_are_judged_by_the_spread_of_either_side():
    quiet, noisy = [100.0, 100.5, 99.5, 100.2], [111.0, 103.0, 118.0, 109.0]
    found = decide_apart(quiet, noisy, higher_is_better=True)
    assert (found.verdict, found.n) == ("faster", 4)
    assert (
        np.diff(found.ci_pct)[0]
        > np.diff(decide_apart(quiet, [110.0, 110.5, 109.5, 110.2], higher_is_better=True).ci_pct)[0]
    )


def test_runs_apart_match_the_textbook():
    """Welch's interval on logs, computed by hand: means 0 and ln 2, standard errors from two and three runs."""
    a, b = np.exp([-0.01, 0.01]), np.exp(np.array([-0.03, 0.0, 0.03]) + math.log(2))
    found = decide_apart(a, b)
    variance_a, variance_b = 0.0002 / 2, 0.0009 / 3
    df = math.floor((variance_a + variance_b) ** 2 / (variance_a**2 / 1 + variance_b**2 / 2))
    assert df == 2
    half = 4.302652729 * math.sqrt(variance_a + variance_b)
    assert found.ci_pct == pytest.approx([100 * (2 * math.exp(sign * half) - 1) for sign in (-1, 1)])


def test_one_run_on_a_side_has_no_interval():
    found = decide_apart([100.0], [200.0, 201.0])
    assert (found.verdict, found.n) == ("too_noisy", 1)
    assert math.isnan(found.ci_pct[1])
