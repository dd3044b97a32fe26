"""An accumulated window has the gradient of one large batch: full windows, the short tail, clipped, and in fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.config import config_from_values
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.step.train_step import StepOutcome, TrainStep
from fulltilt.levers import default_plan
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload

N_SAMPLES = 100  # windows of 64: one full, one of 36; micro-batches of 16: four, then 16, 16 and 4


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (N_SAMPLES,), generator=generator))


def build_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def build(batch_size: int, accumulate: int, *, clip_norm: float | None = None, **more: Any) -> Run:
    given = {"model": build_model, "dataset": build_dataset, "loss": nn.CrossEntropyLoss(), "optimizer": build_sgd}
    plan = {"batch_size": batch_size, "accumulate": accumulate, "threads": 1}
    plan |= {name: more.pop(name) for name in ("precision", "fused_optimizer") if name in more}
    config = config_from_values({"optim": {"clip_norm": clip_norm}, "run": {"seed": 7}}, base_dir=".")
    return build_run(config, default_plan(plan), device="cpu", workload=Workload(**given | more))


def train(run: Run, epochs: int = 2) -> tuple[list[StepOutcome], list[list[torch.Tensor]]]:
    """Outcomes, and the gradients that each optimizer step saw."""
    gradients: list[list[torch.Tensor]] = []

    def keep(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients.append([p.grad.clone() for p in run.setup.model.parameters()])

    run.setup.optimizer.register_step_pre_hook(keep)
    step, outcomes = TrainStep(run), []
    for epoch in range(epochs):
        batches = run.start_epoch(epoch)
        while (outcome := step(batches, NullTimer())) is not None:
            outcomes.append(outcome)
    return outcomes, gradients


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(16, 4), (32, 2), (8, 8)])
def test_micro_batches_add_up_to_the_large_batch(batch_size, accumulate, clip_norm):
    whole, gradients = train(build(64, 1, clip_norm=clip_norm))
    parts, gradients_of_parts = train(build(batch_size, accumulate, clip_norm=clip_norm))
    assert [o.n_samples for o in whole] == [o.n_samples for o in parts] == [64, 36, 64, 36]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-12, atol=0)
    for mine, theirs in zip(gradients, gradients_of_parts, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_the_tail_window_counts_its_micro_batches_and_the_epoch_ends():
    run = build(16, 4)
    outcomes, _ = train(run, epochs=1)
    assert [o.n_micro for o in outcomes] == [4, 3]
    assert run.steps_per_epoch == 2
    assert TrainStep(run)(iter(()), NullTimer()) is None


def test_clipping_sees_the_gradient_of_the_window():
    _, free = train(build(16, 4), epochs=1)
    _, clipped = train(build(16, 4, clip_norm=0.05), epochs=1)
    norms = [torch.stack([g.norm() for g in grads]).norm().item() for grads in clipped]
    assert min(torch.stack([g.norm() for g in grads]).norm().item() for grads in free) > 0.05
    assert norms == pytest.approx([0.05, 0.05], rel=1e-4)


def test_the_loss_of_a_window_is_the_mean_over_its_samples():
    run = build(16, 4)
    model, dataset = run.setup.model, run.dataset
    batches = run.start_epoch(0)
    order = [index for indices in run.loader.batch_sampler for index in indices]
    rows = torch.tensor(order[:64])
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(dataset.tensors[0][rows]), dataset.tensors[1][rows])
    torch.testing.assert_close(TrainStep(run)(batches, NullTimer()).loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_gradients_are_unscaled_before_clipping_and_stepping(fused):
    def build_float() -> nn.Module:
        return build_model().float()

    def collate(samples: list[Any]) -> Any:
        x, y = zip(*samples, strict=True)
        return torch.stack(x).float(), torch.stack(y)

    common = {"model": build_float, "collate": collate, "clip_norm": 0.05, "fused_optimizer": fused}
    whole, expected = train(build(64, 1, **common))
    scaled = build(16, 4, precision="fp16", **common)
    parts, gradients = train(scaled)
    assert scaled.setup.scaler.get_scale() == 2.0**16, "no step overflowed"
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-2, atol=1e-3)
    for mine, theirs in zip(expected, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=2e-3)


def test_a_step_that_overflows_leaves_the_weights_and_halves_the_scale():
    def overflow(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.double().square().mean() * 1e38

    run = build(16, 2, precision="fp16", loss=overflow, model=lambda: build_model().float(), collate=_collate_float)
    before = [p.detach().clone() for p in run.setup.model.parameters()]
    TrainStep(run)(run.start_epoch(0), NullTimer())
    for mine, old in zip(run.setup.model.parameters(), before, strict=True):
        assert torch.equal(mine, old)
    assert run.setup.scaler.get_scale() == 2.0**15


def _collate_float(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]).float(), torch.stack([y for _, y in samples])
