import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fulltilt
from fulltilt.errors import UsageError
from fulltilt.tasks import Workload


def build_model():
    return nn.Linear(4, 2)


def build_dataset():
    return TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))


def make(**changes):
    return Workload(**({"model": build_model, "dataset": build_dataset, "loss": nn.CrossEntropyLoss()} | changes))


def test_the_public_name_is_this_class():
    assert fulltilt.Workload is Workload


def test_it_travels_by_pickle():
    copy = pickle.loads(pickle.dumps(make(metrics={"zero": _zero})))
    assert copy.dataset()[0][0].shape == (4,)
    assert copy.metrics == {"zero": _zero}


def test_metrics_are_a_copy_of_the_callers_mapping():
    given = {"zero": _zero}
    workload = make(metrics=given)
    given.clear()
    assert list(workload.metrics) == ["zero"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", nn.Linear(4, 2), ["object of Linear", "model=lambda: Linear"]),
        ("model", 3, ["model is 3 (int)", "without arguments"]),
        ("model", nn.Linear, ["in_features, out_features", "model=lambda: Linear(in_features=…)"]),
        ("dataset", build_dataset(), ["object of TensorDataset", "dataset=lambda: TensorDataset"]),
        ("dataset", lambda root: None, ["needs root"]),
        ("validation", build_dataset(), ["validation is an object of TensorDataset"]),
        ("loss", nn.CrossEntropyLoss, ["the class CrossEntropyLoss", "loss=CrossEntropyLoss()"]),
        ("loss", "mse", ["loss is 'mse' (str)"]),
        (
            "optimizer",
            torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1),
            ["object of SGD", "lambda parameters: SGD"],
        ),
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
    for word in words:
        assert word in str(raised.value)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(UsageError) as raised:
        make(loss="x" * 5000)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "builder",
    [lambda: nn.Linear(1, 1), lambda *, width=2: nn.Linear(1, width), lambda *a, **k: None, nn.Identity, dict],
)
def test_anything_that_can_be_called_without_arguments_is_a_builder(builder):
    assert make(model=builder).model is builder


def _zero(outputs, targets):
    return torch.zeros(len(targets))
