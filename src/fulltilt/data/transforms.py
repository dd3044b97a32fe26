"""Image transforms by name: their arguments, checked, and the step that each builds (``transform_steps``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fulltilt.data.transform_steps import (
    CenterCrop,
    ColorJitter,
    Cutout,
    Grayscale,
    Normalize,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    Step,
    ToFloat,
)
from fulltilt.data.view_steps import random_grayscale
from fulltilt.errors import DataError


def resize(size: int, width: int | None = None) -> Step:
    """Bring every image to ``size`` × ``width`` (``size`` × ``size`` when no width is given), antialiased bilinear."""
    return Resize(*_check_size("resize", size, width))


def center_crop(size: int, width: int | None = None) -> Step:
    return CenterCrop(*_check_size("center_crop", size, width))


def random_crop(size: int, width: int | None = None, padding: int = 0, mode: str = "zeros") -> Step:
    """``mode``: what the padding holds, ``zeros`` or ``reflect``."""
    if padding < 0:
        raise DataError(f"random_crop: padding {padding} is negative; use 0 or more")
    if mode not in ("zeros", "reflect"):
        raise DataError(f"random_crop: mode {mode!r} is not known; use zeros or reflect")
    return RandomCrop(*_check_size("random_crop", size, width), padding, mode)


def random_resized_crop(
    size: int,
    width: int | None = None,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Step:
    """``scale``: bounds of the window's share of the area; ``ratio``: bounds of width over height."""
    if not 0 < scale[0] <= scale[1] <= 1:
        raise DataError(f"random_resized_crop: scale {tuple(scale)} must rise within (0, 1]")
    if not 0 < ratio[0] <= ratio[1]:
        raise DataError(f"random_resized_crop: ratio {tuple(ratio)} must rise and be above 0")
    return RandomResizedCrop(*_check_size("random_resized_crop", size, width), scale, ratio)


def random_flip(probability: float = 0.5) -> Step:
    """Mirror left and right."""
    if not 0 <= probability <= 1:
        raise DataError(f"random_flip: probability {probability} is not between 0 and 1")
    return RandomFlip(probability)


def normalize(mean: list[float] | None = None, std: list[float] | None = None) -> Step:
    """``mean`` and ``std`` per channel, of images in [0, 1]; the dataset's own when it has known ones."""
    if mean is None or std is None:
        raise DataError(
            "normalize knows no mean and std for this dataset; give them: normalize(mean=[0.485, 0.456, 0.406], "
            "std=[0.229, 0.224, 0.225]) are those of ImageNet"
        )
    if len(mean) != len(std) or not mean:
        raise DataError(f"normalize: {len(mean)} means and {len(std)} stds; give one of each per channel")
    if min(std) <= 0:
        raise DataError(f"normalize: std {list(std)} must be above 0")
    return Normalize(tuple(map(float, mean)), tuple(map(float, std)))


def to_float() -> Step:
    """uint8 in [0, 255] to float32 in [0, 1]. Every pipeline ends with it when nothing before did it."""
    return ToFloat()


def grayscale(n_channels: int = 1) -> Step:
    if n_channels < 1:
        raise DataError(f"grayscale: n_channels {n_channels} must be 1 or more")
    return Grayscale(n_channels)


def color_jitter(brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0) -> Step:
    for name, amount in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
        if not 0 <= amount <= 1:
            raise DataError(f"color_jitter: {name} {amount} is not between 0 and 1")
    return ColorJitter(brightness, contrast, saturation)


def cutout(size: int) -> Step:
    return Cutout(_check_size("cutout", size, None)[0])


TRANSFORMS: Mapping[str, Callable[..., Step]] = {
    builder.__name__: builder
    for builder in (
        center_crop,
        color_jitter,
        cutout,
        grayscale,
        normalize,
        random_crop,
        random_flip,
        random_grayscale,
        random_resized_crop,
        resize,
        to_float,
    )
}


def _check_size(name: str, height: int, width: int | None) -> tuple[int, int]:
    width = height if width is None else width
    if height < 1 or width < 1:
        raise DataError(f"{name}: size {height} × {width} must be 1 or more each way")
    return height, width
