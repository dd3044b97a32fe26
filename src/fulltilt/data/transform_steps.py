"""The steps of image transforms, on torch tensors. Each takes a batch and draws anew for every image in it.

Legend of shape suffixes: B batch, C channels, H height, W width.

Images are uint8 in [0, 255] or float32, then taken to lie in [0, 1]. Every random draw comes from the
``generator`` given, or from torch's global one. Copies of small images run in numpy, on one thread: torch would
hand each to its intra-op threads, whose meeting costs more than the copy where the cores are busy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fulltilt.errors import DataError

Generator = torch.Generator | None
Step = Callable[[Tensor, Generator], Tensor]

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what "grayscale" means in every image library


@dataclasses.dataclass(frozen=True)
class Resize:
    height: int
    width: int

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        return _resize(x_BCHW, self.height, self.width)


@dataclasses.dataclass(frozen=True)
class CenterCrop:
    height: int
    width: int

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        _check_fits("center_crop", self.height, self.width, height, width)
        top, left = (height - self.height) // 2, (width - self.width) // 2
        return x_BCHW[..., top : top + self.height, left : left + self.width]


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """A window at a random place of the image, which is first padded with zeros (or its mirror image)."""

    height: int
    width: int
    padding: int
    mode: str

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        if self.padding:
            x_BCHW = _pad(x_BCHW, self.padding, self.mode)
        n, _, height, width = x_BCHW.shape
        _check_fits("random_crop", self.height, self.width, height, width)
        tops = torch.randint(height - self.height + 1, (n,), generator=generator)
        lefts = torch.randint(width - self.width + 1, (n,), generator=generator)
        # Rows copied by numpy: 0.7 ms for 512 images of 3 × 32 × 32, against 1.7 ms by torch's indexing of windows.
        source = x_BCHW.numpy()
        out = np.empty((*source.shape[:2], self.height, self.width), dtype=source.dtype)
        for i, (top, left) in enumerate(zip(tops.tolist(), lefts.tolist(), strict=True)):
            out[i] = source[i, :, top : top + self.height, left : left + self.width]
        return torch.from_numpy(out)


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop:
    """A window of random area and aspect ratio, brought to one size."""

    height: int
    width: int
    scale: Sequence[float]
    ratio: Sequence[float]

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        out = []
        for image_CHW in x_BCHW:
            top, left, h, w = self._draw_window(height, width, generator)
            out.append(_resize(image_CHW[None, :, top : top + h, left : left + w], self.height, self.width))
        return torch.cat(out)

    def _draw_window(self, height: int, width: int, generator: Generator) -> tuple[int, int, int, int]:
        low, high = (torch.tensor(bound).log().item() for bound in self.ratio)
        for _ in range(10):
            a, b, c, d = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
            area = height * width * (self.scale[0] + a * (self.scale[1] - self.scale[0]))
            ratio = torch.tensor(low + b * (high - low)).exp().item()
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                return int(c * (height - h + 1)), int(d * (width - w + 1)), h, w
        # No window of that shape fits a very long or flat image: its largest centred one inside the ratio bounds.
        w = min(width, max(1, round(height * self.ratio[1])))
        h = min(height, max(1, round(width / self.ratio[0])))
        return (height - h) // 2, (width - w) // 2, h, w


@dataclasses.dataclass(frozen=True)
class RandomFlip:
    probability: float

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        flips_B = torch.rand(len(x_BCHW), generator=generator) < self.probability
        source, flips = x_BCHW.numpy(), flips_B.numpy()
        out = source.copy()
        out[flips] = source[flips][..., ::-1]
        return torch.from_numpy(out)


@dataclasses.dataclass(frozen=True)
class Normalize:
    """(x − mean) / std per channel, with x in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        n_channels = x_BCHW.shape[-3]
        if len(self.mean) not in (1, n_channels):
            raise DataError(
                f"normalize has {len(self.mean)} means and the images have {n_channels} channels; give one value or "
                f"{n_channels}"
            )
        unit = 255.0 if x_BCHW.dtype == torch.uint8 else 1.0
        mean_C11 = torch.tensor(self.mean)[:, None, None] * unit
        scale_C11 = 1 / (torch.tensor(self.std)[:, None, None] * unit)
        return x_BCHW.to(torch.float32, copy=True).sub_(mean_C11).mul_(scale_C11)


