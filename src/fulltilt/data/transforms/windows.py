"""Draw a random window for each image of a batch, without synchronising with the device."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_N_TRIES = 10  # for a window that fits; torchvision's number
WINDOW_DRAWS = 2 * _N_TRIES + 2  # numbers from [0, 1) that ``draw_windows`` takes for each image


class Windows(NamedTuple):
    """Holds one window for each image.

    ``edges`` are top, left, height and width in pixels, (B,) int64; ``found`` is false for the fallback.
    """

    edges: tuple[Tensor, Tensor, Tensor, Tensor]
    found: Tensor


def draw_index(u_B: Tensor, n_values: int | Tensor) -> Tensor:
    """Turn numbers u (B,) from [0, 1) into int64 indices from 0 to n_values − 1. u · n stays below n in float32."""
    return (u_B * n_values).long()


def draw_windows(
    u_BD: Tensor, height: int, width: int, scale: Sequence[float], ratio: Sequence[float], *, smaller: bool = False
) -> Windows:
    """Take the first of ten random windows that fits; else the largest centred one inside the ratio bounds.

    Windows have an area share from ``scale`` and a width over height from ``ratio``.

    Args:
        u_BD: ``WINDOW_DRAWS`` numbers from [0, 1) an image.
        smaller: Only windows smaller than the image each way count.

    Source: He et al. and Szegedy et al. as torchvision's RandomResizedCrop and RandomErasing have it.
    """
    areas_BT = height * width * (scale[0] + u_BD[:, :_N_TRIES] * (scale[1] - scale[0]))
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratios_BT = torch.exp(low + u_BD[:, _N_TRIES : 2 * _N_TRIES] * (high - low))
    widths_BT, heights_BT = (areas_BT * ratios_BT).sqrt().round(), (areas_BT / ratios_BT).sqrt().round()
    most_h, most_w = (height - 1, width - 1) if smaller else (height, width)
    fits_BT = (widths_BT > 0) & (widths_BT <= most_w) & (heights_BT > 0) & (heights_BT <= most_h)
    first_B1 = fits_BT.to(torch.uint8).argmax(1, keepdim=True)
    found_B = fits_BT.any(1)
    widths_B = widths_BT.gather(1, first_B1)[:, 0].long()
    heights_B = heights_BT.gather(1, first_B1)[:, 0].long()
    tops_B = draw_index(u_BD[:, -2], height - heights_B + 1)
    lefts_B = draw_index(u_BD[:, -1], width - widths_B + 1)
    wide = min(width, max(1, round(height * ratio[1])))
    high_ = min(height, max(1, round(width / ratio[0])))
    edges = (
        torch.where(found_B, tops_B, (height - high_) // 2),
        torch.where(found_B, lefts_B, (width - wide) // 2),
        torch.where(found_B, heights_B, high_),
        torch.where(found_B, widths_B, wide),
    )
    return Windows(edges, found_B)


def mark_boxes(x_BCHW: Tensor, tops_B: Tensor, lefts_B: Tensor, heights: Tensor | int, widths: Tensor | int) -> Tensor:
    """Return a mask (B, 1, H, W), true inside each image's box; boxes may cross the border."""
    in_rows_BH = _mark_stretch(x_BCHW.shape[-2], tops_B, heights)
    in_columns_BW = _mark_stretch(x_BCHW.shape[-1], lefts_B, widths)
    return in_rows_BH[:, None, :, None] & in_columns_BW[:, None, None, :]


def _mark_stretch(length: int, starts_B: Tensor, sizes: Tensor | int) -> Tensor:
    places = torch.arange(length, device=starts_B.device)
    ends_B = starts_B + sizes
    return (places >= starts_B[:, None]) & (places < ends_B[:, None])
