"""Mixed precision inside a step: where autocast is on, what stays in fp32, and that the numbers are close."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.levers import default_plan
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Backward(torch.autograd.Function):
    """Notes whether autocast is on while gradients are computed."""

    seen: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Backward.seen.append(torch.is_autocast_enabled("cpu"))
        return gradients[0]


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 3)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
        h_BC = torch.tanh(self.one(x_BC))
        self.dtypes.add(h_BC.dtype)
        return self.two(Backward.apply(h_BC))


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 8, generator=generator), torch.randint(3, (32,), generator=generator))


def build(precision: str, **fields: Any) -> Run:
    given = {"model": Probe, "dataset": build_dataset, "loss": nn.CrossEntropyLoss()}
    plan = default_plan({"batch_size": 16, "precision": precision, "threads": 1})
    return build_run(None, plan, device="cpu", workload=Workload(**given | fields), seed=2)


@pytest.mark.parametrize("precision", DTYPES)
def test_the_forward_computes_in_the_precision_and_the_weights_stay_fp32(precision):
    run = build(precision)
    gradients: set[torch.dtype] = set()
    run.setup.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: gradients.update(p.grad.dtype for p in run.setup.model.parameters())
    )
    Backward.seen.clear()
    TrainStep(run)(run.start_epoch(0), NullTimer())
    assert run.setup.model.dtypes == {DTYPES[precision]}
    assert gradients == {torch.float32}
    assert {p.dtype for p in run.setup.model.parameters()} == {torch.float32}
    assert Backward.seen == [False]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_are_close_to_fp32(precision):
    def train(run: Run) -> torch.Tensor:
        step, losses = TrainStep(run), []
        for epoch in range(4):
            batches = run.start_epoch(epoch)
            while (outcome := step(batches, NullTimer())) is not None:
                losses.append(outcome.loss)
        return torch.stack(losses)

    exact, mixed = train(build("fp32")), train(build(precision))
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(exact, mixed, rtol=2e-2, atol=0)
    assert not torch.equal(exact, mixed)


@pytest.mark.parametrize("precision", DTYPES)
def test_the_loss_is_computed_under_autocast(precision):
    seen = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return nn.functional.cross_entropy(outputs, targets)

    run = build(precision, loss=loss)
    TrainStep(run)(run.start_epoch(0), NullTimer())
    assert seen == [precision != "fp32"]


def test_a_model_that_raises_leaves_autocast_off():
    class Broken(Probe):
        def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("mine")

    run = build("bf16", model=Broken)
    with pytest.raises(RuntimeError, match="mine"):
        TrainStep(run)(run.start_epoch(0), NullTimer())
    assert not torch.is_autocast_enabled("cpu")
