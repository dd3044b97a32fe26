"""Define geometric image transforms, and ``Step``, the base class of all transforms.

Legend of shape suffixes: B batch, C channels, H height, W width, D draws.

Images are uint8 in [0, 255] or float32 in [0, 1], on any device. A pipeline draws the random numbers of all its steps
with one call of the generator; each step is then a pure function of images and numbers, which can be compiled.

Eager CPU code copies with numpy on one thread: torch would hand each copy to its intra-op threads, and waiting for
these costs more than the copy where the cores are busy.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional

from fulltilt.data.transforms.windows import WINDOW_DRAWS, Windows, draw_index, draw_windows, mark_boxes
from fulltilt.errors import DataError

Generator = torch.Generator | None
Bounds = tuple[float, float]
Share = Annotated[float, Ge(0), Le(1)]
Pixels = Annotated[int, Ge(1)]


class Step(abc.ABC):
    """Transforms a batch of images; the base class of all transforms.

    What the annotation of an argument says of its range is checked where a pipeline is built from text.

    Attributes:
        n_draws: How many random numbers from [0, 1) the step needs for each image.
        sizes: Whether the results have one size whatever the size of the images.
    """

    n_draws: int = 0
    sizes: bool = False

    @abc.abstractmethod
    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        """Return the transformed images, each by its row of ``u_BD``; the input stays unchanged."""

    def __call__(self, x_BCHW: Tensor, generator: Generator = None) -> Tensor:
        return self.apply(x_BCHW, draw_uniform(len(x_BCHW), self.n_draws, generator, x_BCHW.device))

    @property
    def name(self) -> str:
        """The name in the configuration: the class's name in snake case."""
        return to_snake_case(type(self).__name__)


def to_snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def draw_uniform(n_images: int, n_draws: int, generator: Generator, device: torch.device) -> Tensor:
    """Draw (n_images, n_draws) float32 from [0, 1) where the generator lives, and move them to ``device``."""
    source = device if generator is None else generator.device
    return torch.rand(n_images, n_draws, generator=generator, device=source).to(device)


@dataclasses.dataclass(frozen=True)
class _Sized(Step):
    """A step whose results are ``size`` × ``width`` pixels, ``size`` × ``size``, or a ``size`` of (height, width)."""

    size: Pixels | tuple[Pixels, Pixels]
    width: Pixels | None = None
    sizes = True

    def __post_init__(self) -> None:
        if isinstance(self.size, tuple) and self.width is not None:
            raise DataError(
                f"{self.name}: size {self.size} has a width already, and width={self.width} is given; drop it"
            )

    @property
    def shape(self) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size
        return self.size, self.size if self.width is None else self.width

    def check_fits(self, x_BCHW: Tensor) -> None:
        (height, width), (has_height, has_width) = self.shape, x_BCHW.shape[-2:]
        if height > has_height or width > has_width:
            raise DataError(
                f"{self.name}: a window of {height} × {width} does not fit images of {has_height} × {has_width} "
                f"(padding included); use a smaller size, more padding, or resize first"
            )


class Resize(_Sized):
    """Resize every image, bilinear and antialiased."""

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        return resize_images(x_BCHW, *self.shape)


class CenterCrop(_Sized):
    """Take the middle of every image."""

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        self.check_fits(x_BCHW)
        height, width = self.shape
        top, left = (x_BCHW.shape[-2] - height) // 2, (x_BCHW.shape[-1] - width) // 2
        return x_BCHW[..., top : top + height, left : left + width]


@dataclasses.dataclass(frozen=True)
class RandomCrop(_Sized):
    """Take a window at a random place of the image, padded before with ``zeros`` or by ``reflect``."""

    padding: Annotated[int, Ge(0)] = 0
    mode: Literal["zeros", "reflect"] = "zeros"
    n_draws = 2

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        if self.padding and self.mode == "zeros":
            x_BCHW = functional.pad(x_BCHW, (self.padding,) * 4)
        elif self.padding:
            x_BCHW = mirror_edges(x_BCHW, self.padding)
        self.check_fits(x_BCHW)
        height, width = self.shape
        tops_B = draw_index(u_BD[:, 0], x_BCHW.shape[-2] - height + 1)
        lefts_B = draw_index(u_BD[:, 1], x_BCHW.shape[-1] - width + 1)
        return take_windows(x_BCHW, tops_B, lefts_B, height, width)


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(_Sized):
    """Take a window of random area and aspect ratio and resize it, antialiased.

    ``scale`` bounds the window's share of the image's area, ``ratio`` its width over height.
    """

    scale: Bounds = (0.08, 1.0)
    ratio: Bounds = (3 / 4, 4 / 3)
    n_draws = WINDOW_DRAWS

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_windows(self)

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        windows = draw_windows(u_BD, *x_BCHW.shape[-2:], self.scale, self.ratio)
        return resize_windows(x_BCHW, windows, *self.shape)


@dataclasses.dataclass(frozen=True)
class RandomFlip(Step):
    """Mirror some of the images left to right."""

    probability: Share = 0.5
    n_draws = 1

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        flips_B = u_BD[:, 0] < self.probability
        if not is_eager_on_cpu(x_BCHW):
            return torch.where(flips_B[:, None, None, None], x_BCHW.flip(-1), x_BCHW)
        source, flips = x_BCHW.numpy(), flips_B.numpy()
        out = source.copy()
        out[flips] = source[flips][..., ::-1]
        return torch.from_numpy(out)


