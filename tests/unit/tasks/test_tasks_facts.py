import math

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fulltilt.tasks import TASKS, read_data_facts


class Images(Dataset):
    n_classes = 10
    sample_shape = (3, 32, 32)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise AssertionError("facts are told by the attributes; no sample needs loading")


class Sensors(Dataset):
    n_sensors, n_labels, geometry = 5, 6, torch.zeros(3, 5)
    sample_shape = (2, 5)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.zeros(2, 5), torch.zeros(6)


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("a stream may not rewind")


@pytest.mark.parametrize("dataset", [Images(), Subset(Subset(Images(), [0, 1]), [0])], ids=["whole", "subset"])
def test_attributes_of_an_image_dataset(dataset):
    shape = {"in_channels": 3, "image_size": 32, "n_features": 3072}
    assert read_data_facts(dataset) == {"n_classes": 10, "n_outputs": 10, **shape}


def test_sensors_tell_their_geometry():
    facts = read_data_facts(Sensors())
    assert facts["geometry"].shape == (3, 5)
    assert (facts["n_sensors"], facts["n_labels"], facts["n_outputs"], facts["n_features"]) == (5, 6, 6, 10)
    assert "in_channels" not in facts


@pytest.mark.parametrize(
    ("dataset", "facts"),
    [
        (TensorDataset(torch.zeros(4, 7), torch.zeros(4, 2)), {"n_features": 7, "n_outputs": 2}),
        (TensorDataset(torch.zeros(4, 7), torch.zeros(4)), {"n_features": 7, "n_outputs": 1}),
        pytest.param(
            TensorDataset(torch.zeros(4, 1, 8, 6), torch.zeros(4)),
            {"n_features": 48, "in_channels": 1, "n_outputs": 1},
            id="an image that is not square has no size",
        ),
        pytest.param(Stream(), {}, id="a stream may not rewind"),
        pytest.param(TensorDataset(torch.zeros(0, 3), torch.zeros(0)), {}, id="empty"),
        *(([sample], {}) for sample in (("text", {"a": 1}), ([[1], [2, 3]], None), "just text", (1, 2, 3))),
    ],
)
def test_other_datasets_are_read_by_their_first_sample(dataset, facts):
    assert read_data_facts(dataset) == facts


@pytest.mark.parametrize(
    ("name", "metric", "targets", "loss"),  # of logits that are all 0
    [
        ("classification", "accuracy", torch.tensor([0, 2]), math.log(3)),
        ("regression", "squared_error", torch.full((2, 3), 2.0), 4.0),
        ("diffusion", "squared_error", torch.full((2, 3), 2.0), 4.0),
    ],
)  # the others need views, an encoder
def test_every_task_takes_the_same_arguments_and_has_a_loss_and_a_metric(name, metric, targets, loss):
    given = {"model": nn.Identity, "train": Images}
    workload = TASKS[name](**given, validation=Images, loss=None, optimizer=torch.optim.SGD, name="named")
    assert (workload.validation, workload.name, workload.optimizer) == (Images, "named", torch.optim.SGD)
    assert workload.loss(torch.zeros(2, 3), targets).item() == pytest.approx(loss)
    assert list(workload.metrics) == [metric]
    own = nn.L1Loss()
    assert TASKS[name](**given, loss=own).loss is own
