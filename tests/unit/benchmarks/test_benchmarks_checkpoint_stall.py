"""What ``checkpoint_stall`` times, and how it judges."""

from __future__ import annotations

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
    compute_stall,
    judge_stalls,
)
from torch import nn

from fulltilt.hardware import count_usable_cores


@pytest.fixture
def _small_model(monkeypatch):
    monkeypatch.setattr(
        checkpoint_stall, "build_model", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    )


def build_times(steps_each, stall_s, step_s=1.0):
    """When batches were asked for: steps of one length, and a stall behind each checkpoint."""
    asked_s = [0.0]
    for step in range(1, (N_CHECKPOINTS + 1) * steps_each):
        asked_s.append(asked_s[-1] + step_s + (stall_s if step % steps_each == 0 else 0.0))
    return asked_s


@pytest.mark.parametrize("steps_each", [6, 24])
def test_a_stall_is_what_the_steps_behind_a_checkpoint_took_longer_than_those_before(steps_each):
    assert compute_stall(build_times(steps_each, 7.0), steps_each) == pytest.approx((7.0, 1.0))
    assert compute_stall(build_times(steps_each, 0.0, 2.0), steps_each) == pytest.approx((0.0, 2.0))


def test_what_a_writer_takes_from_later_steps_is_in_the_stall():
    asked_s = build_times(24, 1.0)
    slowed = [at + sum(0.5 for s in (24, 48, 72) for k in range(1, 5) if i >= s + k) for i, at in enumerate(asked_s)]
    assert compute_stall(slowed, 24)[0] == pytest.approx(1.0 + 4 * 0.5)


def test_a_machine_that_became_slower_for_good_is_no_stall_of_the_later_checkpoints():
    """Whole runs were compared, and what other programs took in one of them was its checkpoints' stall."""
    asked_s = build_times(24, 0.0)
    slower = [at + max(0, i - 35) for i, at in enumerate(asked_s)]  # twice as slow from between two windows on
    assert compute_stall(slower, 24)[0] == pytest.approx(0.0)


@pytest.mark.usefixtures("_small_model")
def test_the_benchmark_runs_from_its_own_entry():
    """It handed its block an argument that this does not take, and ended before the first step."""
    findings = checkpoint_stall.run(Context(device="cpu", quick=True))
    cases = [*checkpoint_stall.plan_cases("cpu", count_usable_cores())]
    assert [target.name.partition(":")[0] for target in findings.targets] == cases
    assert {arm.case for arm in findings.arms} == set(cases)
    assert all(arm.median > 0 for arm in findings.arms if arm.metric == "step_wall_ms")


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


@pytest.mark.parametrize(
    ("beside_ms", "foreground_ms", "met"),
    [
        ([3.0 + i / 100 for i in range(8)], [10.0] * 8, True),
        ([7.0 + i / 100 for i in range(8)], [10.0] * 8, False),
        # Rounds whose foreground stall drowned in noise were left out of a ratio, and what remained looked sure.
        ([4.0, 40.0, 40.0, 4.0, 40.0, 40.0], [10.0, -2.0, -1.0, 10.0, -2.0, 0.0], None),
    ],
)
def test_the_claim_is_half_of_the_foreground_in_every_round(beside_ms, foreground_ms, met):
    def block(stall_ms):
        return (Block(stall_s=stall_ms / 1000, step_s=0.01),) * 2

    pairs = list(zip(beside_ms, foreground_ms, strict=True))
    rounds = [{WITHOUT: block(0), FOREGROUND: block(f), BESIDE: block(b)} for b, f in pairs]
    arm, target = judge_stalls(rounds, CORE_LEFT)
    assert arm.samples == pytest.approx([b - 0.5 * f for b, f in pairs])
    assert (arm.metric, arm.case, target.met) == ("stall_above_limit_ms", CORE_LEFT, met)
