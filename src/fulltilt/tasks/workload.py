"""``Workload``: what is trained, as one object that can be built again and again."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained. Every trial is a process of its own and starts from what these functions build.

    Args:
        model: ``() -> nn.Module``, on the CPU, freshly initialised.
        dataset: ``() -> Dataset`` of ``(inputs, targets)``, map-style or iterable.
        loss: ``(outputs, targets) -> scalar``, the mean over the samples of the batch. A mean is what makes
            accumulated micro-batches add up to the large batch.
        optimizer: ``(parameters) -> Optimizer``; AdamW with its defaults when ``None``.
        validation: ``() -> Dataset`` for evaluation; no evaluation when ``None``.
        metrics: name → ``(outputs, targets) -> (B,)``, one value per sample, left on the device.
        prepare: ``(batch, generator) -> (inputs, targets)``, run on the device for every micro-batch;
            ``generator`` is on that device and is the only source of randomness it may use. A tuple of inputs
            is unpacked: ``model(*inputs)``.
        collate: What joins samples to a batch; tensors are stacked when ``None``.
        derive: Means of the loss and the metrics → figures that follow from them (a perplexity from a loss).
        assess: ``(model, device) -> name → figure``, at the end of every evaluation, in evaluation mode and without
            gradients: what is no mean over the validation set (the accuracy of neighbours in feature space).
        explain: ``(batch_size, accumulate) -> notes``, told at the start: what a batch means to this loss.
        couples_samples: The loss compares the samples of a batch with each other, so that micro-batches do not add up
            to the large batch; a window is then computed as one batch (``engine.cached_step``): its outputs, and its
            targets, are those of the micro-batches one after the other.
        compares_samples: The loss compares the samples of a micro-batch with each other: several devices, each of which
            would see its part only, are refused. ``couples_samples`` says so too.
        training_metrics: ``train`` computes the metrics on training batches too.
        name: How tables, files and messages call it.

    Shape:
        - batch: what ``collate`` returns; ``(inputs, targets)`` with the batch as first dimension B of each tensor.
        - outputs: what the model returns for it, first dimension B.

    Raises:
        UsageError: something that is not callable where a function is needed, or an object where the
            function that builds it is needed.
    """

    model: Callable[[], nn.Module]
    dataset: Callable[[], Dataset]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], Optimizer] | None = None
    validation: Callable[[], Dataset] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Tensor]] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Any, Generator], tuple[Any, Any]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None
    assess: Callable[[nn.Module, torch.device], Mapping[str, float]] | None = None
    explain: Callable[[int, int], Sequence[str]] | None = None
    couples_samples: bool = False
    compares_samples: bool = False
    training_metrics: bool = False
    name: str = "workload"

    def __post_init__(self) -> None:
        _check_builder("model", self.model, nn.Module)
        _check_builder("dataset", self.dataset, Dataset)
        if self.validation is not None:
            _check_builder("validation", self.validation, Dataset)
        _check_loss(self.loss)
        _check_optimizer(self.optimizer)
        _check_callable("prepare", self.prepare, "a function (batch, generator) -> (inputs, targets), or None")
        _check_callable("collate", self.collate, "a function that joins a list of samples, or None")
        _check_callable("derive", self.derive, "a function (means) -> figures by name, or None")
        _check_callable("assess", self.assess, "a function (model, device) -> figures by name, or None")
        _check_callable("explain", self.explain, "a function (batch_size, accumulate) -> notes, or None")
        if not isinstance(self.name, str) or not self.name.strip():
            raise UsageError(f"Workload name is {self.name!r}; give a text that tables and folders can show")
        object.__setattr__(self, "metrics", _check_metrics(self.metrics))


def _check_builder(field: str, value: Any, product: type) -> None:
    if isinstance(value, product):
        raise UsageError(
            f"Workload {field} is an object of {type(value).__name__}; give the function that builds it, because "
            f"every trial starts from a fresh one: {field}=lambda: {type(value).__name__}(…)"
        )
    if not callable(value):
        raise UsageError(f"Workload {field} is {_describe(value)}; give a function without arguments that builds it")
    missing = _find_required_arguments(value)
    if missing:
        raise UsageError(
            f"Workload {field} is called without arguments, but {_name(value)} needs {', '.join(missing)}; "
            f"bind them: {field}=lambda: {_name(value)}({missing[0]}=…)"
        )


def _check_loss(value: Any) -> None:
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise UsageError(f"Workload loss is the class {value.__name__}; give an object of it: loss={value.__name__}()")
    if not callable(value):
        raise UsageError(f"Workload loss is {_describe(value)}; give a function (outputs, targets) -> scalar tensor")


def _check_optimizer(value: Any) -> None:
    if isinstance(value, Optimizer):
        kind = type(value).__name__
        raise UsageError(
            f"Workload optimizer is an object of {kind} and holds the parameters of one model; give the function "
            f"that builds it: optimizer=lambda parameters: {kind}(parameters, lr=…)"
        )
    _check_callable("optimizer", value, "a function (parameters) -> Optimizer, or None for AdamW")


def _check_callable(field: str, value: Any, expected: str) -> None:
    if value is not None and not callable(value):
        raise UsageError(f"Workload {field} is {_describe(value)}; give {expected}")


def _check_metrics(metrics: Any) -> dict[str, Callable[[Any, Any], Tensor]]:
    if not isinstance(metrics, Mapping):
        raise UsageError(f'Workload metrics is {_describe(metrics)}; give a mapping: metrics={{"accuracy": accuracy}}')
    for name, metric in metrics.items():
        if not isinstance(name, str) or not callable(metric) or isinstance(metric, type):
            raise UsageError(
                f"Workload metrics has {name!r}: {_describe(metric)}; each is a name and a function "
                "(outputs, targets) -> one value per sample, shape (B,)"
            )
    return dict(metrics)


def _find_required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in without a readable signature: the call itself will tell
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"
