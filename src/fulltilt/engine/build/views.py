"""Prepare images and transforms for a task that augments each image into views on the device, as SimCLR does."""

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from fulltilt.data import Pipeline, build_pipeline, take_raw
from fulltilt.errors import UsageError

SIMCLR_VIEWS = (
    "random_resized_crop({side}, scale=[0.2, 1.0]) | random_flip | "
    "color_jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, probability=0.8) | "
    "random_grayscale(probability=0.2) | gaussian_blur(probability=0.5)"
)
"""The default of ``data.transform.train``: SimCLR's order, with the strengths usual for images this small."""


def plan_view_data(
    train: Callable[[], Dataset], validation: Callable[[], Dataset] | None, *, has_transform: bool
) -> dict[str, Any]:
    """Return functions that build the task's arguments ``train``, ``views`` and ``labelled`` when they are called.

    Without ``has_transform``, ``SIMCLR_VIEWS`` make the views of the images that ``train`` builds.
    """

    def build_views() -> Pipeline:
        source: Any = train()
        views = source.transform if has_transform else build_pipeline(SIMCLR_VIEWS.format(side=source.sample_shape[-1]))
        if not isinstance(views, Pipeline):
            raise UsageError(
                f"views are made by a pipeline of transforms, and {source.name} has a {type(views).__name__}; write "
                "data.transform.train as steps joined by |"
            )
        return views

    def build_labelled() -> tuple[Any, Any]:
        assert validation is not None
        queries: Any = validation()
        bank: Any = copy.copy(train())  # the same images, seen as validation images are
        bank.transform = queries.transform
        return bank, queries

    return {
        "train": functools.cache(lambda: take_raw(train())),
        "views": functools.cache(build_views),
        "labelled": None if validation is None else functools.cache(build_labelled),
    }
