"""Image transforms by name: their arguments, checked, and the step that each builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fulltilt.data.transforms.colors import (
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Normalize,
    RandomGrayscale,
    Solarize,
    ToFloat,
)
from fulltilt.data.transforms.erasing import Cutout, RandomErasing
from fulltilt.data.transforms.rand_augment import N_BINS, RandAugment
from fulltilt.data.transforms.steps import CenterCrop, RandomCrop, RandomFlip, RandomResizedCrop, Resize, Step
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
    _check_windows("random_resized_crop", scale, ratio)
    return RandomResizedCrop(*_check_size("random_resized_crop", size, width), scale, ratio)


def random_flip(probability: float = 0.5) -> Step:
    """Mirror left and right."""
    return RandomFlip(_check_share("random_flip", "probability", probability))


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


def random_grayscale(probability: float = 0.1) -> Step:
    """Some images lose their colours; the number of channels stays."""
    return RandomGrayscale(_check_share("random_grayscale", "probability", probability))


def color_jitter(
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
    probability: float = 1.0,
) -> Step:
    """Factors from [1 − amount, 1 + amount]; ``hue`` is a share of a full turn, 0.5 at most."""
    amounts = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "probability": probability}
    for name, amount in amounts.items():
        _check_share("color_jitter", name, amount)
    if not 0 <= hue <= 0.5:
        raise DataError(f"color_jitter: hue {hue} is not between 0 and 0.5, half a turn each way")
    return ColorJitter(brightness, contrast, saturation, hue, probability)


def gaussian_blur(
    kernel_size: int | None = None, sigma: tuple[float, float] = (0.1, 2.0), probability: float = 1.0
) -> Step:
    """``sigma``: bounds of the width in pixels; ``kernel_size``: odd, a tenth of the image's height when not given."""
    if kernel_size is not None and (kernel_size < 1 or kernel_size % 2 == 0):
        raise DataError(f"gaussian_blur: kernel_size {kernel_size} must be odd and 1 or more")
    if not 0 < sigma[0] <= sigma[1]:
        raise DataError(f"gaussian_blur: sigma {tuple(sigma)} must rise and be above 0")
    return GaussianBlur(kernel_size, sigma, _check_share("gaussian_blur", "probability", probability))


def solarize(threshold: float = 0.5, probability: float = 1.0) -> Step:
    """What is as bright as ``threshold``, in [0, 1], is inverted."""
    return Solarize(
        _check_share("solarize", "threshold", threshold), _check_share("solarize", "probability", probability)
    )


def rand_augment(n_ops: int = 2, magnitude: int = 9) -> Step:
    if n_ops < 1:
        raise DataError(f"rand_augment: n_ops {n_ops} must be 1 or more")
    if not 0 <= magnitude < N_BINS:
        raise DataError(f"rand_augment: magnitude {magnitude} is not between 0 and {N_BINS - 1}")
    return RandAugment(n_ops, magnitude)


def cutout(size: int) -> Step:
    """Zeros in a square of ``size`` pixels, centred anywhere in the image."""
    return Cutout(_check_size("cutout", size, None)[0])


def random_erasing(
    probability: float = 0.5,
    scale: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
    value: float = 0.0,
) -> Step:
    """A window filled with ``value``. ``scale``: bounds of its share of the area; ``ratio``: of height over width."""
    _check_windows("random_erasing", scale, ratio)
    return RandomErasing(_check_share("random_erasing", "probability", probability), scale, ratio, value)


TRANSFORMS: Mapping[str, Callable[..., Step]] = {
    builder.__name__: builder
    for builder in (
        center_crop,
        color_jitter,
        cutout,
        gaussian_blur,
        grayscale,
        normalize,
        rand_augment,
        random_crop,
        random_erasing,
        random_flip,
        random_grayscale,
        random_resized_crop,
        resize,
        solarize,
        to_float,
    )
}


def _check_size(name: str, height: int, width: int | None) -> tuple[int, int]:
    width = height if width is None else width
    if height < 1 or width < 1:
        raise DataError(f"{name}: size {height} × {width} must be 1 or more each way")
    return height, width


def _check_share(step: str, name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise DataError(f"{step}: {name} {value} is not between 0 and 1")
    return value


def _check_windows(name: str, scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    if not 0 < scale[0] <= scale[1] <= 1:
        raise DataError(f"{name}: scale {tuple(scale)} must rise within (0, 1]")
    if not 0 < ratio[0] <= ratio[1]:
        raise DataError(f"{name}: ratio {tuple(ratio)} must rise and be above 0")
