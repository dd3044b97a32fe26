"""Mixed precision inside a step: where autocast is on, what stays in fp32, and that the numbers are close."""

import pytest
import torch
from step_cases import build_small_run, take_epochs, take_step
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Backward(torch.autograd.Function):
    """Notes whether autocast is on while gradients are computed."""

    seen = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        Backward.seen.append(torch.is_autocast_enabled("cpu"))
        return gradients[0]


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)
        self.dtypes = set()

    def forward(self, x_BC):
        h_BC = torch.tanh(self.one(x_BC))
        self.dtypes.add(h_BC.dtype)
        return self.two(Backward.apply(h_BC))


def build(precision, **fields):
    return build_small_run(20, plan={"precision": precision}, **{"model": Probe} | fields)


@pytest.mark.parametrize("precision", DTYPES)
def test_the_forward_computes_in_the_precision_and_the_weights_stay_fp32(precision):
    run = build(precision)
    gradients = set()
    run.setup.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: gradients.update(p.grad.dtype for p in run.setup.model.parameters())
    )
    Backward.seen.clear()
    take_step(run)
    assert run.setup.model.dtypes == {DTYPES[precision]}
    assert gradients == {torch.float32}
    assert {p.dtype for p in run.setup.model.parameters()} == {torch.float32}
    assert Backward.seen == [False]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_are_close_to_fp32(precision):
    exact, mixed = (torch.stack([o.loss for o in take_epochs(build(p), 4)]) for p in ("fp32", precision))
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(exact, mixed, rtol=2e-2, atol=0)
    assert not torch.equal(exact, mixed)


@pytest.mark.parametrize("precision", DTYPES)
def test_the_loss_is_computed_under_autocast(precision):
    seen = []

    def loss(outputs, targets):
        seen.append(torch.is_autocast_enabled("cpu"))
        return nn.functional.cross_entropy(outputs, targets)

    run = build(precision, loss=loss)
    take_step(run)
    assert seen == [precision != "fp32"]
