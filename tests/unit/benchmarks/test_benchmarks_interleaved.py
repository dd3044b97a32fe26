"""Interleaved comparisons: the order of blocks, the A/A arm, where it ends, and error rates by simulation."""

import itertools
import math

import numpy as np
import pytest
from benchmarks._interleaved import compare, find_look, plan_looks

from fulltilt.stats import compute_proportion_interval, decide


class SimulatedMachine:
    """Block times with AR(1) jitter per step, drift as a random walk and slow steps; one step after another."""

    def __init__(self, seed, factors, *, steps=8, jitter=0.02, correlation=0.5, drift=0.0005, n_blocks=200):
        rng = np.random.default_rng(seed)
        n = steps * n_blocks
        fresh = rng.normal(0, jitter * math.sqrt(1 - correlation**2), n)
        noise = np.empty(n)
        last = rng.normal(0, jitter)
        for i in range(n):
            last = correlation * last + fresh[i]
            noise[i] = last
        noise += np.cumsum(rng.normal(0, drift, n))
        times = np.exp(noise) * np.where(rng.random(n) < 0.03, 1.5, 1.0)
        self.blocks = iter(times.reshape(n_blocks, steps))
        self.factors = factors

    def run_block(self, arm):
        return next(self.blocks) * self.factors[arm]


def test_rounds_are_palindromes_with_the_baseline_twice():
    ran = []

    def run_block(arm):
        ran.append(arm)
        return 1.0

    result = compare(["a", "b"], run_block, n_rounds=3)
    rounds = [ran[i : i + 6] for i in range(0, 18, 6)]
    assert all(r == r[::-1] and r.count("a") == 4 and r.count("b") == 2 for r in rounds)
    assert len(set(map(tuple, rounds))) == 3, "the order turns from round to round"
    assert len(result.block_values["b"]) == 6
    assert result.decisions["b"].verdict == "tie"


def test_rows_of_steps_count_by_their_median():
    result = compare(["a", "b"], lambda arm: [1.0, 1.0, 50.0] if arm == "a" else [1.1, 1.1, 1.1], n_rounds=2)
    assert result.decisions["b"].effect_pct == pytest.approx(10)


def test_linear_drift_cancels_within_a_round():
    ticks = itertools.count(100)
    result = compare(["a", "b", "c"], lambda arm: math.exp(next(ticks) * 0.01), n_rounds=4)
    assert [d.effect_pct for d in (result.a_a, *result.decisions.values())] == pytest.approx([0, 0, 0], abs=1e-9)


def test_a_baseline_that_differs_from_itself_silences_every_verdict():
    noisy = _Alternating()
    result = compare(["a", "b"], noisy.run_block, n_rounds=6)
    assert not result.is_quiet
    assert result.a_a.verdict == "slower"
    assert result.decisions["b"].verdict == "too_noisy"
    assert result.decisions["b"].ci_pct[1] < 0, "the figures stay, only the verdict goes"
    assert result.noise_floor_pct > 40
    assert result.n_rounds == 6, "no look ends it"


