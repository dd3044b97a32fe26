"""What ``checkpoint_stall`` times, and how it judges."""

from __future__ import annotations

import functools

import pytest
from benchmarks import checkpoint_stall
from benchmarks._runner import Context
from benchmarks.checkpoint_stall import (
    BESIDE,
    CORE_LEFT,
    EVERY_CORE,
    FOREGROUND,
    N_CHECKPOINTS,
    ON_GPU,
    WITHOUT,
    Block,
    find_timed_steps,
    judge_stalls,
)
from torch import nn

from fulltilt.hardware import count_usable_cores


def build_small_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


@pytest.mark.parametrize("steps_each", [6, 24])
def test_every_checkpoint_has_as_many_timed_steps_behind_it_as_lie_between_two(steps_each):
    first, last = find_timed_steps(steps_each)
    inside = [step for step in range(steps_each, 10 * steps_each, steps_each) if first < step <= last]
    assert len(inside) == N_CHECKPOINTS
    assert last - inside[-1] == steps_each - 1, "the batch after the next checkpoint is not asked for"


def test_a_block_asks_for_the_batches_that_it_times(monkeypatch):
    monkeypatch.setattr(checkpoint_stall, "build_model", build_small_model)
    measure = functools.partial(checkpoint_stall.measure_block, device="cpu", batch_size=2, steps_each=6, n_threads=1)
    foreground, without = measure(FOREGROUND), measure(WITHOUT)
    assert 0 < foreground.still_s < foreground.seconds, "three checkpoints lie inside of the timed steps, the last not"
    assert (foreground.waited_s, without.still_s, without.waited_s) == (0.0, 0.0, 0.0)


def test_the_benchmark_runs_from_its_own_entry(monkeypatch):
    """It handed its block an argument that this does not take, and ended before the first step."""
    monkeypatch.setattr(checkpoint_stall, "build_model", build_small_model)
    findings = checkpoint_stall.run(Context(device="cpu", quick=True))
    cases = [*checkpoint_stall.plan_cases("cpu", count_usable_cores())]
    assert [target.name.partition(":")[0] for target in findings.targets] == cases
    assert {arm.case for arm in findings.arms} == set(cases)


@pytest.mark.parametrize(
    ("device", "n_cores", "expected"),
    [
        ("cpu", 1, {EVERY_CORE: 1}),
        ("cpu", 2, {EVERY_CORE: 2, CORE_LEFT: 1}),
        ("cpu", 8, {EVERY_CORE: 8, CORE_LEFT: 7}),
        ("cuda", 8, {ON_GPU: None}),
    ],
)
def test_a_core_is_left_where_there_are_two(device, n_cores, expected):
    assert checkpoint_stall.plan_cases(device, n_cores) == expected


def build_rounds(beside_ms, foreground_ms):
    """Rounds whose blocks took so much longer by the checkpoint."""

    def block(stall_ms):
        return Block(seconds=1 + stall_ms * N_CHECKPOINTS / 1000, still_s=0.0, waited_s=0.0)

    return [
        {WITHOUT: (block(0),) * 2, FOREGROUND: (block(f),) * 2, BESIDE: (block(b),) * 2}
        for b, f in zip(beside_ms, foreground_ms, strict=True)
    ]


def test_rounds_whose_foreground_stall_drowned_in_noise_count():
    """They were left out of a ratio, and what remained looked sure."""
    arm, target = judge_stalls(
        build_rounds([4.0, 40.0, 40.0, 4.0, 40.0, 40.0], [10.0, -2.0, -1.0, 10.0, -2.0, 0.0]), EVERY_CORE
    )
    assert arm.n == 6
    assert arm.samples[:2] == pytest.approx((-1.0, 41.0))
    assert target.met is not True


@pytest.mark.parametrize(("beside_ms", "met"), [(3.0, True), (7.0, False)])
def test_the_claim_is_half_of_the_foreground(beside_ms, met):
    arm, target = judge_stalls(build_rounds([beside_ms + i / 100 for i in range(8)], [10.0] * 8), CORE_LEFT)
    assert (arm.metric, arm.case, target.met) == ("stall_above_limit_ms", CORE_LEFT, met)
