"""Reads from a dataset what a model may need to know of the data."""

import functools
import math
from typing import Any

from torch import Tensor, as_tensor
from torch.utils.data import Dataset, Subset

from fulltilt.config.bad_samples import explain_unskipped

_PLAIN = ("n_classes", "n_sensors", "n_labels", "geometry", "vocab_size", "max_len")
FACTS = (*_PLAIN, "n_features", "in_channels", "image_size", "draw_images", "n_outputs")
"""Every name that ``read_data_facts`` may return."""


def read_data_facts(dataset: Dataset) -> dict[str, Any]:
    """Return facts by the names of model parameters; those that the dataset does not tell are absent.

    ``n_classes``, ``n_sensors``, ``n_labels``, ``geometry``, ``vocab_size`` and ``max_len`` are the dataset's own.
    ``in_channels`` and ``image_size`` (height, when square) follow from a ``sample_shape`` of (C, H, W), ``n_features``
    is its product. ``n_outputs`` is ``n_classes``, else the number of elements of one target. ``draw_images(n)`` draws
    n samples (B, C, H, W), evenly spread and as the model gets them.

    Cost: loads the first sample of a map-style dataset that has no ``sample_shape`` or no ``n_classes``.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    facts = {name: getattr(dataset, name) for name in _PLAIN if getattr(dataset, name, None) is not None}
    shape = getattr(dataset, "sample_shape", None)
    first = _load_first(dataset) if shape is None or "n_classes" not in facts else None
    if shape is None and first is not None:
        shape = _read_shape(first[0])
    if shape is not None:
        facts["n_features"] = math.prod(shape)
        if len(shape) == 3:
            facts["in_channels"] = shape[0]
            if shape[1] == shape[2]:
                facts["image_size"] = shape[1]
    if "in_channels" in facts and hasattr(dataset, "get_batch"):
        facts["draw_images"] = functools.partial(_draw_inputs, dataset)
    if "n_classes" in facts:
        facts["n_outputs"] = facts["n_classes"]
    elif first is not None and (target_shape := _read_shape(first[1])) is not None:
        facts["n_outputs"] = math.prod(target_shape)
    return facts


def _draw_inputs(dataset: Any, n_wanted: int) -> Tensor:
    n_samples = len(dataset)
    rows = [i * n_samples // n_wanted for i in range(n_wanted)] if n_wanted < n_samples else list(range(n_samples))
    with explain_unskipped("images that the model looks at before it is trained"):
        return dataset.get_batch(rows)[0]


def _load_first(dataset: Any) -> tuple[Any, Any] | None:
    """Load the first sample if it is a pair; an iterable dataset is left alone, its stream may not rewind."""
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        return None
    sample = dataset[0]
    return (sample[0], sample[1]) if isinstance(sample, tuple | list) and len(sample) == 2 else None


def _read_shape(value: Any) -> tuple[int, ...] | None:
    try:
        return tuple(as_tensor(value).shape)
    except (TypeError, ValueError, RuntimeError):  # text, dicts, ragged lists: no shape to tell
        return None
