"""Interleaving: the order of blocks, and what pairing takes away."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks import _rounds
from benchmarks._duel import run_duel
from benchmarks._rounds import (
    compute_differences,
    compute_differences_pct,
    compute_geometric_ratios,
    compute_means,
    run_rounds,
)

from fulltilt.records import Plan, Trial

NAMES = ["a", "b", "c"]


def test_a_round_is_a_palindrome_with_every_arm_twice_that_starts_anywhere():
    turns = []
    run_rounds(NAMES, turns.append, n_rounds=20)
    orders = [turns[start : start + 6] for start in range(0, len(turns), 6)]
    for order in orders:
        assert order == order[::-1]
        assert Counter(order) == dict.fromkeys(NAMES, 2)
    assert {order[0] for order in orders} == set(NAMES)
    assert len(set(map(tuple, orders))) > len(NAMES), "in any order, as plans take turns"


def test_a_linear_drift_of_the_machine_cancels_in_the_difference():
    true_us = {"a": 100.0, "b": 130.0, "c": 100.0}
    clock = iter(range(1000))
    rounds = run_rounds(NAMES, lambda name: true_us[name] + 7.0 * next(clock), n_rounds=4)
    assert compute_differences(rounds, "b", "a") == pytest.approx([30.0] * 4)
    assert compute_differences(rounds, "c", "a") == pytest.approx([0.0] * 4)


def test_figures_are_of_both_blocks_and_of_the_reference_in_the_same_round():
    rounds = [{"a": (10.0, 10.0), "b": (11.0, 11.0)}, {"a": (100.0, 100.0), "b": (20.0, 80.0)}]
    assert compute_differences_pct(rounds, "b", "a") == pytest.approx([10.0, -50.0])
    assert compute_geometric_ratios(rounds, "b", "a") == pytest.approx([1.1, 0.4])
    assert compute_means(rounds, "b") == [11.0, 50.0]
    common = {"case": "c", "metric": "rate", "unit_of_replication": "round"}
    arms = _rounds.build_arms(rounds, lambda rate: 2 * rate, notes={"b": "ours"}, **common)
    assert [(arm.arm, arm.samples, arm.note) for arm in arms] == [
        ("a", (20.0, 200.0), None), ("b", (22.0, 100.0), "ours"),
    ]  # fmt: skip


FIRST, SECOND = (Plan({"batch_size": size, "num_workers": 0, "accumulate": 1}) for size in (32, 64))


def build_trial(plan: Plan, rate: float | None, status: str = "ok") -> Trial:
    return Trial(id="t", plan=plan, status=status, samples_per_s=rate, reason=None if status == "ok" else "it broke")


class Pair:
    """A target whose groups answer with these rates, by batch size; the last one fails with a status."""

    def __init__(self, second_rate: float | None = 100.0, status: str = "ok"):
        self.rates, self.status = {32: 90.0, 64: second_rate}, status

    def run_group(self, plans, *, why):
        rows = [build_trial(plan, self.rates[plan["batch_size"]]) for plan in plans.values()]
        return rows if self.status == "ok" else [build_trial(SECOND, None, self.status)]


def test_a_duel_keeps_the_columns():
    assert run_duel(FIRST, SECOND, Pair(), n_groups=3) == [(90.0, 100.0)] * 3


@pytest.mark.parametrize(("status", "rate"), [("out_of_memory", None), ("timeout", None), ("ok", None)])
def test_a_process_that_failed_ends_the_duel_and_says_which(status, rate):
    with pytest.raises(RuntimeError, match="batch_size=64"):
        run_duel(FIRST, SECOND, Pair(rate, status), n_groups=3)
