"""A small convolutional network and a multilayer perceptron, for data that fits them.

Shapes: B batch, C channels, H height, W width, F features, K outputs.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three 3×3 convolutions (strides 1, 2, 2) with batch norm, global average, one linear layer."""

    def __init__(self, n_classes: int, in_channels: int, width: int) -> None:
        super().__init__()
        widths = (in_channels, width, 2 * width, 4 * width)
        strides = (1, 2, 2)
        self.blocks = nn.Sequential(*map(_build_conv_block, widths[:-1], widths[1:], strides))
        self.head = nn.Linear(widths[-1], n_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        features_BC = self.blocks(x_BCHW).mean(dim=(2, 3))
        return self.head(features_BC)


class MLP(nn.Module):
    """Linear layers with ReLU between them, over the flattened sample."""

    def __init__(self, n_features: int, n_outputs: int, hidden: int, depth: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for i in range(depth):
            layers += [nn.Linear(n_features if i == 0 else hidden, hidden), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(hidden if depth else n_features, n_outputs)

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.head(self.layers(x_BF))


def small_cnn(
    *, n_classes: Annotated[int, Ge(1)] = 10, in_channels: Annotated[int, Ge(1)] = 1, width: Annotated[int, Ge(1)] = 32
) -> SmallCNN:
    """93 k parameters at width 32. Any image of at least 1×1 goes in."""
    return SmallCNN(n_classes, in_channels, width)


def mlp(
    *,
    n_features: Annotated[int, Ge(1)],
    n_outputs: Annotated[int, Ge(1)],
    hidden: Annotated[int, Ge(1)] = 256,
    depth: Annotated[int, Ge(0)] = 2,
    dropout: Annotated[float, Ge(0.0), Lt(1.0)] = 0.0,
) -> MLP:
    """``depth`` hidden layers of ``hidden`` units; depth 0 is a linear model."""
    return MLP(n_features, n_outputs, hidden, depth, dropout)


def _build_conv_block(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
