"""What the benchmark of comparisons counts as found, wrong and covered, and the work that it adds."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import _other_work, _planted, verdict_power
from benchmarks._burning import BurningImages, BurningNet, Charge, build, burn
from benchmarks._other_work import disturb_cores
from benchmarks._planted import measure_planted
from benchmarks._runner import Context
from benchmarks.verdict_power import (
    BUSY,
    CELLS,
    LOADER,
    QUIET,
    RARE,
    STEP,
    TURNS,
    WHOLE,
    Cell,
    Outcome,
    build_configs,
    describe_outcomes,
    judge_outcomes,
    measure_differences,
    read_planted_pct,
    run_rounds,
)

from fulltilt.stats import Block

EQUAL, SMALL, LARGE = (Cell(STEP, QUIET, difference, 20.0) for difference in (0, 2, 10))


def build_outcome(verdict="faster", gain_pct=10.0, ci_pct=(5.0, 15.0), seconds=12.0):
    return Outcome(verdict, gain_pct, ci_pct, 6, seconds)


class Clock:
    """A time that each look and each computation moves on."""

    def __init__(self):
        self.now_s, self.jump_s, self._n_looks = 0.0, 0.0, 0

    def __call__(self) -> float:
        self.now_s += 1e-4
        self._n_looks += self.jump_s > 0
        if self._n_looks == 2:
            self.now_s, self.jump_s = self.now_s + self.jump_s, 0.0
        return self.now_s


@pytest.mark.parametrize("extra", [0.0, 0.1, 0.25])
def test_a_step_takes_the_share_more_that_was_asked_for(extra):
    clock = Clock()
    net = BurningNet(extra, clock)
    images, begins = torch.zeros(2, 3, 8, 8), []
    for _ in range(5):
        clock.now_s += 0.1  # forward of the step before, backward, update, loading
        net(images)
        begins.append(clock.now_s)
    steps = [b - a for a, b in itertools.pairwise(begins)]
    assert steps == pytest.approx([0.1 * (1 + extra)] * 4, rel=5e-3)
    clock.now_s += 1000.0  # stopped: the other one had its turn
    began_s = clock.now_s
    net(images)
    assert clock.now_s - began_s == pytest.approx(extra * 0.2, abs=0.01)


def test_who_was_stopped_while_it_paid_has_not_paid_for_what_follows():
    clock = Clock()
    charge = Charge(0.1, clock)
    clock.now_s += 0.1
    clock.jump_s = 10.0  # at the next look but one
    charge.pay()
    paid = []
    for _ in range(2):
        clock.now_s += 0.1
        began_s = clock.now_s
        charge.pay()
        paid.append(clock.now_s - began_s)
    assert paid == pytest.approx([0.005, 0.01], abs=1e-3)


@pytest.mark.parametrize("extra", [0.0, 0.1])
def test_a_sample_takes_the_share_more_that_was_asked_for(extra):
    clock = Clock()
    samples, ends = BurningImages(0.0, extra, clock), []
    for index in range(5):
        clock.now_s += 0.1
        samples[index]
        ends.append(clock.now_s)
    assert [b - a for a, b in itertools.pairwise(ends)] == pytest.approx([0.1 * (1 + extra)] * 4, rel=5e-3)


def test_burning_takes_time_of_the_core_and_not_of_the_clock_alone():
    before_s = time.thread_time()
    burn(0.02)
    assert time.thread_time() - before_s >= 0.02


def test_a_sample_takes_the_time_of_the_core_that_was_asked_for():
    dataset = build(sample_s=0.01).dataset()
    before_s = time.thread_time()
    inputs, target = dataset[13]
    assert time.thread_time() - before_s >= 0.01
    assert (inputs.shape, target) == ((3, 8, 8), 3)


def test_work_is_added_to_steps_or_to_samples_and_not_to_both():
    for sample_s in (0.0, 1e-4):
        workload = build(extra=0.5, sample_s=sample_s)
        added = [part.charge.extra > 0 for part in (workload.model(), workload.dataset())]
        assert added == [not sample_s, bool(sample_s)]


def test_two_configurations_differ_by_the_work_alone():
    for cell in (LARGE, Cell(LOADER, BUSY, 10, 20.0)):
        slow, fast = (config.to_values() for config in build_configs(cell))
        assert slow.pop("task") != fast.pop("task")
        assert slow == fast
    assert build_configs(EQUAL)[0] == build_configs(EQUAL)[1]


def test_other_work_has_a_process_on_every_core_and_ends_with_the_block():
    children_file = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children_file.read_text("utf-8").split()  # such as what multiprocessing keeps for other tests
    with disturb_cores(1):
        children = set(children_file.read_text("utf-8").split()).difference(before)
        cores, end_s = set(), time.monotonic() + 60
        while cores != os.sched_getaffinity(0) and time.monotonic() < end_s:
            held = [os.sched_getaffinity(int(pid)) for pid in children]
            cores = {core for affinity in held if len(affinity) == 1 for core in affinity}
            time.sleep(0.05)
        assert cores == os.sched_getaffinity(0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_other_work_ends_when_the_one_who_asked_for_it_is_gone(monkeypatch):
    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(_other_work, "SPELL_S", (0.0, 0.001))
    parents = iter([1, 1, 1, 2])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    try:
        _other_work.work_by_spells(min(cores), "seed")
    finally:
        os.sched_setaffinity(0, cores)
    assert list(parents) == []


def test_found_is_the_truth_in_time_and_wrong_is_a_claim_that_is_none():
    assert build_outcome().finds(LARGE)
    assert not build_outcome(seconds=21.0).finds(LARGE)
    assert build_outcome("equal").finds(EQUAL)
    assert not build_outcome("undecided").finds(LARGE)
    wrong = [(cell.difference_pct, v) for cell in (EQUAL, SMALL, LARGE)
             for v in ("faster", "slower", "equal", "undecided") if build_outcome(v).is_wrong(cell)]  # fmt: skip
    assert wrong == [(0, "faster"), (0, "slower"), (2, "slower"), (10, "slower"), (10, "equal")]
    assert build_outcome().covers(10.0)
    assert not build_outcome(ci_pct=(5.0, 9.9)).covers(10.0)


def test_a_share_is_missed_only_where_its_binomial_interval_excludes_the_target():
    n = 20
    outcomes = {
        (EQUAL, TURNS): [build_outcome("undecided", 0.0, (-3.0, 3.0))] * (n - 2) + [build_outcome()] * 2,
        (LARGE, TURNS): [build_outcome()] * (n - 2) + [build_outcome("undecided", 9.0)] * 2,
        (LARGE, WHOLE): [build_outcome("slower")] * n,
    }
    judged = [(target.measured, target.met) for target in judge_outcomes(outcomes, {})]
    assert judged == [(0.95, None), (0.1, None), (0.9, None)], "covered, equal ones called different, found"
    lost = {(LARGE, TURNS): [build_outcome("undecided")] * 100}
    assert [target.met for target in judge_outcomes(lost, {})] == [True, False], "covered, and not found"


def test_arms_tell_the_share_with_its_interval_and_the_error_of_the_estimate():
    found = [build_outcome(gain_pct=12.0), build_outcome("undecided", gain_pct=9.0)]
    arms = {arm.metric: arm for arm in describe_outcomes({(LARGE, TURNS): found}, {})}
    assert arms["decided"].samples == (1.0, 0.0)
    assert arms["decided"].note == "1 of 2, 50 % (9 to 91)"
    assert arms["gain_error_pct"].samples == (2.0, -1.0)
    assert set(arms) == {"decided", "found", "wrong", "covers", "gain_error_pct", "groups", "seconds"}


def test_what_was_measured_of_a_difference_stands_for_it():
    planted = {LARGE: [14.0, 16.0, 90.0]}
    arms = {arm.metric: arm for arm in describe_outcomes({(LARGE, TURNS): [build_outcome(gain_pct=12.0)]}, planted)}
    assert (arms["gain_error_pct"].samples, arms["covers"].samples) == ((-4.0,), (0.0,))
    covered, _ = judge_outcomes({(LARGE, TURNS): [build_outcome()]}, planted)
    assert covered.measured == 0.0


def test_what_is_added_to_a_step_is_measured_quiet_and_beside_other_work(monkeypatch, capsys):
    asked = []

    def measure(extra, seconds, *, is_busy):
        asked.append((extra, is_busy))
        return [1.1, 1.3, 1.2]

    monkeypatch.setattr(verdict_power, "measure_planted", measure)
    monkeypatch.setattr(verdict_power, "disturb_cores", lambda seed: contextlib.nullcontext())
    planted = measure_differences(CELLS, seconds=1.0)
    assert asked == [(extra, is_busy) for is_busy in (False, True) for extra in (0.02, 0.05, 0.1, 0.25)]
    assert {cell.bound for cell in planted} == {STEP}
    assert {round(read_planted_pct(cell, planted)) for cell in planted} == {20}
    of_loader = next(cell for cell in CELLS if cell.bound == LOADER and cell.difference_pct)
    assert [read_planted_pct(cell, planted) for cell in (EQUAL, of_loader)] == [0, 10]


def test_work_is_planted_and_taken_away_in_one_process(monkeypatch):
    class Blocks:
        """Takes blocks that last as long as the work that is in force says."""

        def __init__(self, run):
            (self._net,) = (module for module in run.setup.model.modules() if isinstance(module, BurningNet))

        def warm_up(self):
            pass

        def take_block(self):
            return Block(n_samples=64, seconds=1 + self._net.charge.extra)

    monkeypatch.setattr(_planted, "BlockRunner", Blocks)
    monkeypatch.setattr(_planted, "time", SimpleNamespace(monotonic=iter([0.0, 1.0, 2.0, 700.0]).__next__))
    assert _planted.take_rounds(0.25, 600.0, is_busy=False) == [1.25, 1.25]


@pytest.mark.parametrize("is_busy", [False, True])
def test_what_is_planted_is_measured_in_a_process_of_its_own(is_busy):
    speedups = measure_planted(0.5, 1.0, is_busy=is_busy)
    assert speedups
    assert all(0 < speedup < math.inf for speedup in speedups)


def test_whole_processes_alternate_and_one_without_a_speed_ends_it():
    asked = []

    def run(name, rate):
        return lambda id: asked.append((id, name)) or rate

    over = iter([False, True])
    assert run_rounds(run("slow", 9.0), run("fast", 10.0), is_over=lambda: next(over)) == [(9.0, 10.0)] * 3
    assert [name for _, name in asked] == ["slow", "fast", "fast", "slow", "slow", "fast"]
    with pytest.raises(RuntimeError, match="no speed"):
        run_rounds(run("slow", 9.0), run("fast", None), is_over=lambda: True)


def test_every_cell_is_compared_as_often_as_asked_and_rarely_in_the_former_way(monkeypatch, capsys):
    def answer(cell, *, has_former):
        yield TURNS, build_outcome(gain_pct=float(cell.difference_pct))
        if has_former:
            yield WHOLE, build_outcome("undecided")

    monkeypatch.setattr(verdict_power, "compare_cell", answer)
    monkeypatch.setattr(verdict_power, "measure_planted", lambda extra, seconds, is_busy: [1 + extra])
    monkeypatch.setattr(verdict_power, "disturb_cores", lambda seed: contextlib.nullcontext())
    findings = verdict_power.run(Context(device="cpu", quick=False, n_repeats=RARE + 1))
    counts = {(arm.case, arm.arm): arm.n for arm in findings.arms if arm.arm != "planted"}
    assert counts == {
        **{(cell.name, TURNS): 2 if cell.is_rare else RARE + 1 for cell in CELLS},
        **{(cell.name, WHOLE): 2 for cell in CELLS if cell.has_former},
    }
    assert {(cell.load, cell.difference_pct) for cell in CELLS} >= set(itertools.product((QUIET, BUSY), (0, 5, 10)))
