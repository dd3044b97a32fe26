"""Walk through batches, which are tensors in tuples, lists and mappings."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fulltilt.errors import DataError

SEQUENCES = (tuple, list)  # made once: `tuple | list` builds a new object each time it is evaluated


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``change`` to every tensor of a nested value; mappings become plain dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, SEQUENCES):
        return type(value)(map_tensors(change, item) for item in value)
    return value


def list_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, SEQUENCES) else ()
    for part in parts:
        yield from list_tensors(part)


def find_tensor(batch: Any) -> Tensor | None:
    """Find the first tensor with a batch dimension."""
    return next((tensor for tensor in list_tensors(batch) if tensor.dim()), None)


def count_samples(batch: Any) -> int:
    """Read the first dimension of the first tensor of a batch.

    Raises:
        DataError: the batch holds no tensor.
    """
    first = batch
    while isinstance(first, SEQUENCES) and first:  # the usual batch, without a generator
        first = first[0]
    if not isinstance(first, Tensor) or not first.dim():
        first = find_tensor(batch)
    if first is None:
        raise DataError(f"a batch holds no tensor ({type(batch).__name__}); the dataset must yield tensors or numbers")
    return first.shape[0]


def slice_samples(batch: Any, n_samples: int, cut: slice) -> Any:
    """Cut samples out of a batch of ``n_samples``; tensors with another first dimension stay whole."""
    return map_tensors(lambda tensor: tensor[cut] if tensor.dim() and tensor.shape[0] == n_samples else tensor, batch)
