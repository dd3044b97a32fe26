"""A small network for short trainings on small images; its first layer whitens patches of the data, untrained.

After Jordan 2024, arXiv 2404.00498: whitening (also Page 2018, "How to train your ResNet"), convolutions that start
close to the identity, a scaled head.

Shapes: B batch, C channels, H height, W width, K classes, P values of a patch, N patches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn import functional

PATCH_PX = 2
N_IMAGES = 1_000  # drawn for the covariance of patches: 961,000 patches of a 32×32 image for at most 12 × 12 numbers
EPSILON = 5e-4  # of the eigenvalues: directions that hardly occur are not blown up
HEAD_SCALE = 1 / 9
GROUP_WIDTHS = (64, 256, 256)


class Group(nn.Module):
    """3×3, halving by maximum, BN, GELU, 3×3, BN, GELU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = _build_conv(in_channels, out_channels)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _build_conv(out_channels, out_channels)
        self.norm2 = nn.BatchNorm2d(out_channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = functional.max_pool2d(self.conv1(x_BCHW), 2)
        x_BCHW = functional.gelu(self.norm1(x_BCHW))
        return functional.gelu(self.norm2(self.conv2(x_BCHW)))


class WhitenedCNN(nn.Module):
    """A network of 1.97 M parameters at width 1, for images of at least 9×9.

    Args:
        width: Scales the widths of the three groups (64, 256, 256).
        draw_images: Draws n training images (B, C, H, W), as the model will get them; without it the first layer is
            trained.
    """

    def __init__(
        self,
        *,
        n_classes: Annotated[int, Ge(1)] = 10,
        in_channels: Annotated[int, Ge(1)] = 3,
        width: Annotated[float, Gt(0)] = 1.0,
        draw_images: Callable[[int], Tensor] | None = None,
    ) -> None:
        super().__init__()
        widths = [max(1, round(width * group)) for group in GROUP_WIDTHS]
        images_BCHW = None if draw_images is None else draw_images(N_IMAGES)
        n_filters = 2 * in_channels * PATCH_PX**2
        self.whiten = nn.Conv2d(in_channels, n_filters, PATCH_PX)
        if images_BCHW is not None:
            with torch.no_grad():
                self.whiten.weight.copy_(compute_whitening(images_BCHW, PATCH_PX))
            self.whiten.weight.requires_grad_(False)
        self.groups = nn.Sequential(*map(Group, (n_filters, *widths[:-1]), widths))
        self.head = nn.Linear(widths[-1], n_classes, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.groups(functional.gelu(self.whiten(x_BCHW)))
        return HEAD_SCALE * self.head(x_BCHW.amax(dim=(2, 3)))


def compute_whitening(images_BCHW: Tensor, patch_px: int) -> Tensor:
    """Return filters (2 P, C, patch, patch) whose outputs on patches of ``images`` are uncorrelated and of variance 1.

    They are the eigenvectors of the patches' covariance over the roots of their eigenvalues, and the same negated, so
    that a GELU behind them loses neither sign.
    """
    n_channels = images_BCHW.shape[1]
    patches_BPN = functional.unfold(images_BCHW.to(torch.float64), patch_px)
    patches_NP = patches_BPN.transpose(1, 2).flatten(0, 1)
    values_P, vectors_PP = torch.linalg.eigh(torch.cov(patches_NP.T))
    filters_PP = (vectors_PP / (values_P + EPSILON).sqrt()).T
    filters = filters_PP.view(-1, n_channels, patch_px, patch_px)
    return torch.cat((filters, -filters)).to(images_BCHW.dtype)


def _build_conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    """3×3; the first ``in_channels`` outputs start as copies of the inputs, the others at random."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    n_copied = min(in_channels, out_channels)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:n_copied])
    return conv
