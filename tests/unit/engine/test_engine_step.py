"""One step: what it bills to which phase, what it refuses, and what is computed in which precision."""

import pytest
import step_cases
import torch
from step_cases import take_epochs, take_step
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.errors import DataError, UsageError
from fulltilt.measure.nested import count_samples, find_tensor


class Recorder:
    def __init__(self):
        self.phases = []

    def lap(self, phase):
        self.phases.append(phase)


def build_model():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 3))


def build_dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(40, 2, 6, 6, generator=generator), torch.randint(3, (40,), generator=generator))


def build(plan=None, **workload):
    given = {"model": build_model, "dataset": build_dataset}
    return step_cases.build_small_run(8, plan=plan, **given | workload)


def test_phases_are_billed_in_order_once_per_micro_batch():
    recorder = Recorder()
    take_step(build({"accumulate": 2}), recorder)
    assert recorder.phases == ["data_wait", "forward", "backward"] * 2 + ["optimizer"]


def test_the_end_of_the_epoch_is_none_and_a_short_window_is_a_step():
    run = build({"batch_size": 16})
    outcomes = take_epochs(run)
    assert [(o.n_samples, o.n_micro) for o in outcomes] == [(16, 1), (16, 1), (8, 1)]
    assert (outcomes[0].loss.shape, outcomes[0].loss.requires_grad) == ((), False)
    assert all(p.grad is None for p in run.setup.model.parameters())


def test_observe_gets_every_micro_batch_without_gradients():
    seen = []

    def look(outputs, targets):
        seen.append((outputs.shape, targets.shape, (outputs * 2).requires_grad))

    take_step(build({"accumulate": 5}), observe=look)
    assert seen == [((8, 3), (8,), False)] * 5


class TwoInputs(nn.Linear):
    def forward(self, a_BC, b_BC):
        return super().forward(torch.cat([a_BC, b_BC], 1))[:, 0]


def test_nested_batches_reach_model_and_loss():
    def loss(outputs, targets):
        return (outputs - targets["y"]).square().mean()

    samples = [((torch.rand(3), torch.rand(2)), {"y": torch.tensor(1.0)})] * 12
    outcome = take_step(build(dataset=lambda: samples, model=lambda: TwoInputs(5, 1), loss=loss))
    assert (outcome.n_samples, outcome.loss.isfinite()) == (8, True)


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        (torch.zeros(7, 2), 7),
        ((torch.zeros(5), torch.zeros(5)), 5),
        ({"a": torch.tensor(1.0), "b": torch.zeros(4, 1)}, 4),
        ([[torch.zeros(3, 1), torch.zeros(3)], "text"], 3),
    ],
)
def test_samples_are_counted_in_nested_batches(batch, n):
    assert count_samples(batch) == n


def test_a_batch_without_a_tensor_is_an_error():
    with pytest.raises(DataError, match="no tensor"):
        count_samples((["a", "b"], 3))
    assert find_tensor("text") is None


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, UsageError, r"a tensor of shape \(8,\)"),
        ({"loss": lambda out, y: 3.0}, UsageError, "the loss returned float"),
        ({"dataset": lambda: TensorDataset(*torch.zeros(3, 16))}, DataError, r"3 parts, expected \(inputs, targets\)"),
        # A dict of two keys unpacks into its keys: the model would get a text.
        ({"dataset": lambda: [{"x": 1.0, "y": 2.0}] * 8}, DataError, r"is a dict, expected \(inputs, .*prepare"),
        ({"model": lambda: Broken(1, 1)}, KeyError, "mine"),  # the user's own errors come through as they are
    ],
)
def test_what_no_step_can_take_is_an_error(changes, error, words):
    with pytest.raises(error, match=words):
        take_step(build(**changes))


class Broken(nn.Linear):
    def forward(self, input):
        raise KeyError("mine")


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


def build_in(precision, **fields):
    return step_cases.build_small_run(20, plan={"precision": precision}, **{"model": Probe} | fields)


@pytest.mark.parametrize("precision", DTYPES)
def test_forward_and_loss_compute_in_the_precision_and_the_weights_stay_fp32(precision):
    gradients, loss_saw = set(), []

    def loss(outputs, targets):
        loss_saw.append(torch.is_autocast_enabled("cpu"))
        return nn.functional.cross_entropy(outputs, targets)

    run = build_in(precision, loss=loss)
    run.setup.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: gradients.update(p.grad.dtype for p in run.setup.model.parameters())
    )
    Backward.seen.clear()
    take_step(run)
    assert run.setup.model.dtypes == {DTYPES[precision]}
    assert loss_saw == [precision != "fp32"]
    assert gradients == {torch.float32}
    assert {p.dtype for p in run.setup.model.parameters()} == {torch.float32}
    assert Backward.seen == [False]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_are_close_to_fp32(precision):
    exact, mixed = (torch.stack([o.loss for o in take_epochs(build_in(p), 4)]) for p in ("fp32", precision))
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(exact, mixed, rtol=2e-2, atol=0)
    assert not torch.equal(exact, mixed)
