"""Turns of a run that compiles: all that is compiled is compiled before the first block."""

from __future__ import annotations

import pytest
import torch
from step_cases import build_small_run
from torch.utils.data import TensorDataset

from fulltilt.engine.measured import turns
from fulltilt.engine.measured.turns import N_WARM_STEPS, BlockRunner

BATCH, N_SAMPLES = 4, 402  # an epoch ends with a batch of 2


class CompiledRun:
    """A run that says it compiles, on a clock where each first batch of a size takes a minute."""

    def __init__(self, monkeypatch, *, compiles: bool = True):
        monkeypatch.setattr(turns, "check_observed", lambda run: None)
        self.now_s, self.sizes = 0.0, list[int]()
        data = TensorDataset(torch.randn(N_SAMPLES, 6), torch.randint(3, (N_SAMPLES,)))
        self.run = build_small_run(BATCH, dataset=lambda: data)
        self.run.plan = self.run.plan.replace(compile=compiles)
        self.run.setup.model.register_forward_pre_hook(lambda model, inputs: self.see(len(inputs[0])))
        self.turns = BlockRunner(self.run, clock=lambda: self.now_s)

    def see(self, size: int) -> None:
        self.now_s += 0.04 if size in self.sizes else 60.0
        self.sizes.append(size)


def test_both_sizes_of_an_epoch_are_seen_before_the_first_block(monkeypatch):
    compiled = CompiledRun(monkeypatch)
    compiled.turns.warm_up()
    assert set(compiled.sizes) == {BATCH, N_SAMPLES % BATCH}


def test_what_compiling_takes_is_neither_warm_up_nor_in_a_block(monkeypatch):
    compiled = CompiledRun(monkeypatch)
    compiled.turns.warm_up()
    assert len(compiled.sizes) >= N_WARM_STEPS + 2, "steps until they are level, though compiling took minutes"
    for _ in range(12):  # more than an epoch
        block = compiled.turns.take_block()
        assert block.seconds / block.n_samples * BATCH == pytest.approx(0.04, rel=0.1)


def test_without_compiling_no_step_is_taken_on_a_short_batch(monkeypatch):
    eager = CompiledRun(monkeypatch, compiles=False)
    eager.turns.warm_up()
    assert set(eager.sizes) == {BATCH}
