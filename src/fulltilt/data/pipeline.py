"""A pipeline of transforms: ``random_crop(32, padding=4) | random_flip | normalize``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fulltilt.config import build_component, parse_pipeline
from fulltilt.data.transform_steps import Step, to_unit_float
from fulltilt.data.transforms import TRANSFORMS
from fulltilt.errors import DataError

Transform = str | Callable[[Tensor], Tensor] | None
"""How a dataset builder takes it: the text of a pipeline, or any callable on one sample."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Steps in order. Takes one image (C, H, W) or a batch (B, C, H, W); a uint8 result leaves as float32 in [0, 1]."""

    steps: tuple[Step, ...]

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        single = images.dim() == 3
        x_BCHW = images[None] if single else images
        for step in self.steps:
            x_BCHW = step(x_BCHW, generator)
        x_BCHW = to_unit_float(x_BCHW).contiguous()
        return x_BCHW[0] if single else x_BCHW


def build_pipeline(
    spec: str | None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    where: str = "data.transform",
    base_dir: str | None = None,
) -> Pipeline | None:
    """Build the pipeline that ``spec`` describes; None for no text.

    Args:
        spec: Steps joined by ``|``: names of ``TRANSFORMS``, or ``module:function`` returning a callable on an image.
        mean: What ``normalize`` uses where the text names none.
        std: Likewise.
        where: The configuration key, for messages.
        base_dir: Where ``module:function`` is looked up first.

    Raises:
        ConfigError: An unknown name or argument.
        DataError: An argument outside of its range.
    """
    if spec is None or not spec.strip():
        return None
    given: dict[str, Any] = {"mean": list(mean), "std": list(std)} if mean is not None and std is not None else {}
    steps = []
    for call in parse_pipeline(spec):
        given_here = given if call.name == "normalize" else {}
        step = build_component(call, TRANSFORMS, kind="transform", where=where, base_dir=base_dir, **given_here)
        steps.append(_PerImage(step) if ":" in call.name else step)
    return Pipeline(tuple(steps))


def resolve_transform(
    transform: Transform, *, mean: Any = None, std: Any = None, base_dir: str | None = None
) -> Callable | None:
    """What a dataset builder got, as a callable."""
    if isinstance(transform, str):
        return build_pipeline(transform, mean=mean, std=std, base_dir=base_dir)
    return transform


def apply_transform(transform: Callable | None, images_BCHW: Tensor, generator: torch.Generator | None) -> Tensor:
    """Transform a batch: a Pipeline takes it whole, any other callable image by image."""
    if transform is None:
        return to_unit_float(images_BCHW)
    if isinstance(transform, Pipeline):
        if images_BCHW.dim() != 4:
            raise DataError(
                f"data.transform works on images (C, H, W), and an input here has shape {tuple(images_BCHW.shape[1:])};"
                f" leave it out, or give a callable of your own"
            )
        return transform(images_BCHW, generator)
    return to_unit_float(torch.stack([transform(image) for image in images_BCHW]))


@dataclasses.dataclass(frozen=True)
class _PerImage:
    """A user's callable on one image as a step."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x_BCHW: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.stack([self.function(image_CHW) for image_CHW in x_BCHW])