class _Alternating:
    """Slow whenever the baseline's second copy runs; told apart by counting the calls of a round."""

    def __init__(self):
        self.n = 0

    def run_block(self, arm):
        turned = [["a", "b", "again"], ["b", "again", "a"], ["again", "a", "b"]][self.n // 6 % 3]
        copy = [*turned, *reversed(turned)][self.n % 6]
        self.n += 1
        return {"a": 1.0, "b": 0.5, "again": 1.5}[copy] * (1 + 0.001 * (self.n % 5))


def test_a_clear_case_ends_at_the_first_look():
    machine = SimulatedMachine(1, {"a": 1.0, "b": 0.7}, jitter=0.003)
    result = compare(["a", "b"], machine.run_block, n_rounds=12)
    assert (result.n_rounds, result.n_looks) == (4, 1)
    assert result.decisions["b"].verdict == "faster"


def test_an_unclear_case_uses_all_looks():
    machine = SimulatedMachine(2, {"a": 1.0, "b": 0.98}, jitter=0.15)
    result = compare(["a", "b"], machine.run_block, n_rounds=12)
    assert (result.n_rounds, result.n_looks) == (12, 3)
    assert result.decisions["b"].detectable_pct > 2


def test_the_second_copy_of_the_baseline_is_not_wasted():
    """Against both copies the interval is narrower than against one, on the same blocks."""
    widths = {"both": [], "one": []}
    for seed in range(40):
        machine = SimulatedMachine(seed, {"a": 1.0, "b": 1.0})
        result = compare(["a", "b"], machine.run_block, n_rounds=6, n_looks=1)
        widths["both"].append(np.diff(result.decisions["b"].ci_pct)[0])
        own, arm = (np.log(result.block_values[name]).reshape(-1, 2).mean(axis=1) for name in "ab")
        widths["one"].append(100 * 2 * 2.571 * np.std(arm - own, ddof=1) / math.sqrt(6))
    assert np.mean(widths["both"]) < 0.95 * np.mean(widths["one"])


def test_progress_is_told_after_each_round():
    told = []
    compare(["a", "b"], lambda arm: 1.0, n_rounds=3, on_round=lambda n, values: told.append((n, len(values["b"]))))
    assert told == [(1, 2), (2, 4), (3, 6)]


def test_an_arm_that_raises_is_not_hidden():
    def run_block(arm):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        compare(["a", "b"], run_block)


@pytest.mark.parametrize(
    ("arms", "options", "message"),
    [
        (["a"], {}, "arms"),
        (["a", "a"], {}, "arms"),
        (["a", "b"], {"n_rounds": 1}, "n_rounds"),
        (["a", "b"], {"n_looks": 4}, "n_looks"),
    ],
)
def test_designs_without_an_answer_are_refused(arms, options, message):
    with pytest.raises(ValueError, match=message):
        compare(arms, lambda arm: 1.0, **options)


@pytest.mark.parametrize(("n_rounds", "n_looks"), [(5, 1), (12, 3)])
def test_false_differences_stay_at_five_pct(n_rounds, n_looks):
    """Two equal arms on a noisy drifting machine, no margin: a difference is called in 5 % of the runs, or fewer."""
    n_runs, n_false = 250, 0
    for seed in range(n_runs):
        machine = SimulatedMachine(seed, {"a": 1.0, "b": 1.0}, n_blocks=6 * n_rounds)
        result = compare(["a", "b"], machine.run_block, n_rounds=n_rounds, n_looks=n_looks, margin_pct=0.0)
        n_false += result.decisions["b"].is_settled
    assert compute_proportion_interval(n_false, n_runs)[0] <= 0.05, f"{n_false} of {n_runs}"


def test_power_at_five_pct():
    """A true 5 % is found in at least 98 % of the runs by the defaults, at the price of few rounds."""
    n_runs, n_found, n_rounds = 200, 0, []
    for seed in range(n_runs):
        machine = SimulatedMachine(1000 + seed, {"a": 1.0, "b": 0.95}, n_blocks=6 * 36)
        result = compare(["a", "b"], machine.run_block)
        n_found += result.decisions["b"].verdict == "faster"
        n_rounds.append(result.n_rounds)
    assert compute_proportion_interval(n_found, n_runs)[1] >= 0.98, f"{n_found} of {n_runs}"
    assert np.mean(n_rounds) < 12


@pytest.mark.parametrize(("n_rounds", "n_looks"), [(2, 3), (5, 3), (9, 3), (18, 3), (18, 1), (12, 2), (40, 3)])
def test_looks_share_five_pct_and_the_last_is_at_the_end(n_rounds, n_looks):
    looks = plan_looks(n_rounds, n_looks)
    assert looks[-1].n_rounds == n_rounds
    assert sum(1 - look.confidence for look in looks) == pytest.approx(0.05)
    assert [look.n_rounds for look in looks] == sorted({look.n_rounds for look in looks})
    assert len(looks) <= n_looks
    assert find_look(looks, n_rounds) == looks[-1]
    assert find_look(looks, 1) is None


@pytest.mark.parametrize(("n_rounds", "n_looks", "message"), [(1, 1, "n_rounds"), (9, 4, "n_looks"), (9, 0, "n_looks")])
def test_looks_without_an_answer_are_refused(n_rounds, n_looks, message):
    with pytest.raises(ValueError, match=message):
        plan_looks(n_rounds, n_looks)


def test_three_looks_leave_out_the_truth_in_five_pct():
    """Independent normal rounds, two equal arms, no margin: some look calls a difference in 5 % or fewer."""
    rng = np.random.default_rng(11)
    n_runs, looks, n_false = 1500, plan_looks(12), 0
    for noise in np.exp(rng.normal(0, 0.02, (n_runs, 12))):
        n_false += any(decide(np.ones(n), noise[:n], 0.0, confidence=confidence).is_settled for n, confidence in looks)
    assert compute_proportion_interval(n_false, n_runs)[0] <= 0.05, f"{n_false} of {n_runs}"
