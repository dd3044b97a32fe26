"""RandAugment for whole batches: each image gets operations of its own, without branching on them.

Every batch runs through three stages, and an image whose operation belongs to another stage passes unchanged: one
affine sampling with a matrix per image; one lookup table of 256 levels per image and channel; one blend of the image
with its gray or its smoothed copy.

Legend of shape suffixes: B batch, C channels, H height, W width, L brightness levels.

Source: Cubuk et al., RandAugment: Practical automated data augmentation with a reduced search space, 2019; operations,
ranges and borders as torchvision's RandAugment has them.
"""

import dataclasses
import math
from typing import Annotated

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.nn import functional

from fulltilt.data.transforms.colors import like, to_gray, to_unit_float
from fulltilt.data.transforms.steps import Step
from fulltilt.data.transforms.windows import draw_index

OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
N_BINS = 31  # magnitudes are 0 … 30
_MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")


@dataclasses.dataclass(frozen=True)
class RandAugment(Step):
    """Apply ``n_ops`` random operations to each image of 1 or 3 channels, at one ``magnitude`` from 0 to 30."""

    n_ops: Annotated[int, Ge(1)] = 2
    magnitude: Annotated[int, Ge(0), Lt(N_BINS)] = 9

    @property
    def n_draws(self) -> int:  # type: ignore[override]
        return 2 * self.n_ops

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        x = like(to_unit_float(x_BCHW), torch.empty(0, dtype=torch.uint8))  # the operations are about 256 levels
        for i in range(self.n_ops):
            operations_B = draw_index(u_BD[:, 2 * i], len(OPERATIONS))
            signs_B = torch.where(u_BD[:, 2 * i + 1] < 0.5, -1.0, 1.0)
            x = apply_operations(x, operations_B, signs_B, self.magnitude)
        return x if x_BCHW.dtype == torch.uint8 else to_unit_float(x)


def apply_operations(x_BCHW: Tensor, operations_B: Tensor, signs_B: Tensor, magnitude: int) -> Tensor:
    """Apply one operation to each uint8 image.

    Args:
        operations_B: Indices into ``OPERATIONS``.
        signs_B: −1 or 1, the direction of operations that have two.
    """
    share = magnitude / (N_BINS - 1)
    chosen = {name: operations_B == place for place, name in enumerate(OPERATIONS)}
    moves_B = torch.stack([chosen[name] for name in _MOVES]).any(0)
    moved = torch.where(moves_B[:, None, None, None], _move(x_BCHW, chosen, signs_B, share), x_BCHW)
    tables_BCL = _build_tables(moved, chosen, signs_B, magnitude)
    mapped = tables_BCL.gather(2, moved.flatten(2).long()).view_as(moved)
    return _blend_neighbours(mapped, chosen, 1 + 0.9 * share * signs_B)


def _move(x_BCHW: Tensor, chosen: dict[str, Tensor], signs_B: Tensor, share: float) -> Tensor:
    """Shear, translate and rotate by the nearest pixel, with zeros outside."""
    n, _, height, width = x_BCHW.shape
    zeros_B, ones_B = torch.zeros_like(signs_B), torch.ones_like(signs_B)

    def of(name: str, amounts_B: Tensor) -> Tensor:
        return torch.where(chosen[name], amounts_B, zeros_B)

    shear_x, shear_y = of("shear_x", 0.3 * share * signs_B), of("shear_y", 0.3 * share * signs_B)
    shift_x = of("translate_x", torch.trunc(150.0 / 331.0 * width * share * signs_B))
    shift_y = of("translate_y", torch.trunc(150.0 / 331.0 * height * share * signs_B))
    turn = of("rotate", math.radians(30.0) * share * signs_B)
    # Where each pixel comes from, in pixels from the centre. A shear keeps the upper left corner, as Pillow's does.
    is_turned = chosen["rotate"]
    a = torch.where(is_turned, turn.cos(), ones_B)
    b = torch.where(is_turned, -turn.sin(), shear_x)
    c = torch.where(is_turned, turn.sin(), shear_y)
    d = torch.where(is_turned, turn.cos(), ones_B)
    across = shear_x * height / 2 - shift_x
    down = shear_y * width / 2 - shift_y
    rows = torch.stack(
        [a, b * height / width, across * 2 / width, c * width / height, d, down * 2 / height], dim=1
    ).view(n, 2, 3)
    grid_BHW2 = functional.affine_grid(rows, [n, 1, height, width], align_corners=False)
    moved = functional.grid_sample(x_BCHW.float(), grid_BHW2, mode="nearest", align_corners=False)
    return moved.to(torch.uint8)


