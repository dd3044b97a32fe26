"""Interleaving: the order of blocks, and what pairing takes away."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from benchmarks._duel import compute_ratios, find_differences, run_duel
from benchmarks._rounds import compute_differences, compute_differences_pct, compute_means, order_blocks, run_rounds

from fulltilt.records import Plan, Trial

NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("seed", range(8))
def test_a_round_is_a_palindrome_with_every_arm_twice(seed):
    order = order_blocks(NAMES, random.Random(seed))
    assert order == order[::-1]
    assert Counter(order) == dict.fromkeys(NAMES, 2)


def test_rounds_start_with_different_arms():
    rng = random.Random(0)
    assert {order_blocks(NAMES, rng)[0] for _ in range(50)} == set(NAMES)


def test_blocks_are_run_one_after_the_other_in_the_order_drawn():
    seen = []
    rounds = run_rounds(NAMES, lambda name: seen.append(name) or len(seen), n_rounds=3, seed=5)
    assert len(rounds) == 3
    assert len(seen) == 18
    for number, blocks in enumerate(rounds):
        for name, (first, second) in blocks.items():
            assert seen[first - 1] == seen[second - 1] == name
            assert 6 * number < first < second <= 6 * (number + 1)


def test_a_linear_drift_of_the_machine_cancels_in_the_difference():
    true_us = {"a": 100.0, "b": 130.0, "c": 100.0}
    clock = iter(range(1000))
    rounds = run_rounds(NAMES, lambda name: true_us[name] + 7.0 * next(clock), n_rounds=4)
    assert compute_differences(rounds, "b", "a", float) == pytest.approx([30.0] * 4)
    assert compute_differences(rounds, "c", "a", float) == pytest.approx([0.0] * 4)


def test_shares_are_of_the_reference_in_the_same_round():
    rounds = [{"a": (10.0, 10.0), "b": (11.0, 11.0)}, {"a": (100.0, 100.0), "b": (110.0, 110.0)}]
    assert compute_differences_pct(rounds, "b", "a", float) == pytest.approx([10.0, 10.0])
    assert compute_means(rounds, "b", float) == [11.0, 110.0]


def build_plan(batch_size: int) -> Plan:
    return Plan({"batch_size": batch_size, "num_workers": 0, "accumulate": 1})


def build_trial(plan: Plan, rate: float | None, status: str = "ok") -> Trial:
    return Trial(id="t", plan=plan, status=status, samples_per_s=rate, reason=None if status == "ok" else "it broke")


def test_a_duel_alternates_the_order_and_keeps_the_columns():
    first, second, asked = build_plan(32), build_plan(64), []

    def run_plan(plan):
        asked.append(plan["batch_size"])
        return build_trial(plan, 90.0 if plan == first else 100.0)

    pairs = run_duel(first, second, run_plan, n_rounds=3)
    assert asked == [32, 64, 64, 32, 32, 64]
    assert pairs == [(90.0, 100.0)] * 3
    assert compute_ratios(pairs) == [0.9] * 3


@pytest.mark.parametrize(("status", "rate"), [("out_of_memory", None), ("timeout", None), ("ok", None)])
def test_a_failed_trial_ends_the_duel_and_says_which(status, rate):
    first, second = build_plan(32), build_plan(64)

    def run_plan(plan):
        return build_trial(plan, 100.0) if plan == first else build_trial(plan, rate, status)

    with pytest.raises(RuntimeError, match="batch_size=64"):
        run_duel(first, second, run_plan, n_rounds=3)


def test_differences_of_two_plans_are_named():
    assert find_differences(build_plan(32), build_plan(64)) == ["batch_size"]
    assert find_differences(build_plan(32), build_plan(32)) == []
