import re

import pytest
import torch
from torch.nn import functional

from fulltilt.errors import UsageError
from fulltilt.tasks import LOSSES, METRICS
from fulltilt.tasks.recipes import pick_metrics


def test_the_registries_hold_what_the_documents_name():
    assert set(LOSSES) == {"cross_entropy", "mse", "l1", "bce_with_logits", "huber"}
    assert set(METRICS) == {"accuracy", "top5", "squared_error", "absolute_error", "binary_accuracy"}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_is_the_mean_over_samples(name):
    """Two micro-batches weighted by their sizes give the loss of the whole batch; accumulation rests on it."""
    torch.manual_seed(0)
    outputs = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.rand(12, 5, dtype=torch.float64)
    loss, targets = LOSSES[name](), targets.argmax(1) if name == "cross_entropy" else targets
    whole = loss(outputs, targets)
    assert whole.shape == ()
    parts = (loss(outputs[:8], targets[:8]) * 8 + loss(outputs[8:], targets[8:]) * 4) / 12
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    whole.backward()
    assert outputs.grad.abs().min() > 0


def test_arguments_reach_the_loss():
    logits, targets = torch.tensor([[4.0, 0.0, 0.0]]), torch.tensor([0])
    smoothed = LOSSES["cross_entropy"](label_smoothing=0.3)(logits, targets)
    torch.testing.assert_close(smoothed, -(torch.tensor([[0.8, 0.1, 0.1]]) * logits.log_softmax(1)).sum())
    huber = LOSSES["huber"](delta=0.5)  # linear beyond delta
    torch.testing.assert_close(huber(torch.tensor([3.0]), torch.tensor([0.0])), torch.tensor(0.5 * (3.0 - 0.25)))


GRID = torch.arange(12.0).reshape(3, 4).T


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("mse", torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0]), 1.0 / 3.0),
        pytest.param("mse", GRID.reshape(4, 3, 1).clone(), GRID, 0.0, id="a view that is not contiguous"),
        pytest.param("bce_with_logits", torch.zeros(4, 1), torch.tensor([0, 1, 1, 0]), 0.6931472, id="integer targets"),
    ],
)
def test_one_column_of_outputs_meets_flat_targets_without_broadcasting(name, outputs, targets, expected):
    torch.testing.assert_close(LOSSES[name]()(outputs, targets), torch.tensor(expected))


@pytest.mark.parametrize("shapes", [((4, 2), (4,)), ((4, 1), (1, 4)), ((2, 6), (3, 4))])
def test_shapes_that_disagree_are_an_error_with_both(shapes):
    outputs, targets = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(UsageError, match=f"{re.escape(str(shapes[0]))}.*{re.escape(str(shapes[1]))}"):
        LOSSES["mse"]()(outputs, targets)


def test_losses_are_finite_under_bf16_autocast():
    outputs = torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = outputs @ torch.eye(3)
        assert hidden.dtype is torch.bfloat16
        for name in LOSSES:
            targets = torch.tensor([0, 1, 2, 0]) if name == "cross_entropy" else torch.rand(4, 3)
            assert torch.isfinite(LOSSES[name]()(hidden, targets)), name


POSITIONS = functional.one_hot(torch.tensor([[0, 1, 1, 0]]), 2).float().movedim(-1, 1)
REAL, WANTED = torch.tensor([[1.0, -1.0], [0.5, 2.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("accuracy", torch.tensor([[3.0, 1.0], [0.0, 2.0], [5.0, 1.0]]), torch.tensor([0, 1, 1]), [1.0, 1.0, 0.0]),
        pytest.param(
            "accuracy", torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([[0.2, 0.8], [0.1, 0.9]]), [0.0, 1.0],
            id="the largest probability",
        ),
        pytest.param("accuracy", POSITIONS, torch.tensor([[0, 1, 0, 1]]), [0.5], id="positions are averaged"),
        ("top5", torch.arange(10.0).repeat(3, 1), torch.tensor([9, 5, 4]), [1.0, 1.0, 0.0]),
        pytest.param("top5", torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), [1.0] * 4, id="of three classes"),
        ("squared_error", torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0]), [0.0, 0.0, 1.0]),
        ("absolute_error", REAL, WANTED, [1.5, 0.75]),
        ("squared_error", REAL, WANTED, [2.5, 0.625]),
        ("binary_accuracy", REAL, WANTED, [0.0, 1.0]),
    ],
)  # fmt: skip
def test_metrics_by_hand_give_one_value_per_sample(name, outputs, targets, expected):
    values = METRICS[name](outputs, targets)
    assert values.dtype is torch.float32
    assert values.tolist() == expected


def test_metrics_are_picked_by_name():
    assert list(pick_metrics("top5")) == ["top5"]
    with pytest.raises(UsageError, match="did you mean accuracy"):
        pick_metrics(["acuracy"])