def _build_tables(x_BCHW: Tensor, chosen: dict[str, Tensor], signs_B: Tensor, magnitude: int) -> Tensor:
    """Build the lookup tables (B, C, 256) uint8 that map each level to a new one."""
    share = magnitude / (N_BINS - 1)
    device = x_BCHW.device
    n, n_channels = x_BCHW.shape[:2]
    levels_L = torch.arange(256, device=device, dtype=torch.float32)
    factors_B11 = (1 + 0.9 * share * signs_B)[:, None, None]
    gray_B11 = (to_gray(x_BCHW.float()).floor() if n_channels == 3 else x_BCHW.float()).mean((1, 2, 3))[:, None, None]
    dropped = 2 ** round(magnitude / ((N_BINS - 1) / 4))  # of 8 bits, 4 at the largest magnitude
    solarized_L = torch.where(levels_L >= 255.0 * (1 - share), 255 - levels_L, levels_L)
    tables = {
        "brightness": (levels_L * factors_B11).clamp(0, 255),
        "contrast": (gray_B11 + factors_B11 * (levels_L - gray_B11)).clamp(0, 255),
        "posterize": levels_L - levels_L.remainder(dropped),
        "solarize": solarized_L,
        "autocontrast": _stretch_levels(x_BCHW, levels_L),
        "equalize": _equalize_levels(x_BCHW, levels_L),
    }
    out = levels_L.expand(n, n_channels, 256)
    for name, table in tables.items():
        out = torch.where(chosen[name][:, None, None], table, out)
    return out.to(torch.uint8)


def _stretch_levels(x_BCHW: Tensor, levels_L: Tensor) -> Tensor:
    low_BC1 = x_BCHW.amin((2, 3))[..., None].float()
    high_BC1 = x_BCHW.amax((2, 3))[..., None].float()
    is_flat = high_BC1 == low_BC1
    scale = 255.0 / torch.where(is_flat, torch.ones_like(high_BC1), high_BC1 - low_BC1)
    return torch.where(is_flat, levels_L, ((levels_L - low_BC1) * scale).clamp(0, 255))


def _equalize_levels(x_BCHW: Tensor, levels_L: Tensor) -> Tensor:
    """Equalise the histogram as Pillow does: in integers, without the last level that occurs."""
    n, n_channels = x_BCHW.shape[:2]
    flat_BCP = x_BCHW.flatten(2).long()
    counts_BCL = torch.zeros(n, n_channels, 256, dtype=torch.int64, device=x_BCHW.device)
    counts_BCL = counts_BCL.scatter_add(2, flat_BCP, torch.ones_like(flat_BCP))
    last_BC1 = (counts_BCL > 0).long().mul(torch.arange(256, device=x_BCHW.device)).amax(2, keepdim=True)
    step_BC1 = (flat_BCP.shape[2] - counts_BCL.gather(2, last_BC1)) // 255
    below_BCL = counts_BCL.cumsum(2) - counts_BCL
    ranks = ((below_BCL + step_BC1 // 2) // step_BC1.clamp(min=1)).clamp(0, 255).float()
    return torch.where(step_BC1 == 0, levels_L, ranks)


def _blend_neighbours(x_BCHW: Tensor, chosen: dict[str, Tensor], factors_B: Tensor) -> Tensor:
    """Blend with the gray image (color) or the smoothed one (sharpness)."""
    x = x_BCHW.float()
    other = x
    if x.shape[1] == 3:
        other = torch.where(chosen["color"][:, None, None, None], to_gray(x).floor().expand_as(x), other)
    if min(x.shape[-2:]) > 2:
        other = torch.where(chosen["sharpness"][:, None, None, None], _smooth(x), other)
    return (other + factors_B[:, None, None, None] * (x - other)).clamp(0, 255).to(torch.uint8)


def _smooth(x_BCHW: Tensor) -> Tensor:
    """Average 3 × 3 pixels with five-fold weight in the middle; the border stays unchanged."""
    height, width = x_BCHW.shape[-2:]
    inner = x_BCHW[..., 1:-1, 1:-1] * 4
    for i in range(3):
        for j in range(3):
            inner = inner + x_BCHW[..., i : i + height - 2, j : j + width - 2]
    out = x_BCHW.clone()
    out[..., 1:-1, 1:-1] = (inner / 13).round()
    return out
