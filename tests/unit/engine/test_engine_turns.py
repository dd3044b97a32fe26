"""Blocks of steps for settings that take turns, on a real run and a clock on which every cost is planted."""

from __future__ import annotations

import time

import pytest
import torch
from step_cases import build_small_run
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.engine.measured.turns import (
    BLOCK_S,
    MAX_BLOCK_S,
    MAX_WARM_S,
    MIN_BLOCK_STEPS,
    N_SETTLING,
    N_WARM_STEPS,
    SLOW_STEP_S,
    BlockRunner,
)
from fulltilt.errors import NonFiniteLossError, TrainingError
from fulltilt.stats import Block

BATCH, BEGIN_S = 4, 1.0


class PlantedRun:
    """A run of small epochs whose steps and whose begins of epochs take as long as planted."""

    def __init__(self, step_s: float, *, n_samples: int = 40, begin_s: float = BEGIN_S):
        self.now_s, self.step_s, self.n_steps, self.stalls_s = 0.0, step_s, 0, dict[int, float]()
        data = TensorDataset(torch.randn(n_samples, 6), torch.randint(3, (n_samples,)))
        self.run = build_small_run(BATCH, dataset=lambda: data)
        self.run.setup.epoch_hooks.append(lambda epoch: self.advance(begin_s))
        self.run.setup.optimizer.register_step_post_hook(lambda *_: self.end_step())
        self.turns = BlockRunner(self.run, clock=lambda: self.now_s)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def end_step(self) -> None:
        self.n_steps += 1
        self.advance(self.step_s + self.stalls_s.get(self.n_steps, 0.0))

    def take_blocks(self, n: int) -> list[Block]:
        self.turns.warm_up()
        return [self.turns.take_block() for _ in range(n)]


@pytest.mark.parametrize(("step_s", "n_steps"), [(0.0011, 28), (0.02, MIN_BLOCK_STEPS), (0.09, 4), (0.15, 2), (0.9, 1)])
def test_a_block_holds_so_many_full_steps_as_fit_its_time(step_s, n_steps):
    planted = PlantedRun(step_s, n_samples=4000)
    planted.turns.warm_up()
    n_before = planted.n_steps
    assert n_before >= N_WARM_STEPS or n_before * step_s > MAX_WARM_S
    block = planted.turns.take_block()
    assert planted.n_steps - n_before == (N_SETTLING if step_s < SLOW_STEP_S else 1) + n_steps
    assert block.n_samples == n_steps * BATCH
    assert block.seconds == pytest.approx(n_steps * step_s)
    assert block.stalled_s == 0
    assert BLOCK_S <= block.seconds <= MAX_BLOCK_S or n_steps in (MIN_BLOCK_STEPS, 1)


def test_a_block_holds_two_bursts_of_the_workers():
    planted = PlantedRun(0.04, n_samples=4000)
    planted.turns.warm_up()
    planted.run.loader.num_workers = 4
    assert planted.turns.take_block().n_samples == 8 * BATCH


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.05, 0.1, 0.2, 0.7])
def test_every_step_bears_its_share_of_an_epochs_begin_whatever_the_length_of_a_block(step_s):
    """Blocks of 8 steps, after 2 that settle, keep step with epochs of 10: their begins were then never timed."""
    planted = PlantedRun(step_s)
    assert planted.run.steps_per_epoch == 10
    for block in planted.take_blocks(12)[-6:]:
        n_steps = block.n_samples / BATCH
        assert block.seconds / n_steps == pytest.approx(step_s + BEGIN_S / 10)


@pytest.mark.parametrize("batch", [6, 70, 140])
@pytest.mark.parametrize("begin_s", [0.0, 0.05])
def test_a_short_last_batch_is_neither_a_stall_nor_a_gain(batch, begin_s):
    """Begins were once left out with their full batches: what stayed were short ones, at a twentieth of the speed."""
    n_samples, sample_s = 145, 1e-3
    data = TensorDataset(torch.randn(n_samples, 6), torch.randint(3, (n_samples,)))
    now_s = 0.0
    run = build_small_run(batch, dataset=lambda: data)

    def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    run.setup.epoch_hooks.append(lambda epoch: advance(begin_s))
    run.setup.model.register_forward_pre_hook(lambda _, inputs: advance(sample_s * len(inputs[0])))
    turns = BlockRunner(run, clock=lambda: now_s)
    turns.warm_up()
    blocks = [turns.take_block() for _ in range(12)]
    rate = sum(block.n_samples for block in blocks) / sum(block.seconds for block in blocks)
    assert rate == pytest.approx(n_samples / (n_samples * sample_s + begin_s), rel=0.02)
    assert sum(block.stalled_s for block in blocks) == 0


