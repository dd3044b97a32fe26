"""Arms that take turns: what cancels, when it is decided, and how often that is wrong."""

import itertools
import math
import random
import types

import numpy as np
import pytest

from fulltilt.stats import Block, Evidence, Turns, alternate, compare_pairs, is_look, run_group
from fulltilt.stats.alternation import LOOKS, MIN_ROUNDS, summarize_rounds
from fulltilt.stats.intervals import compute_proportion_interval, compute_trimmed_interval


class FakeMachine:
    """A clock, and the share of its usual speed that the machine has at any moment."""

    def __init__(self, speed=lambda now_s: 1.0):
        self.now_s, self.speed, self.turns = 0.0, speed, []

    def clock(self):
        return self.now_s

    def build_arm(self, name, rate, seconds=0.1):
        machine = self

        class Arm:
            def run_block(self):
                block = Block(n_samples=100, seconds=100 / rate / machine.speed(machine.now_s))
                machine.turns.append(name)
                machine.now_s += seconds
                return block

        return Arm()


def measure_ratio(speed, *, seconds=0.8, seed=0):
    """The measured speed of an arm in that of another one which is 1.25 times as slow."""
    machine = FakeMachine(speed)
    arms = {name: machine.build_arm(name, rate) for name, rate in (("a", 800.0), ("b", 1000.0))}
    turns = run_group(arms, seconds=seconds, clock=machine.clock, rng=random.Random(seed))
    return turns["b"].samples_per_s / turns["a"].samples_per_s


def draw_group(rng, gain, noise, stall_share=0.0):
    """One group: each process is off by so much, and in some rounds of all a program took the cores from one arm."""
    off = rng.normal(0, noise / math.sqrt(2), 2)
    if rng.random() < stall_share:
        off[rng.integers(2)] -= 0.3
    rates = 1000 * np.exp(off) * (1.0, 1 + gain)
    return {name: Turns(samples_per_s=float(rate), stalled_pct=0.0) for name, rate in zip("ab", rates, strict=True)}


def simulate(gain, noise, n, **options):
    """What so many comparisons of arms with this gain end with, 60 s and 2 s a group."""
    rng, ends = np.random.default_rng(7), []
    for _ in range(n):
        now_s = itertools.count(0.0, 1.0)  # read twice a group
        evidence = alternate(
            lambda: draw_group(rng, gain, noise, **options), "a", "b", limit_s=60.0, clock=lambda s=now_s: next(s)
        )
        ends.append(evidence.compare("a", "b"))
    return ends


def compare_spread(gain_pct, half_pct, n=4):
    """A comparison of ``n`` groups whose interval reaches from ``gain_pct`` by ``half_pct`` to either side."""
    shape = np.linspace(-1, 1, n)
    half = np.diff(compare_pairs(list(0.01 * shape)).ci_pct)[0] / 2 / 100
    return compare_pairs(list(math.log1p(gain_pct / 100) + half_pct / 100 * 0.01 / half * shape))


def test_a_drift_that_whole_rounds_share_cancels():
    for speed in (
        lambda now_s: 1.0,
        lambda now_s: math.exp(-0.4 * now_s),  # slower and slower, by a third within the group
        lambda now_s: 1.0 if now_s < 0.35 else 0.4,  # another machine from the second round on
    ):
        assert measure_ratio(speed) == pytest.approx(1.25, rel=0.003), "the order within a round takes turns, too"
    assert measure_ratio(lambda now_s: 0.5 if now_s < 0.35 else 1.0) == pytest.approx(1.25, rel=1e-9)


def test_one_round_that_stalled_does_not_move_the_figure():
    steady = [{"a": [Block(n_samples=100, seconds=0.1)] * 2, "b": [Block(n_samples=100, seconds=0.08)] * 2}] * 4
    stalled = {"a": [Block(n_samples=100, seconds=0.1)] * 2, "b": [Block(n_samples=100, seconds=9, stalled_s=8.5)] * 2}
    calm, busy = summarize_rounds([*steady, steady[0]]), summarize_rounds([*steady[:2], stalled, *steady[2:]])
    for name in "ab":
        assert busy[name].samples_per_s == pytest.approx(calm[name].samples_per_s, rel=1e-9)
    assert calm["b"].samples_per_s / calm["a"].samples_per_s == pytest.approx(1.25)
    assert calm["b"].stalled_pct == busy["a"].stalled_pct == 0
    assert busy["b"].stalled_pct == pytest.approx(100 * 17 / (18 + 8 * 0.08))
    evidence = Evidence()
    evidence.add(busy)
    assert evidence.stalled_pct == busy["b"].stalled_pct, "of the arm that stalled most"


