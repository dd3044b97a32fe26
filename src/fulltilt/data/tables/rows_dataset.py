"""Datasets whose inputs and targets are rows of two tables, wherever the tables lie."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fulltilt.data.batched import BatchedDataset, Indices
from fulltilt.data.tables.hdf5_layout import Layout
from fulltilt.data.tables.hdf5_rows import Rows


class RowsDataset(BatchedDataset):
    """Base of datasets that turn rows into a batch in ``get_batch``.

    Attributes:
        path: The file.
        rows: (N,) row numbers in the tables, rising.
        sources: Tables of inputs and of targets.
        transform: A callable on inputs in host memory, or None.
    """

    path: Path
    rows: np.ndarray
    sources: tuple[Rows, Rows]
    transform: Any = None

    def __len__(self) -> int:
        return len(self.rows)

    def read_rows(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Read inputs and targets of samples from the tables, in the types that torch trains on."""
        rows = self.rows[np.asarray(indices)]
        inputs, targets = (to_tensor(source.read(rows)) for source in self.sources)
        return inputs, targets

    def with_sources(self, sources: tuple[Rows, Rows], *, rows: np.ndarray | None = None) -> Self:
        """Return the same samples out of other tables; ``self`` stays unchanged."""
        other = copy.copy(self)
        other.sources = sources
        if rows is not None:
            other.rows = rows
        return other

    def name_sample(self, index: int) -> str:
        return f"row {int(self.rows[index])} of {self.path}"

    @property
    def placement(self) -> str:
        return self.sources[0].placement

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return self.sources[0].layout, self.sources[1].layout


def to_tensor(rows: np.ndarray | Tensor) -> Tensor:
    """Turn floats into float32 and integers but uint8 into int64; a tensor stays on its device."""
    if isinstance(rows, np.ndarray):
        dtype = np.float32 if rows.dtype.kind == "f" else rows.dtype if rows.dtype == np.uint8 else np.int64
        rows = torch.from_numpy(rows.astype(dtype, copy=False))
    if rows.dtype in (torch.float32, torch.int64, torch.uint8):
        return rows
    return rows.to(torch.float32 if rows.is_floating_point() else torch.int64)
