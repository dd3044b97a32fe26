"""A small convolutional network and a multilayer perceptron, for data that fits them.

Shapes: B batch, C channels, H height, W width, F features, K outputs.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three 3×3 convolutions (strides 1, 2, 2) with batch norm, global average, one linear layer.

    It has 93 k parameters at width 32 and takes any image of at least 1×1.
    """

    def __init__(
        self,
        *,
        n_classes: Annotated[int, Ge(1)] = 10,
        in_channels: Annotated[int, Ge(1)] = 1,
        width: Annotated[int, Ge(1)] = 32,
    ) -> None:
        super().__init__()
        widths = (in_channels, width, 2 * width, 4 * width)
        self.blocks = nn.Sequential(*map(_build_conv_block, widths[:-1], widths[1:], (1, 2, 2)))
        self.head = nn.Linear(widths[-1], n_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(self.blocks(x_BCHW).mean(dim=(2, 3)))


class MLP(nn.Module):
    """``depth`` linear layers of ``hidden`` units with ReLU, over the flattened sample; depth 0 is a linear model."""

    def __init__(
        self,
        *,
        n_features: Annotated[int, Ge(1)],
        n_outputs: Annotated[int, Ge(1)],
        hidden: Annotated[int, Ge(1)] = 256,
        depth: Annotated[int, Ge(0)] = 2,
        dropout: Annotated[float, Ge(0.0), Lt(1.0)] = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for i in range(depth):
            layers += [nn.Linear(hidden if i else n_features, hidden), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(hidden if depth else n_features, n_outputs)

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.head(self.layers(x_BF))


def _build_conv_block(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