@dataclasses.dataclass(frozen=True)
class ToFloat:
    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        return to_unit_float(x_BCHW)


@dataclasses.dataclass(frozen=True)
class Grayscale:
    n_channels: int

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        gray_B1HW = _to_gray(to_unit_float(x_BCHW))
        return _like(gray_B1HW, x_BCHW).expand(-1, self.n_channels, -1, -1)


@dataclasses.dataclass(frozen=True)
class ColorJitter:
    """Random brightness, contrast and saturation, each by a factor from [1 − amount, 1 + amount], in this order."""

    brightness: float
    contrast: float
    saturation: float

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        x = to_unit_float(x_BCHW)
        n = len(x)
        x = (x * _draw_factors(n, self.brightness, generator)).clamp_(0, 1)
        mean_B111 = _to_gray(x).mean(dim=(-3, -2, -1), keepdim=True)
        x = torch.lerp(mean_B111.expand_as(x), x, _draw_factors(n, self.contrast, generator)).clamp_(0, 1)
        if x.shape[1] == 3:
            x = torch.lerp(_to_gray(x).expand_as(x), x, _draw_factors(n, self.saturation, generator)).clamp_(0, 1)
        return _like(x, x_BCHW)


@dataclasses.dataclass(frozen=True)
class Cutout:
    """Zeros in one square per image, centred anywhere in it, so that the square may be cut by the border.

    Source: DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, 2017.
    """

    size: int

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        n, _, height, width = x_BCHW.shape
        tops_B1 = torch.randint(height, (n, 1), generator=generator) - self.size // 2
        lefts_B1 = torch.randint(width, (n, 1), generator=generator) - self.size // 2
        rows_H, columns_W = torch.arange(height), torch.arange(width)
        in_rows_BH = (rows_H >= tops_B1) & (rows_H < tops_B1 + self.size)
        in_columns_BW = (columns_W >= lefts_B1) & (columns_W < lefts_B1 + self.size)
        return x_BCHW.masked_fill(in_rows_BH[:, None, :, None] & in_columns_BW[:, None, None, :], 0)


def to_unit_float(images: Tensor) -> Tensor:
    """uint8 in [0, 255] to float32 in [0, 1]; floats pass."""
    return images.to(torch.float32).div_(255.0) if images.dtype == torch.uint8 else images


def _check_fits(name: str, height: int, width: int, has_height: int, has_width: int) -> None:
    if height > has_height or width > has_width:
        raise DataError(
            f"{name}: a window of {height} × {width} does not fit images of {has_height} × {has_width} (padding "
            f"included); use a smaller size, more padding, or resize first"
        )


def _pad(x_BCHW: Tensor, padding: int, mode: str) -> Tensor:
    if mode == "zeros":
        return functional.pad(x_BCHW, (padding,) * 4)
    height, width = x_BCHW.shape[-2:]
    if padding >= min(height, width):
        raise DataError(f"random_crop: reflect needs padding below the image's size, {padding} ≥ {min(height, width)}")
    return x_BCHW[:, :, _reflect(height, padding)][..., _reflect(width, padding)]


def _reflect(size: int, padding: int) -> Tensor:
    index = torch.arange(-padding, size + padding).abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


def _resize(x_BCHW: Tensor, height: int, width: int) -> Tensor:
    if x_BCHW.shape[-2:] == (height, width):
        return x_BCHW
    return functional.interpolate(x_BCHW, size=(height, width), mode="bilinear", antialias=True)


def _to_gray(x_BCHW: Tensor) -> Tensor:
    if x_BCHW.shape[1] == 1:
        return x_BCHW
    if x_BCHW.shape[1] != 3:
        raise DataError(f"images with {x_BCHW.shape[1]} channels have no grayscale; 1 or 3 are known")
    return (x_BCHW * torch.tensor(_LUMA)[:, None, None]).sum(1, keepdim=True)


def _like(unit_float: Tensor, original: Tensor) -> Tensor:
    """Back to the dtype of ``original``."""
    return unit_float.mul(255).round_().clamp_(0, 255).to(torch.uint8) if original.dtype == torch.uint8 else unit_float


def _draw_factors(n: int, amount: float, generator: Generator) -> Tensor:
    return 1 + amount * (2 * torch.rand(n, 1, 1, 1, generator=generator) - 1)
