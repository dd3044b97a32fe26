"""An accumulated window has the gradient of one large batch: full windows, the short tail, clipped, and in fp16."""

import pytest
import step_cases
import torch
from step_cases import assert_same, compute_norms, take_step, train
from torch import nn

from fulltilt.engine.step.train_step import TrainStep
from fulltilt.measure import NullTimer


def build_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_double(batch, generator):
    return batch[0].double(), batch[1]


def build(batch_size, accumulate, **more):
    given = {"model": lambda: build_model().double(), "prepare": make_double}
    return step_cases.build_small_run(batch_size, accumulate, **given | more)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(16, 4), (32, 2), (8, 8)])
def test_micro_batches_add_up_to_the_large_batch(batch_size, accumulate, clip_norm):
    whole = train(build(64, 1, clip_norm=clip_norm))
    assert len(whole[0]) == 4
    assert_same(whole, train(build(batch_size, accumulate, clip_norm=clip_norm)))


def test_the_tail_window_counts_its_micro_batches_and_the_epoch_ends():
    run = build(16, 4)
    outcomes, _ = train(run, 1)
    assert [o.n_micro for o in outcomes] == [4, 3]
    assert run.steps_per_epoch == 2
    assert TrainStep(run)(iter(()), NullTimer()) is None


def test_clipping_sees_the_gradient_of_the_window():
    assert min(compute_norms(train(build(16, 4), 1)[1])) > 0.05
    assert compute_norms(train(build(16, 4, clip_norm=0.05), 1)[1]) == pytest.approx([0.05, 0.05], rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_gradients_are_unscaled_before_clipping_and_stepping(fused):
    common = {"model": build_model, "prepare": None, "clip_norm": 0.05}
    whole = train(build(64, 1, plan={"fused_optimizer": fused}, **common))
    scaled = build(16, 4, plan={"fused_optimizer": fused, "precision": "fp16"}, **common)
    parts = train(scaled)
    assert_same(whole, parts, rtol=0.1, atol=2e-3)
    assert [float(o.loss) for o in parts[0]] == pytest.approx([float(o.loss) for o in whole[0]], rel=1e-2, abs=1e-3)
    assert scaled.setup.scaler.get_scale() == 2.0**16, "no step overflowed"


def test_a_step_that_overflows_leaves_the_weights_and_halves_the_scale():
    def overflow(outputs, targets):
        return outputs.double().square().mean() * 1e38

    run = build(16, 2, plan={"precision": "fp16"}, loss=overflow, model=build_model, prepare=None)
    before = [p.detach().clone() for p in run.setup.model.parameters()]
    take_step(run)
    for mine, old in zip(run.setup.model.parameters(), before, strict=True):
        assert torch.equal(mine, old)
    assert run.setup.scaler.get_scale() == 2.0**15
