"""One step: what it bills to which phase, and what it refuses."""

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
    outcomes = take_epochs(build({"batch_size": 16}))
    assert [(o.n_samples, o.n_micro) for o in outcomes] == [(16, 1), (16, 1), (8, 1)]
    assert (outcomes[0].loss.shape, outcomes[0].loss.requires_grad) == ((), False)


def test_gradients_are_gone_after_a_step():
    run = build()
    take_step(run)
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
        (
            {"dataset": lambda: TensorDataset(*torch.zeros(3, 16))},
            DataError,
            r"is 3 parts, expected \(inputs, targets\)",
        ),
        # A dict of two keys unpacks into its keys: the model would get a text.
        (
            {"dataset": lambda: [{"x": 1.0, "y": 2.0}] * 8},
            DataError,
            r"is a dict, expected \(inputs, targets\).*prepare",
        ),
        ({"model": lambda: Broken(1, 1)}, KeyError, "mine"),  # the user's own errors come through as they are
    ],
)
def test_what_no_step_can_take_is_an_error(changes, error, words):
    with pytest.raises(error, match=words):
        take_step(build(**changes))


class Broken(nn.Linear):
    def forward(self, input):
        raise KeyError("mine")