def test_a_block_within_a_long_epoch_holds_no_begin():
    planted = PlantedRun(0.01, n_samples=4000)
    assert [block.seconds for block in planted.take_blocks(3)] == pytest.approx([0.01 * MIN_BLOCK_STEPS] * 3)


def test_epochs_of_one_step_are_timed_with_their_begins():
    planted = PlantedRun(0.01, n_samples=BATCH, begin_s=0.02)
    for block in planted.take_blocks(3):
        assert block.seconds / block.n_samples * BATCH == pytest.approx(0.03)


def test_steps_that_stall_are_counted_and_do_not_shrink_the_next_block():
    planted = PlantedRun(0.01, n_samples=4000)
    planted.turns.warm_up()
    planted.stalls_s = {planted.n_steps + N_SETTLING + 3: 0.2, planted.n_steps + N_SETTLING + 4: 0.035}
    stalled, calm = planted.turns.take_block(), planted.turns.take_block()
    assert stalled.stalled_s == pytest.approx(0.21), "0.045 s are less than five usual steps"
    assert stalled.seconds == pytest.approx(MIN_BLOCK_STEPS * 0.01 + 0.235)
    assert (calm.stalled_s, calm.n_samples) == (0, stalled.n_samples)


def test_a_block_ends_by_time_where_all_steps_stall():
    """A block of twenty steps took 120 s on a busy machine, and the plan was taken for one that hangs."""
    planted = PlantedRun(0.01, n_samples=4000)
    planted.turns.warm_up()
    planted.step_s = 0.25
    assert planted.turns.take_block().n_samples == 2 * BATCH


def test_on_a_device_that_works_behind_the_host_a_step_is_not_what_its_launch_takes(monkeypatch):
    """A step is launched in 1 ms and takes 20: the wait stands at the end of the block, and a begin holds one too."""
    planted = PlantedRun(0.001, n_samples=4000, begin_s=0.0)
    ends_s = 0.0

    def launch(*_: object) -> None:
        nonlocal ends_s
        ends_s = max(ends_s, planted.now_s) + 0.020

    planted.run.setup.optimizer.register_step_post_hook(launch)
    monkeypatch.setattr(
        "fulltilt.engine.measured.turns.synchronize_run",
        lambda run: planted.advance(max(0.0, ends_s - planted.now_s)),
    )
    for block in planted.take_blocks(4):
        assert block.n_samples == MIN_BLOCK_STEPS * BATCH
        assert block.seconds / MIN_BLOCK_STEPS == pytest.approx(0.020, rel=0.06)
        assert block.stalled_s == 0


def test_a_loss_that_is_no_number_is_an_error():
    turns = BlockRunner(build_small_run(BATCH, loss=lambda output, target: output.sum() * torch.nan))
    turns.warm_up()
    with pytest.raises(NonFiniteLossError):
        turns.take_block()


def test_a_plan_that_is_not_in_force_is_an_error():
    class Greedy(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            torch.set_num_threads(2)
            return super().forward(input)

    try:
        with pytest.raises(TrainingError, match="threads: plan says 1, in force 2"):
            BlockRunner(build_small_run(BATCH, model=lambda: Greedy(6, 3))).warm_up()
    finally:
        torch.set_num_threads(1)


def test_blocks_of_a_real_run_are_no_longer_than_the_time_around_them():
    data = TensorDataset(torch.randn(BATCH, 6), torch.randint(3, (BATCH,)))
    turns = BlockRunner(build_small_run(BATCH, dataset=lambda: data))  # epochs of one step: no share is estimated
    turns.warm_up()
    start_s = time.perf_counter()
    blocks = [turns.take_block() for _ in range(3)]
    spent_s = time.perf_counter() - start_s
    assert all(block.seconds > 0 and block.n_samples >= BATCH for block in blocks)
    assert sum(block.seconds for block in blocks) <= spent_s


def test_steps_of_which_most_stall_are_told_from_the_quick_ones():
    """The median step of such a block is a stalled one itself."""
    planted = PlantedRun(0.005, n_samples=4000)
    planted.turns.warm_up()
    planted.stalls_s = {n: 0.3 for n in range(planted.n_steps + 1, planted.n_steps + 400) if n % 4}
    block = planted.turns.take_block()
    assert block.stalled_s > 0.8 * block.seconds
