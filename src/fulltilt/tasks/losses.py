"""Builders of losses by name; each returns ``(outputs, targets) -> scalar``, the mean over the batch."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated

from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.errors import UsageError

Loss = Callable[[Tensor, Tensor], Tensor]


class Elementwise(nn.Module):
    """A loss averaged over all elements: as many of outputs as of targets; (B, 1) meets (B,) without broadcasting."""

    def __init__(self, function: Callable[..., Tensor], **options: float) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, match_shape(outputs, targets), **self.options)


def match_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``targets`` in the shape of ``outputs``, integers as the outputs' dtype. Copies no float, syncs nothing.

    Raises:
        UsageError: the two do not hold the same number of elements per sample.
    """
    if outputs.shape != targets.shape:
        if outputs.shape[:1] != targets.shape[:1] or outputs.numel() != targets.numel():
            raise UsageError(
                f"the model returns {tuple(outputs.shape)} and the targets are {tuple(targets.shape)}; make them "
                "agree: set the model's number of outputs, or use cross_entropy for class indices"
            )
        targets = targets.view_as(outputs) if targets.is_contiguous() else targets.reshape(outputs.shape)
    return targets if targets.is_floating_point() else targets.to(outputs.dtype)


def cross_entropy(*, label_smoothing: Annotated[float, Ge(0.0), Le(1.0)] = 0.0) -> Loss:
    """Compare logits (B, n_classes) with class indices (B,) or class probabilities (B, n_classes)."""
    return nn.CrossEntropyLoss(label_smoothing=label_smoothing)


def mse() -> Loss:
    return Elementwise(functional.mse_loss)


def l1() -> Loss:
    return Elementwise(functional.l1_loss)


def huber(*, delta: Annotated[float, Gt(0.0)] = 1.0) -> Loss:
    return Elementwise(functional.huber_loss, delta=delta)


def bce_with_logits() -> Loss:
    return Elementwise(functional.binary_cross_entropy_with_logits)


LOSSES: Mapping[str, Callable[..., Loss]] = MappingProxyType(
    {function.__name__: function for function in (cross_entropy, mse, l1, huber, bce_with_logits)}
)
