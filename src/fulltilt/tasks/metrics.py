"""Metrics by name: ``(outputs, targets) -> (B,)`` float32, on the device, without a sync.

One value per sample makes a mean over unequal batches exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from fulltilt.tasks.losses import match_shape

Metric = Callable[[Tensor, Tensor], Tensor]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give 1 where the largest logit is the target's, else 0.

    Shape:
        outputs (B, n_classes, …), targets (B, …) indices or (B, n_classes, …) probabilities; further
        dimensions (pixels, tokens) are averaged per sample.
    """
    return _average((outputs.argmax(dim=1) == _class_indices(outputs, targets)).float())


def top5(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give 1 where the target is among the five largest logits (all of them when there are fewer).

    Shape:
        outputs (B, n_classes), targets (B,) indices or (B, n_classes) probabilities.
    """
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    return (best == _class_indices(outputs, targets).unsqueeze(1)).any(dim=1).float()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Average the squared error over the elements of each sample."""
    return _average((outputs - match_shape(outputs, targets)).float().square())


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Average the absolute error over the elements of each sample."""
    return _average((outputs - match_shape(outputs, targets)).float().abs())


def binary_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give the share of a sample's logits on the side of 0 that its targets (0 or 1) say."""
    return _average(((outputs > 0) == (match_shape(outputs, targets) > 0.5)).float())


def _class_indices(outputs: Tensor, targets: Tensor) -> Tensor:
    return targets.argmax(dim=1) if targets.is_floating_point() and targets.shape == outputs.shape else targets


def _average(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1) if values.dim() > 1 else values


METRICS: Mapping[str, Metric] = MappingProxyType(
    {function.__name__: function for function in (accuracy, top5, squared_error, absolute_error, binary_accuracy)}
)
