import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt import Workload
from fulltilt.errors import UsageError


def build_model():
    return nn.Linear(4, 2)


def build_dataset():
    return TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))


def make(**changes):
    return Workload(**({"model": build_model, "dataset": build_dataset, "loss": nn.CrossEntropyLoss()} | changes))


def test_it_travels_by_pickle_with_metrics_that_are_a_copy_of_the_callers_mapping():
    given = {"zero": _zero}
    workload = make(metrics=given)
    given.clear()
    copy = pickle.loads(pickle.dumps(workload))
    assert copy.dataset()[0][0].shape == (4,)
    assert copy.metrics == {"zero": _zero}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", nn.Linear(4, 2), ["object of Linear", "model=lambda: Linear"]),
        ("model", 3, ["model is 3 (int)", "without arguments"]),
        ("model", nn.Linear, ["missing a required argument: 'in_features'", "model=lambda: Linear(…)"]),
        ("dataset", build_dataset(), ["object of TensorDataset", "dataset=lambda: TensorDataset"]),
        ("dataset", lambda root: None, ["missing a required argument: 'root'"]),
        ("validation", build_dataset(), ["validation is an object of TensorDataset"]),
        ("loss", nn.CrossEntropyLoss, ["the class CrossEntropyLoss", "loss=CrossEntropyLoss()"]),
        ("loss", "mse", ["loss is 'mse' (str)"]),
        ("loss", "x" * 5000, ["loss is 'xxx"]),
        ("optimizer", torch.optim.SGD([torch.zeros(1)], lr=0.1), ["object of SGD", "lambda parameters: SGD"]),
        ("metrics", {"loss": torch.sub}, ["'loss'", "is the name of the loss itself"]),
        ("metrics", {"a\nb": torch.sub}, ["'a\\nb'", "cannot be shown in a line"]),
        ("optimizer", "adamw", ["optimizer is 'adamw' (str)", "None for AdamW"]),
        ("prepare", 1, ["prepare is 1 (int)"]),
        ("collate", "stack", ["collate is 'stack' (str)"]),
        ("metrics", ["accuracy"], ["metrics is ['accuracy'] (list)", "mapping"]),
        ("metrics", {"accuracy": 1.0}, ["'accuracy': 1.0 (float)", "shape (B,)"]),
        ("metrics", {"loss": nn.MSELoss}, ["'loss'", "(type)"]),
        ("name", "", ["name is ''"]),
        ("name", None, ["name is None"]),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_remedy(field, value, words):
    with pytest.raises(UsageError) as raised:
        make(**{field: value})
    assert field in str(raised.value)
    assert len(str(raised.value)) < 300, "a long value is cut"
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    "builder",
    [lambda: nn.Linear(1, 1), lambda *, width=2: nn.Linear(1, width), lambda *a, **k: None, nn.Identity, dict],
)
def test_anything_that_can_be_called_without_arguments_is_a_builder(builder):
    assert make(model=builder).model is builder


def _zero(outputs, targets):
    return torch.zeros(len(targets))
