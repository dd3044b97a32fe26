"""Image transforms on torch tensors: what a step is, and those that move pixels without changing them much.

Legend of shape suffixes: B batch, C channels, H height, W width, D draws.

Images are uint8 in [0, 255] or float32, then taken to lie in [0, 1], on any device. A step draws anew for every image:
it is handed ``n_draws`` numbers from [0, 1) for each, all steps of a pipeline from one call of the generator, so that a
batch costs one draw and what follows is a pure function that can be compiled.

On a CPU, outside of a compiled graph, copies run in numpy and on one thread: torch would hand each to its intra-op
threads, whose meeting costs more than the copy where the cores are busy.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fulltilt.data.transforms.windows import WINDOW_DRAWS, Windows, draw_index, draw_windows
from fulltilt.errors import DataError

Generator = torch.Generator | None


class Step(abc.ABC):
    """A transform of a batch.

    Attributes:
        n_draws: Numbers from [0, 1) that it takes for each image.
        sizes: It gives images of one size whatever their size was.
    """

    n_draws: int = 0
    sizes: bool = False

    @abc.abstractmethod
    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        """The images transformed, each by its row of ``u_BD``; the input is left as it is."""

    def __call__(self, x_BCHW: Tensor, generator: Generator = None) -> Tensor:
        return self.apply(x_BCHW, draw_uniform(len(x_BCHW), self.n_draws, generator, x_BCHW.device))


def draw_uniform(n_images: int, n_draws: int, generator: Generator, device: torch.device) -> Tensor:
    """(n_images, n_draws) float32 from [0, 1) on ``device``; drawn where the generator lives."""
    source = device if generator is None else generator.device
    return torch.rand(n_images, n_draws, generator=generator, device=source).to(device)


@dataclasses.dataclass(frozen=True)
class Resize(Step):
    height: int
    width: int
    sizes = True

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        return resize_images(x_BCHW, self.height, self.width)


@dataclasses.dataclass(frozen=True)
class CenterCrop(Step):
    height: int
    width: int
    sizes = True

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        _check_fits("center_crop", self.height, self.width, height, width)
        top, left = (height - self.height) // 2, (width - self.width) // 2
        return x_BCHW[..., top : top + self.height, left : left + self.width]


@dataclasses.dataclass(frozen=True)
class RandomCrop(Step):
    """A window at a random place of the image, which is first padded with zeros (or its mirror image)."""

    height: int
    width: int
    padding: int
    mode: str
    n_draws = 2
    sizes = True

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        if self.padding:
            x_BCHW = _pad(x_BCHW, self.padding, self.mode)
        height, width = x_BCHW.shape[-2:]
        _check_fits("random_crop", self.height, self.width, height, width)
        tops_B = draw_index(u_BD[:, 0], height - self.height + 1)
        lefts_B = draw_index(u_BD[:, 1], width - self.width + 1)
        return take_windows(x_BCHW, tops_B, lefts_B, self.height, self.width)


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(Step):
    """A window of random area and aspect ratio, brought to one size, antialiased."""

    height: int
    width: int
    scale: Sequence[float]
    ratio: Sequence[float]
    n_draws = WINDOW_DRAWS
    sizes = True

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        windows = draw_windows(u_BD, *x_BCHW.shape[-2:], self.scale, self.ratio)
        return resize_windows(x_BCHW, windows, self.height, self.width)


@dataclasses.dataclass(frozen=True)
class RandomFlip(Step):
    probability: float
    n_draws = 1

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        flips_B = u_BD[:, 0] < self.probability
        if not is_eager_on_cpu(x_BCHW):
            return torch.where(flips_B[:, None, None, None], x_BCHW.flip(-1), x_BCHW)
        source, flips = x_BCHW.numpy(), flips_B.numpy()
        out = source.copy()
        out[flips] = source[flips][..., ::-1]
        return torch.from_numpy(out)


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether numpy may see the data: no device, no graph being compiled, no fake tensor."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


def take_windows(x_BCHW: Tensor, tops_B: Tensor, lefts_B: Tensor, height: int, width: int) -> Tensor:
    """One window of each image.

    Cost: 512 windows of 3 × 32 × 32 take 0.5 ms on one core by numpy's windows, 2.6 ms by torch's gather, 12 ms by its
    indexing; on a GPU the gather is one kernel.
    """
    n, n_channels, _, x_width = x_BCHW.shape
    if is_eager_on_cpu(x_BCHW):
        windows = np.lib.stride_tricks.sliding_window_view(x_BCHW.numpy(), (height, width), axis=(2, 3))
        return torch.from_numpy(windows[np.arange(n), :, tops_B.numpy(), lefts_B.numpy()])
    rows_BH = tops_B[:, None] + torch.arange(height, device=x_BCHW.device)
    columns_BW = lefts_B[:, None] + torch.arange(width, device=x_BCHW.device)
    places_BHW = rows_BH[:, :, None] * x_width + columns_BW[:, None, :]
    places = places_BHW.reshape(n, 1, height * width).expand(-1, n_channels, -1)
    return x_BCHW.flatten(2).gather(2, places).view(n, n_channels, height, width)


def resize_windows(x_BCHW: Tensor, windows: Windows, height: int, width: int) -> Tensor:
    """One window of each image, brought to (height, width) as ``interpolate`` does with antialiasing.

    Cost: on one core 0.07 ms an image of 3 × 96 × 96 window by window, 0.43 ms as products of matrices, since torch
    resizes uint8 on a CPU with integers; on a device the products are three kernels for the whole batch.
    """
    if is_eager_on_cpu(x_BCHW):
        parts = [
            resize_images(x_BCHW[i : i + 1, :, top : top + h, left : left + w], height, width)
            for i, (top, left, h, w) in enumerate(torch.stack(windows.edges, dim=1).tolist())
        ]
        return torch.cat(parts)
    rows_BhH = _compute_weights(windows.tops, windows.heights, height, x_BCHW.shape[2])
    columns_BwW = _compute_weights(windows.lefts, windows.widths, width, x_BCHW.shape[3])
    pixels_BChw = rows_BhH[:, None] @ x_BCHW.float() @ columns_BwW[:, None].transpose(-1, -2)
    return pixels_BChw.round().clamp(0, 255).to(torch.uint8) if x_BCHW.dtype == torch.uint8 else pixels_BChw


def resize_images(x_BCHW: Tensor, height: int, width: int) -> Tensor:
    if x_BCHW.shape[-2:] == (height, width):
        return x_BCHW
    if x_BCHW.dtype == torch.uint8 and x_BCHW.device.type != "cpu":  # only the CPU resizes whole numbers
        pixels_BCHW = functional.interpolate(x_BCHW.float(), size=(height, width), mode="bilinear", antialias=True)
        return pixels_BCHW.round().clamp(0, 255).to(torch.uint8)
    return functional.interpolate(x_BCHW, size=(height, width), mode="bilinear", antialias=True)


def apply_to_chosen(x_BCHW: Tensor, chosen_B: Tensor, function: Callable[..., Tensor], *per_image: Tensor) -> Tensor:
    """``function(images, *per_image)`` of the chosen images, the others as they are.

    On a CPU only the chosen ones are computed. On a device all are: to count them would be to wait for it.
    """
    if not is_eager_on_cpu(x_BCHW):
        return torch.where(chosen_B[:, None, None, None], function(x_BCHW, *per_image), x_BCHW)
    if bool(chosen_B.all()):
        return function(x_BCHW, *per_image)
    rows = chosen_B.nonzero()[:, 0]
    if not len(rows):
        return x_BCHW
    return x_BCHW.index_copy(0, rows, function(x_BCHW[rows], *(values[rows] for values in per_image)))


def _compute_weights(starts_B: Tensor, sizes_B: Tensor, n_out: int, n_in: int) -> Tensor:
    """(B, n_out, n_in): rows that resize a stretch of a line of pixels, the triangle filter widened when shrinking."""
    scales_B1 = sizes_B[:, None] / n_out
    places_O = torch.arange(n_out, device=starts_B.device) + 0.5
    pixels_I = torch.arange(n_in, device=starts_B.device) + 0.5
    centers_BO1 = (starts_B[:, None] + scales_B1 * places_O)[..., None]
    weights_BOI = (1 - (pixels_I - centers_BO1).abs() / scales_B1.clamp(min=1)[..., None]).clamp(min=0)
    is_inside_BI = (pixels_I > starts_B[:, None]) & (pixels_I < (starts_B + sizes_B)[:, None])
    weights_BOI = weights_BOI * is_inside_BI[:, None]
    return weights_BOI / weights_BOI.sum(-1, keepdim=True)


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
    return mirror_edges(x_BCHW, padding, padding)


def mirror_edges(x_BCHW: Tensor, rows: int, columns: int) -> Tensor:
    """Padded by its mirror image, the edge itself not repeated; any dtype, unlike torch's reflect padding."""
    height, width = x_BCHW.shape[-2:]
    device = x_BCHW.device
    return x_BCHW[:, :, _reflect(height, rows, device)][..., _reflect(width, columns, device)]


def _reflect(size: int, padding: int, device: torch.device) -> Tensor:
    index = torch.arange(-padding, size + padding, device=device).abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)
