"""What ``checkpoint_stall`` times, and how it judges."""

from __future__ import annotations

import pytest
from benchmarks import checkpoint_stall
from benchmarks.checkpoint_stall import N_CHECKPOINTS, find_timed_steps, judge_stalls


@pytest.mark.parametrize("steps_each", [6, 24])
def test_every_checkpoint_has_as_many_timed_steps_behind_it_as_lie_between_two(steps_each):
    first, last = find_timed_steps(steps_each)
    inside = [step for step in range(steps_each, 10 * steps_each, steps_each) if first < step <= last]
    assert len(inside) == N_CHECKPOINTS
    assert last - inside[-1] == steps_each - 1, "the batch after the next checkpoint is not asked for"


def test_a_block_asks_for_the_batches_that_it_times(monkeypatch):
    from torch import nn

    monkeypatch.setattr(
        checkpoint_stall, "build_model", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    )
    seconds = checkpoint_stall.measure_block(checkpoint_stall.FOREGROUND, device="cpu", batch_size=2, steps_each=6)
    assert 0 < seconds < 60


def test_rounds_whose_foreground_stall_drowned_in_noise_count():
    """They were left out of a ratio, and what remained looked sure."""
    arm, target = judge_stalls([4.0, 40.0, 40.0, 4.0, 40.0, 40.0], [10.0, -2.0, -1.0, 10.0, -2.0, 0.0])
    assert arm.n == 6
    assert arm.samples[:2] == pytest.approx((-1.0, 41.0))
    assert target.met is not True


@pytest.mark.parametrize(("beside_ms", "met"), [(3.0, True), (7.0, False)])
def test_the_claim_is_half_of_the_foreground(beside_ms, met):
    arm, target = judge_stalls([beside_ms + i / 100 for i in range(8)], [10.0] * 8)
    assert (arm.metric, target.met) == ("stall_above_limit_ms", met)
