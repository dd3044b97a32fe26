"""Builders of a Workload for classification and regression: model and data in, loss and metrics by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.errors import UsageError, format_nearest
from fulltilt.tasks.losses import Loss, cross_entropy, mse
from fulltilt.tasks.metrics import METRICS, Metric
from fulltilt.tasks.workload import Workload


def _define(task: str, own_loss: Callable[[], Loss], metric: str, text: str) -> Callable[..., Workload]:
    """Define the builder of a task that differs from others by its loss and metric alone."""

    def build(
        *,
        model: Callable[[], nn.Module],
        train: Callable[[], Dataset],
        validation: Callable[[], Dataset] | None = None,
        loss: Loss | None = None,
        optimizer: Callable[[Any], Optimizer] | None = None,
        name: str = task,
        metrics: Sequence[str] = (metric,),
    ) -> Workload:
        return Workload(
            model=model,
            dataset=train,
            validation=validation,
            loss=loss or own_loss(),
            optimizer=optimizer,
            metrics=pick_metrics(metrics),
            name=name,
        )

    build.__name__ = build.__qualname__ = f"build_{task}"
    build.__doc__ = text
    return build


def pick_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return metrics by name, in the order given.

    Raises:
        UsageError: a name that ``METRICS`` does not have.
    """
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if name not in METRICS:
            raise UsageError(f"metrics: there is no metric {name!r}; {format_nearest(str(name), METRICS)}")
    return {name: METRICS[name] for name in listed}


build_classification = _define(
    "classification",
    cross_entropy,
    "accuracy",
    "Predict one class per sample: logits (B, n_classes) against indices (B,); cross entropy unless told otherwise.",
)
build_regression = _define(
    "regression",
    mse,
    "squared_error",
    "Predict real numbers: outputs (B, n_outputs) against targets of as many elements; mse unless told otherwise.",
)
