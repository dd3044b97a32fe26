"""Training whose parts take a known time on a clock that stands still, for the loops of other libraries."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

DATA_MS, FORWARD_MS, BACKWARD_MS, UPDATE_MS, ZERO_MS = 3.0, 2.0, 4.0, 1.0, 0.5
BATCH_SIZE = 4


class Rows(Dataset):
    """Fetching a sample takes its share of ``DATA_MS``, a batch all of it."""

    def __init__(self, clock, n_batches):
        self._clock, self._n = clock, n_batches * BATCH_SIZE

    def __len__(self):
        return self._n

    def __getitem__(self, index):
        self._clock.advance(DATA_MS / BATCH_SIZE)
        inputs = torch.full((3,), float(index % 5))
        return {"inputs": inputs, "labels": inputs[0]}


class _Delay(torch.autograd.Function):
    """The identity; its gradient takes ``BACKWARD_MS``."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.advance(BACKWARD_MS)
        return grad, None


class SlowModel(nn.Module):
    """``(inputs, labels) → {"loss": …}``; forward takes ``FORWARD_MS``."""

    def __init__(self, clock):
        super().__init__()
        self.layer, self._clock = nn.Linear(3, 1), clock

    def forward(self, inputs, labels):
        self._clock.advance(FORWARD_MS)
        outputs = _Delay.apply(self.layer(inputs).squeeze(-1), self._clock)
        return {"loss": (outputs - labels).square().mean()}


class SlowSGD(torch.optim.SGD):
    """The update takes ``UPDATE_MS``, zeroing gradients ``ZERO_MS``."""

    def __init__(self, parameters, clock):
        self.slow_clock = clock
        super().__init__(parameters, lr=1e-3)

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        self.slow_clock.advance(UPDATE_MS)
        return result

    def zero_grad(self, set_to_none=True):
        self.slow_clock.advance(ZERO_MS)
        super().zero_grad(set_to_none)


def assert_closes(result, expected):
    """``expected`` phases, and nothing of the step is missing."""
    assert result.phases_ms == {name: pytest.approx(ms, abs=1e-6) for name, ms in expected.items()} | {"h2d": None}
    assert sum(expected.values()) == pytest.approx(result.step_ms, rel=1e-6)
