"""Losses by name, and that of contrastive training: ``(outputs, targets) -> scalar``, the mean over the batch."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated

import torch
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


class NtXent(nn.Module):
    """Computes for every view the cross entropy of finding its partner among all other views of the batch.

    Rows 2·i and 2·i + 1 are the views of image i, so that the rows of several batches, one after the other, are the
    rows of their joint batch (R rows of D features).

    Similarity is the cosine over ``temperature``, in float32 also under autocast: bf16 is too coarse for it. The mean
    runs over all 2·B views, both ways round; a batch of one image has no negatives and no gradient.

    Shape:
        outputs (2·B, D), targets are not looked at; returns a scalar.

    Device: does not synchronise. Memory: a few matrices of (2·B)² floats.

    Source: SimCLR, Chen et al. 2020, arXiv 2002.05709, equation 1.
    """

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        if not temperature > 0:
            raise UsageError(f"NT-Xent has temperature {temperature}; it must be above 0, 0.1 to 0.5 are usual")
        self.temperature = temperature

    def forward(self, outputs: Tensor, targets: object = None) -> Tensor:
        n_rows = len(outputs)
        if outputs.dim() != 2 or n_rows % 2:
            raise UsageError(
                f"NT-Xent needs one row a view, the two views of an image one after the other, and got a tensor of "
                f"shape {tuple(outputs.shape)}; take the task contrastive, which makes such batches"
            )
        with torch.autocast(outputs.device.type, enabled=False):
            wide = torch.promote_types(outputs.dtype, torch.float32)
            z_RD = functional.normalize(outputs.to(wide), dim=1)
            logits_RR = (z_RD @ z_RD.T) / self.temperature
            rows_R = torch.arange(n_rows, device=outputs.device)
            logits_RR = logits_RR.masked_fill(rows_R[:, None] == rows_R, float("-inf"))
            return functional.cross_entropy(logits_RR, rows_R ^ 1)


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
