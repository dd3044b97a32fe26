"""Residual networks (He et al. 2015, arXiv 1512.03385), with the stride of a bottleneck in its 3×3 convolution.

Parameters carry torchvision's names, so state dicts load both ways.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional

SMALL_IMAGE_PX = 64  # up to here the stem keeps the resolution: a stride of 4 would leave 2×2 of a CIFAR image


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and the shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _build_shortcut(in_channels, channels, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = functional.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.bn2(self.conv2(y_BCHW))
        return functional.relu(y_BCHW + (x_BCHW if self.downsample is None else self.downsample(x_BCHW)))


class Bottleneck(nn.Module):
    """Convolutions of 1×1, 3×3 and 1×1, and the shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _build_shortcut(in_channels, out_channels, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = functional.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = functional.relu(self.bn2(self.conv2(y_BCHW)))
        y_BCHW = self.bn3(self.conv3(y_BCHW))
        return functional.relu(y_BCHW + (x_BCHW if self.downsample is None else self.downsample(x_BCHW)))


_Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A stem, four groups of blocks, global average, one linear layer."""

    def __init__(
        self,
        block: _Block,
        n_blocks: tuple[int, int, int, int],
        n_classes: int,
        in_channels: int,
        small_images: bool,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(in_channels, 64, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _build_layer(block, 64, 64, n_blocks[0], stride=1)
        self.layer2 = _build_layer(block, 64 * block.expansion, 128, n_blocks[1], stride=2)
        self.layer3 = _build_layer(block, 128 * block.expansion, 256, n_blocks[2], stride=2)
        self.layer4 = _build_layer(block, 256 * block.expansion, 512, n_blocks[3], stride=2)
        self.fc = nn.Linear(512 * block.expansion, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.pool(functional.relu(self.bn1(self.conv1(x_BCHW))))
        x_BCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_BCHW))))
        return self.fc(x_BCHW.mean(dim=(2, 3)))


def _build_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
    )


def _build_layer(block: _Block, in_channels: int, channels: int, n_blocks: int, *, stride: int) -> nn.Sequential:
    first = block(in_channels, channels, stride)
    rest = (block(channels * block.expansion, channels, 1) for _ in range(n_blocks - 1))
    return nn.Sequential(first, *rest)


def _define(name: str, block: _Block, n_blocks: tuple[int, int, int, int]) -> Callable[..., ResNet]:
    def build(
        *,
        n_classes: Annotated[int, Ge(1)] = 1000,
        in_channels: Annotated[int, Ge(1)] = 3,
        image_size: Annotated[int, Ge(1)] | None = None,
        small_images: bool | None = None,
    ) -> ResNet:
        """Build the network; ``small_images`` takes a 3×3 stem without stride, by default as ``image_size`` says."""
        small = small_images if small_images is not None else image_size is not None and image_size <= SMALL_IMAGE_PX
        return ResNet(block, n_blocks, n_classes, in_channels, small)

    build.__name__ = build.__qualname__ = name
    return build


resnet18 = _define("resnet18", BasicBlock, (2, 2, 2, 2))
resnet34 = _define("resnet34", BasicBlock, (3, 4, 6, 3))
resnet50 = _define("resnet50", Bottleneck, (3, 4, 6, 3))
resnet101 = _define("resnet101", Bottleneck, (3, 4, 23, 3))
resnet152 = _define("resnet152", Bottleneck, (3, 8, 36, 3))