def test_arms_take_turns_in_mirrored_rounds_of_random_order_for_the_time_they_have():
    orders = set()
    for seed in range(20):
        machine = FakeMachine()
        arms = {name: machine.build_arm(name, 1000.0) for name in "abc"}
        run_group(arms, seconds=1.0, clock=machine.clock, rng=random.Random(seed))
        rounds = ["".join(machine.turns[i : i + 6]) for i in range(0, len(machine.turns), 6)]
        assert len(rounds) == 3, "1.5 s for three arms, 0.6 s a round"
        assert all(turn == turn[::-1] and len(set(turn)) == 3 for turn in rounds)
        orders.update(rounds)
    assert len(orders) == 6
    machine = FakeMachine()
    run_group({name: machine.build_arm(name, 1000.0, seconds=60.0) for name in "ab"}, clock=machine.clock)
    assert len(machine.turns) == 4 * MIN_ROUNDS, "however long a block takes"


@pytest.mark.parametrize(
    ("names", "block_s", "off_pct", "n_rounds"),
    [
        *[("ab", 0.04, 0.0, 2), ("ab", 0.04, 9.9, 2), ("ab", 0.04, 10.1, 4), ("ab", 0.12, 10.1, 4)],
        *[("ab", 0.2, 10.1, 3), ("ab", 0.3, 10.1, 2), ("ab", 9.0, 10.1, 2)],  # no more in two seconds
        ("abcde", 0.04, 30.0, 2),  # one of five does not have all others run on
    ],
)
def test_a_group_ends_as_soon_as_its_rounds_agree(names, block_s, off_pct, n_rounds):
    machine = FakeMachine()
    arms = {name: machine.build_arm(name, 1000.0, seconds=block_s) for name in names}
    slower, usual = (machine.build_arm("b", rate, seconds=block_s) for rate in (1000.0, 1000.0 * (1 + off_pct / 100)))
    arms["b"] = types.SimpleNamespace(
        run_block=lambda: (usual if machine.turns.count("b") < 2 else slower).run_block()  # slower after a round
    )
    run_group(arms, n_rounds=4, clock=machine.clock)
    assert len(machine.turns) == 2 * len(names) * n_rounds
    machine.turns.clear()
    run_group(arms, n_rounds=4, seconds=10 * block_s, clock=machine.clock)
    assert len(machine.turns) >= 2 * len(names) * 3, "and then so many seconds as it was given"


