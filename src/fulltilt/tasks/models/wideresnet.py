"""Wide residual network, pre-activation (Zagoruyko and Komodakis 2016, arXiv 1605.07146).

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.errors import ConfigError


class WideBlock(nn.Module):
    """BN, ReLU, 3×3, BN, ReLU, dropout, 3×3, plus the shortcut.

    Where the width changes, the shortcut is a 1×1 convolution of the pre-activated input.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        changes = stride != 1 or in_channels != out_channels
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False) if changes else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        active_BCHW = functional.relu(self.norm1(x_BCHW))
        carried_BCHW = x_BCHW if self.shortcut is None else self.shortcut(active_BCHW)
        y_BCHW = self.conv1(active_BCHW)
        y_BCHW = self.conv2(self.dropout(functional.relu(self.norm2(y_BCHW))))
        return carried_BCHW + y_BCHW


class WideResNet(nn.Module):
    """A network for images around 32×32: 36.5 M parameters at depth 28 and width 10, 1.5 M at width 2.

    Raises:
        ConfigError: ``depth`` is not 6 n + 4.
    """

    def __init__(
        self,
        *,
        depth: Annotated[int, Ge(10)] = 28,
        width: Annotated[int, Ge(1)] = 10,
        n_classes: Annotated[int, Ge(1)] = 10,
        in_channels: Annotated[int, Ge(1)] = 3,
        dropout: Annotated[float, Ge(0.0), Lt(1.0)] = 0.0,
    ) -> None:
        super().__init__()
        n_blocks, rest = divmod(depth - 4, 6)
        if depth < 10 or rest:
            lower = max(10, depth - rest)
            raise ConfigError(f"wideresnet depth {depth} is not 6 n + 4; try depth {lower} or {lower + 6}")
        self.stem = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        channels = 16
        for group, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for i in range(n_blocks):
                self.blocks.append(WideBlock(channels, group, stride if i == 0 else 1, dropout))
                channels = group
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = functional.relu(self.norm(self.blocks(self.stem(x_BCHW))))
        return self.head(x_BCHW.mean(dim=(2, 3)))