@dataclasses.dataclass(frozen=True)
class Cutout(Step):
    """Set one square of ``size`` pixels in every image to 0; its centre lies anywhere, the border may cut it.

    Source: DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, 2017.
    """

    size: Pixels
    n_draws = 2

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        tops_B = draw_index(u_BD[:, 0], height) - self.size // 2
        lefts_B = draw_index(u_BD[:, 1], width) - self.size // 2
        return x_BCHW.masked_fill(mark_boxes(x_BCHW, tops_B, lefts_B, self.size, self.size), 0)


@dataclasses.dataclass(frozen=True)
class RandomErasing(Step):
    """Fill a window of random area and aspect ratio with ``value`` in some of the images.

    ``scale`` bounds the window's share of the area, ``ratio`` its height over width. The value is in the images' own
    range: behind ``normalize`` 0 is the mean, before it black.

    Source: Zhong et al., Random Erasing Data Augmentation, 2017; windows as torchvision draws them.
    """

    probability: Share = 0.5
    scale: Bounds = (0.02, 0.33)
    ratio: Bounds = (0.3, 3.3)
    value: float = 0.0
    n_draws = WINDOW_DRAWS + 1

    def __post_init__(self) -> None:
        _check_windows(self)

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        bounds = (1 / self.ratio[1], 1 / self.ratio[0])  # draw_windows takes width over height
        windows = draw_windows(u_BD[:, 1:], *x_BCHW.shape[-2:], self.scale, bounds, smaller=True)
        chosen_B = (u_BD[:, 0] < self.probability) & windows.found
        boxes = mark_boxes(x_BCHW, *windows.edges) & chosen_B[:, None, None, None]
        return x_BCHW.masked_fill(boxes, self.value)


def _check_windows(step: RandomResizedCrop | RandomErasing) -> None:
    (low, high), (narrow, wide) = step.scale, step.ratio
    if not 0 < low <= high <= 1:
        raise DataError(f"{step.name}: scale {tuple(step.scale)} must rise within (0, 1]")
    if not 0 < narrow <= wide:
        raise DataError(f"{step.name}: ratio {tuple(step.ratio)} must rise and be above 0")


def is_eager_on_cpu(x: Tensor) -> bool:
    """Tell whether numpy can read the tensor: it is on the CPU, not fake, and no graph is being compiled."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


def take_windows(x_BCHW: Tensor, tops_B: Tensor, lefts_B: Tensor, height: int, width: int) -> Tensor:
    """Cut one window out of each image.

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
    """Resize one window of each image to (height, width), as ``interpolate`` does with antialiasing.

    Cost: on one core 0.07 ms an image of 3 × 96 × 96 window by window, 0.43 ms as products of matrices, since torch
    resizes uint8 on a CPU with integers; on a device the products are three kernels for the whole batch.
    """
    if is_eager_on_cpu(x_BCHW):
        parts = [
            resize_images(x_BCHW[i : i + 1, :, top : top + h, left : left + w], height, width)
            for i, (top, left, h, w) in enumerate(torch.stack(windows.edges, dim=1).tolist())
        ]
        return torch.cat(parts)
    tops_B, lefts_B, heights_B, widths_B = windows.edges
    rows_BhH = _compute_weights(tops_B, heights_B, height, x_BCHW.shape[2])
    columns_BwW = _compute_weights(lefts_B, widths_B, width, x_BCHW.shape[3])
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
    """Apply ``function(images, *per_image)`` to the chosen images.

    The CPU computes the chosen ones only. A GPU computes all: counting the chosen would synchronise.
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
    """Return (B, n_out, n_in) weights of a triangle filter that resizes a part of each line of pixels."""
    scales_B1 = sizes_B[:, None] / n_out
    places_O = torch.arange(n_out, device=starts_B.device) + 0.5
    pixels_I = torch.arange(n_in, device=starts_B.device) + 0.5
    centers_BO1 = (starts_B[:, None] + scales_B1 * places_O)[..., None]
    weights_BOI = (1 - (pixels_I - centers_BO1).abs() / scales_B1.clamp(min=1)[..., None]).clamp(min=0)
    is_inside_BI = (pixels_I > starts_B[:, None]) & (pixels_I < (starts_B + sizes_B)[:, None])
    weights_BOI = weights_BOI * is_inside_BI[:, None]
    return weights_BOI / weights_BOI.sum(-1, keepdim=True)


def mirror_edges(x_BCHW: Tensor, padding: int) -> Tensor:
    """Pad by reflection without repeating the edge, for any dtype (torch's own reflect padding takes floats)."""
    if padding >= min(x_BCHW.shape[-2:]):
        size = min(x_BCHW.shape[-2:])
        raise DataError(f"random_crop: reflect needs padding below the image's size, {padding} ≥ {size}")
    for dim in (-2, -1):
        size = x_BCHW.shape[dim]
        index = torch.arange(-padding, size + padding, device=x_BCHW.device).abs()
        x_BCHW = x_BCHW.index_select(dim, torch.where(index >= size, 2 * (size - 1) - index, index))
    return x_BCHW
