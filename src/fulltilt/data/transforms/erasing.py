"""Image transforms that take a part of each image away.

Legend of shape suffixes: B batch, C channels, H height, W width, D draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fulltilt.data.transforms.steps import Step
from fulltilt.data.transforms.windows import WINDOW_DRAWS, draw_index, draw_windows


@dataclasses.dataclass(frozen=True)
class Cutout(Step):
    """Zeros in one square per image, centred anywhere in it, so that the square may be cut by the border.

    Source: DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, 2017.
    """

    size: int
    n_draws = 2

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        tops_B = draw_index(u_BD[:, 0], height) - self.size // 2
        lefts_B = draw_index(u_BD[:, 1], width) - self.size // 2
        return x_BCHW.masked_fill(mark_boxes(x_BCHW, tops_B, lefts_B, self.size, self.size), 0)


@dataclasses.dataclass(frozen=True)
class RandomErasing(Step):
    """A window of random area and aspect ratio filled with one value, on a random share of the images.

    The value is in the images' own range: behind ``normalize`` 0 is the mean, before it black.

    Source: Zhong et al., Random Erasing Data Augmentation, 2017; windows as torchvision draws them.
    """

    probability: float
    scale: Sequence[float]
    ratio: Sequence[float]
    value: float
    n_draws = WINDOW_DRAWS + 1

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        # The ratio there is height over width, the other way round than for crops.
        bounds = (1 / self.ratio[1], 1 / self.ratio[0])
        windows = draw_windows(u_BD[:, 1:], *x_BCHW.shape[-2:], self.scale, bounds, smaller=True)
        chosen_B = (u_BD[:, 0] < self.probability) & windows.found
        boxes = mark_boxes(x_BCHW, *windows.edges) & chosen_B[:, None, None, None]
        return x_BCHW.masked_fill(boxes, self.value)


def mark_boxes(x_BCHW: Tensor, tops_B: Tensor, lefts_B: Tensor, heights: Tensor | int, widths: Tensor | int) -> Tensor:
    """(B, 1, H, W), true inside the box of each image; what lies outside of the image is cut."""
    in_rows_BH = _mark_stretch(x_BCHW.shape[-2], tops_B, heights)
    in_columns_BW = _mark_stretch(x_BCHW.shape[-1], lefts_B, widths)
    return in_rows_BH[:, None, :, None] & in_columns_BW[:, None, None, :]


def _mark_stretch(length: int, starts_B: Tensor, sizes: Tensor | int) -> Tensor:
    places = torch.arange(length, device=starts_B.device)
    ends_B = starts_B + sizes
    return (places >= starts_B[:, None]) & (places < ends_B[:, None])
