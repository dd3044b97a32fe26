"""The base class of datasets that read a whole batch at a time."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

Indices = Sequence[int] | np.ndarray
"""The numbers of the samples of a batch."""


class BatchedDataset(Dataset, abc.ABC):
    """Reads single samples and lists of them by ``get_batch``, which subclasses define."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def get_batch(self, indices: Indices, **options: Any) -> tuple[Tensor, Tensor]:
        """Read inputs and targets of samples; the batch is the first dimension of both."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs, targets = self.get_batch([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Indices) -> list[tuple[Tensor, Tensor]]:
        inputs, targets = self.get_batch(indices)
        return list(zip(inputs, targets, strict=True))


def name_sample(dataset: Any, index: int) -> str:
    """Name one sample: by the dataset's own ``name_sample`` where it has one, else by its number."""
    name = getattr(dataset, "name_sample", None)
    return name(index) if callable(name) else f"sample {index} of {type(dataset).__name__}"