@pytest.mark.parametrize(
    ("gain_pct", "half_pct", "verdict"),
    [
        (3.0, 1.9, "faster"),
        (3.0, 2.1, "undecided"),
        (-3.0, 1.9, "slower"),
        (-3.1, 2.3, "undecided"),
        (0.0, 1.8, "equal"),
        (0.0, 2.2, "undecided"),
        (0.9, 0.8, "equal"),
        (1.5, 0.3, "faster"),
        (1.2, 0.5, "equal"),
        (1.8, 0.9, "undecided"),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_its_side_of_the_margin(gain_pct, half_pct, verdict):
    known = compare_spread(gain_pct, half_pct)
    assert known.gain_pct == pytest.approx(gain_pct, abs=1e-9)
    assert known.ci_pct == pytest.approx((gain_pct - half_pct, gain_pct + half_pct), abs=0.1)
    assert known.verdict == verdict


def test_a_comparison_is_the_same_from_either_side():
    evidence = Evidence()
    rng = np.random.default_rng(1)
    for _ in range(6):
        evidence.add(draw_group(rng, 0.2, 0.03))
    there, back = evidence.compare("a", "b"), evidence.compare("b", "a")
    assert (there.verdict, back.verdict) == ("faster", "slower")
    assert there.speedup * back.speedup == pytest.approx(1)
    assert 1 + there.ci_pct[0] / 100 == pytest.approx(1 / (1 + back.ci_pct[1] / 100))


def test_nothing_is_decided_before_three_groups_which_are_held_to_99_percent_and_one_group_bounds_nothing():
    for n in range(1, 3):
        assert compare_pairs([1.0, 1.0001, 0.9999][:n]).verdict == "undecided"
    assert compare_pairs([1.0, 1.0001, 0.9999]).verdict == "faster"
    _, low, high = compute_trimmed_interval([0.5, 0.6, 0.7], 0.99)
    assert compare_pairs([0.5, 0.6, 0.7]).ci_pct == pytest.approx((100 * math.expm1(low), 100 * math.expm1(high)))
    assert not any(is_look(n) for n in (1, 2, 3, 5, 7))
    assert [n for n in range(41) if is_look(n)] == list(LOOKS)
    one, none = compare_pairs([math.log(2)]), compare_pairs([])
    assert (one.gain_pct, one.ci_pct, one.n_groups) == (pytest.approx(100), (-math.inf, math.inf), 1)
    assert (none.gain_pct, none.ci_pct, none.n_groups) == (0, (-math.inf, math.inf), 0)


def test_arms_are_compared_by_the_groups_that_both_were_in():
    evidence = Evidence()
    slow, fast = Turns(samples_per_s=100.0, stalled_pct=0.0), Turns(samples_per_s=200.0, stalled_pct=0.0)
    for group in [{"a": slow, "b": fast}] * 4 + [{"a": fast, "c": fast}] * 3:
        evidence.add(group)
    assert (evidence.compare("a", "b").n_groups, evidence.compare("a", "b").speedup) == (4, pytest.approx(2))
    assert (evidence.compare("a", "c").n_groups, evidence.compare("a", "c").speedup) == (3, pytest.approx(1))
    assert evidence.compare("b", "c").n_groups == 0
    assert evidence.count_groups("ab") == 4
    assert (evidence.estimate_rate("a"), evidence.estimate_rate("b")) == (100.0, 200.0)
    assert math.isnan(evidence.estimate_rate("x"))
    assert (evidence.count_groups("x"), evidence.count_groups([])) == (0, 7)


def test_groups_of_another_way_than_the_last_of_the_same_arms_do_not_count():
    evidence = Evidence()
    for way, rates in (("usual", "12"), ("usual", "13"), ("pinned", "14"), ("pinned", "14")):
        group = zip("ab", map(float, rates), strict=True)
        evidence.add({name: Turns(samples_per_s=rate, stalled_pct=0.0, way=way) for name, rate in group})
    evidence.add({"b": Turns(samples_per_s=9.0, stalled_pct=0.0, way="whole")})
    assert (evidence.compare("a", "b").n_groups, evidence.compare("a", "b").speedup) == (2, pytest.approx(4))
    assert (evidence.count_groups("ab"), evidence.count_groups("b"), evidence.estimate_rate("b")) == (2, 1, 9.0)


@pytest.mark.parametrize("options", [{}, {"stall_share": 0.05}])
def test_equal_arms_are_seldom_called_different(options):
    """400 comparisons; fails where the binomial interval of the wrong ones lies above 5 %."""
    n = 400
    ends = simulate(0.0, 0.03, n, **options)
    assert compute_proportion_interval(sum(end.verdict in ("faster", "slower") for end in ends), n)[0] <= 0.05
    assert sum(end.verdict == "equal" for end in ends) > n / 2
    assert compute_proportion_interval(sum(end.ci_pct[0] <= 0 <= end.ci_pct[1] for end in ends), n)[1] >= 0.93


def test_a_clear_gain_is_found_soon_and_its_interval_holds_it():
    n = 300
    ends = simulate(0.10, 0.03, n)
    assert compute_proportion_interval(sum(end.verdict == "faster" for end in ends), n)[1] >= 0.99
    assert compute_proportion_interval(sum(end.ci_pct[0] <= 10 <= end.ci_pct[1] for end in ends), n)[1] >= 0.93
    assert np.median([end.n_groups for end in ends]) == LOOKS[0]


def test_a_comparison_ends_at_a_look_when_decided_and_else_before_its_time_is_over():
    machine, told = FakeMachine(), []

    def alternate_with(ratios, limit_s=60.0, group_s=3.0):
        ratios, told[:], machine.now_s = iter(ratios), [], 0.0

        def measure_group():
            machine.now_s += group_s
            rate = 1000 * next(ratios)
            return {"a": Turns(samples_per_s=1000.0, stalled_pct=0.0), "b": Turns(samples_per_s=rate, stalled_pct=0.0)}

        alternate(measure_group, "a", "b", limit_s=limit_s, on_group=told.append, clock=machine.clock)
        return told[-1].n_groups, told[-1].verdict

    assert alternate_with([1.5, 1.51, 1.49, 1.5]) == (4, "faster")
    # What is known after five groups already is told at the next look.
    assert alternate_with([1.0, 1.5, 1.5, 1.5, 1.5, 1.5]) == (6, "faster")
    assert [known.n_groups for known in told] == [1, 2, 3, 4, 5, 6]
    wide = [1.0, 1.3, 0.8, 1.1] * 10
    assert alternate_with(wide, limit_s=20.0) == (6, "undecided"), "a seventh of 3 s would end after 20 s"
    assert machine.now_s <= 20.0
    assert alternate_with(wide, limit_s=1.0) == (4, "undecided"), "four groups are measured whatever the limit"
