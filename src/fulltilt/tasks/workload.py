"""``Workload``: functions that build what is trained, again and again."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.config.model import MAX_NAME_BYTES
from fulltilt.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Holds the functions that build what is trained; every trial is a process of its own and starts from them.

    Args:
        model: ``() -> nn.Module``, on the CPU, freshly initialised.
        dataset: ``() -> Dataset`` of ``(inputs, targets)``, map-style or iterable.
        loss: ``(outputs, targets) -> scalar``, the mean over the batch: so micro-batches add up to the large batch.
        optimizer: ``(parameters) -> Optimizer``; AdamW with its defaults when ``None``.
        validation: ``() -> Dataset`` for evaluation; no evaluation when ``None``.
        metrics: name → ``(outputs, targets) -> (B,)``, one value per sample, left on the device.
        prepare: ``(batch, generator) -> (inputs, targets)``, run on the device for every micro-batch; it may draw
            from ``generator`` only, which is on that device. A tuple of inputs is unpacked: ``model(*inputs)``.
        collate: What joins samples to a batch; tensors are stacked when ``None``.
        derive: Means of the loss and the metrics → figures that follow from them (a perplexity from a loss).
        assess: ``(model, device) -> name → figure``, at the end of every evaluation, in evaluation mode and without
            gradients: figures that are no mean over the validation set (the accuracy of nearest neighbours). One with
            an attribute ``batch_size`` gets ``data.val_batch_size`` where that is less, as where memory ran out.
        explain: ``(batch_size, accumulate) -> notes``, told at the start: what a batch means to this loss.
        couples_samples: The loss compares the samples of a batch with each other, so a window is computed as one batch
            (``engine/step/cached_step.py``): outputs and targets are those of its micro-batches one after the other.
        compares_samples: The loss compares the samples of a micro-batch with each other, so several devices, each of
            which would see its part only, are refused. ``couples_samples`` implies it.
        training_metrics: ``train`` computes the metrics on training batches too.
        name: How tables, files and messages call it.

    Shape: the batch is the first dimension B of inputs, targets and outputs.

    Raises:
        UsageError: a field is no function, one that takes other arguments, or an object where the function that builds
            it is needed; a name cannot be shown.
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
        for field, product in {"model": nn.Module, "dataset": Dataset, "validation": Dataset}.items():
            if field != "validation" or self.validation is not None:
                _check_builder(field, getattr(self, field), product)
        if isinstance(self.loss, type):
            kind = self.loss.__name__
            raise UsageError(f"Workload loss is the class {kind}; give an object of it: loss={kind}()")
        if isinstance(self.optimizer, Optimizer):
            kind = type(self.optimizer).__name__
            raise UsageError(
                f"Workload optimizer is an object of {kind} and holds the parameters of one model; give the function "
                f"that builds it: optimizer=lambda parameters: {kind}(parameters, lr=…)"
            )
        for field, expected in _FUNCTIONS.items():
            value = getattr(self, field)
            if not callable(value) and (value is not None or field == "loss"):
                raise UsageError(f"Workload {field} is {_describe(value)}; give a function {expected}")
            if value is not None:
                _check_arguments(field, value, expected)
        name = self.name
        if not isinstance(name, str) or not (
            name.strip() and name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
        ):
            raise UsageError(
                f"Workload name is {_describe(name)}; give a short text that tables and folders can show in a line"
            )
        object.__setattr__(self, "metrics", _check_metrics(self.metrics))


_FUNCTIONS = {
    "loss": "(outputs, targets) -> scalar tensor",
    "optimizer": "(parameters) -> Optimizer, or None for AdamW",
    "prepare": "(batch, generator) -> (inputs, targets), or None",
    "collate": "(samples) -> batch, or None",
    "derive": "(means) -> figures by name, or None",
    "assess": "(model, device) -> figures by name, or None",
    "explain": "(batch_size, accumulate) -> notes, or None",
}


def _check_builder(field: str, value: Any, product: type) -> None:
    if isinstance(value, product):
        raise UsageError(
            f"Workload {field} is an object of {type(value).__name__}; give the function that builds it, because "
            f"every trial starts from a fresh one: {field}=lambda: {type(value).__name__}(…)"
        )
    if not callable(value):
        raise UsageError(f"Workload {field} is {_describe(value)}; give a function without arguments that builds it")
    try:
        inspect.signature(value, follow_wrapped=False).bind()
    except ValueError:  # a built-in without a readable signature: the call itself will tell
        pass
    except TypeError as error:
        name = getattr(value, "__name__", type(value).__name__)
        raise UsageError(
            f"Workload {field} is called without arguments, and that fails ({error}); "
            f"bind them: {field}=lambda: {name}(…)"
        ) from None


def _check_arguments(field: str, value: Any, expected: str) -> None:
    """Refuse a function that cannot be called with the arguments that ``expected`` begins with."""
    names = re.findall(r"\w+", expected.partition(")")[0])
    try:
        inspect.signature(value, follow_wrapped=False).bind(*names)
    except ValueError:  # as in ``_check_builder``
        pass
    except TypeError as error:
        call = ", ".join(names)
        raise UsageError(
            f"Workload {field} is called with ({call}), and that fails ({error}); give a function {expected}"
        ) from None


def _check_metrics(metrics: Any) -> dict[str, Callable[[Any, Any], Tensor]]:
    if not isinstance(metrics, Mapping):
        raise UsageError(f'Workload metrics is {_describe(metrics)}; give a mapping: metrics={{"accuracy": accuracy}}')
    for name, metric in metrics.items():
        if not isinstance(name, str) or not callable(metric) or isinstance(metric, type):
            raise UsageError(
                f"Workload metrics has {name!r}: {_describe(metric)}; each is a name and a function "
                "(outputs, targets) -> one value per sample, shape (B,)"
            )
        _check_arguments(f"metrics {name}", metric, "(outputs, targets) -> (B,)")
        if name == "loss" or not name.isprintable():
            why = "is the name of the loss itself" if name == "loss" else "cannot be shown in a line"
            raise UsageError(f"Workload metrics has {name!r}, which {why}; give that metric another name")
    return dict(metrics)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"
