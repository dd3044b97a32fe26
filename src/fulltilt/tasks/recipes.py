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


def build_classification(
    *,
    model: Callable[[], nn.Module],
    train: Callable[[], Dataset],
    validation: Callable[[], Dataset] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    name: str = "classification",
    metrics: Sequence[str] = ("accuracy",),
) -> Workload:
    """One class per sample: logits (B, n_classes) against indices (B,); cross entropy unless told otherwise."""
    return Workload(
        model=model,
        dataset=train,
        validation=validation,
        loss=loss or cross_entropy(),
        optimizer=optimizer,
        metrics=pick_metrics(metrics),
        name=name,
    )


def build_regression(
    *,
    model: Callable[[], nn.Module],
    train: Callable[[], Dataset],
    validation: Callable[[], Dataset] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    name: str = "regression",
    metrics: Sequence[str] = ("squared_error",),
) -> Workload:
    """Real numbers per sample: outputs (B, n_outputs) against targets of as many elements; mse by default."""
    return Workload(
        model=model,
        dataset=train,
        validation=validation,
        loss=loss or mse(),
        optimizer=optimizer,
        metrics=pick_metrics(metrics),
        name=name,
    )


def pick_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Metrics by name, in the order given.

    Raises:
        UsageError: a name that ``METRICS`` does not have.
    """
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if name not in METRICS:
            raise UsageError(f"metrics: there is no metric {name!r}; {format_nearest(str(name), METRICS)}")
    return {name: METRICS[name] for name in listed}
