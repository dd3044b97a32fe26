"""Collate samples to a batch."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from fulltilt.errors import DataError


def identity(batch: Any) -> Any:
    """Return the batch of a dataset that reads whole batches."""
    return batch


def fast_collate(samples: Sequence[Any]) -> Any:
    """Collate samples; tuples of tensors and whole numbers take a quicker way than torch's.

    Raises:
        DataError: Samples differ in type, or tensors of one field in shape.
    """
    kinds = set(map(type, samples))
    if len(kinds) > 1 and not kinds.isdisjoint({tuple, type(None)}):
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"the samples of a batch are of several types: {found}; have the data set give one")
    first = samples[0]
    if isinstance(first, torch.Tensor):
        return _collate_column(samples)
    if type(first) is tuple:
        return tuple(_collate_column(column) for column in zip(*samples, strict=True))
    return default_collate(list(samples))


def _collate_column(values: Sequence[Any]) -> Any:
    first = values[0]
    if type(first) is int:
        return torch.tensor(values)
    if not isinstance(first, torch.Tensor):
        return default_collate(values)
    shapes = {tuple(tensor.shape) for tensor in values}
    if len(shapes) > 1:
        raise DataError(
            f"samples of one batch differ in shape: {', '.join(map(str, sorted(shapes)[:4]))}; "
            f"give a collate function that joins them, or, for images, add resize(…), center_crop(…) or "
            f"random_resized_crop(…) to data.transform, or write them in one size (fulltilt data make-stl10)"
        )
    if get_worker_info() is None:
        return torch.stack(tuple(values))
    out = empty_shared((len(values), *first.shape), first.dtype)
    return torch.stack(tuple(values), out=out)


def empty_shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a batch in shared memory, through which it leaves a worker; this saves a copy on the way out."""
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)
