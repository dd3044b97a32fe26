"""The linear probe: logistic regression on frozen features, with real labels.

Shapes: N images, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn, optim

from fulltilt.errors import UsageError
from fulltilt.tasks.features import FeatureRows, standardise
from fulltilt.tasks.metrics import accuracy
from fulltilt.tasks.workload import Workload

LR, WEIGHT_DECAY = 0.05, 1e-3
"""Of SGD with Nesterov momentum 0.9, on standardised features: the objective is the mean cross entropy and half the
weight decay times the squared norm of the weights."""


def build_linear_probe(
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    *,
    classes: Sequence[str],
    name: str = "linear probe",
) -> Workload:
    """Build a linear layer over features (N, F) and targets (N,), trained and validated like any other model.

    Raises:
        UsageError: there are no labelled features.
    """
    if not len(train[0]) or not len(validation[0]):
        raise UsageError(
            f"a linear probe needs labelled images, and there are {len(train[0])} for training and "
            f"{len(validation[0])} for validation; give a dataset with labels"
        )
    known, asked = standardise(train[0], validation[0])
    n_classes = len(classes)
    return Workload(
        model=lambda: nn.Linear(known.shape[1], n_classes),
        dataset=lambda: FeatureRows(known, train[1], n_classes),
        validation=lambda: FeatureRows(asked, validation[1], n_classes),
        loss=nn.CrossEntropyLoss(),
        optimizer=build_sgd,
        metrics={"accuracy": accuracy},
        name=name,
    )


def build_sgd(parameters: object) -> optim.Optimizer:
    return optim.SGD(parameters, lr=LR, momentum=0.9, nesterov=True, weight_decay=WEIGHT_DECAY)  # type: ignore[arg-type]
