"""Read samples from two datasets of any HDF5 file, chosen by their names."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fulltilt.data.batched import BatchedDataset, Indices
from fulltilt.data.paths import resolve_path
from fulltilt.data.splits import Split, split_stratified
from fulltilt.data.tables.hdf5_file import find_layouts
from fulltilt.data.tables.hdf5_layout import Layout
from fulltilt.data.tables.hdf5_rows import Rows, build_rows
from fulltilt.data.transforms.pipeline import Transform, apply_transform, read_sample_shape, resolve_transform
from fulltilt.errors import DataError


def hdf5(
    split: Split = "train",
    transform: Transform = None,
    path: str | None = None,
    inputs: str = "input",
    targets: str = "label",
    val_fraction: float = 0.1,
    seed: int = 0,
    base_dir: str | None = None,
) -> "Hdf5Dataset":
    """Build a dataset of inputs and targets, two HDF5 datasets of one file; rows are read per batch.

    Args:
        transform: For inputs of shape (C, H, W).
        inputs: Name of the dataset of inputs; ``group/name`` works. Floats become float32; uint8 is taken for pixels.
        targets: Name of the dataset of targets. Floats become float32, whole numbers int64.
        val_fraction: Share of rows for validation, drawn with ``seed``; 0 gives all rows to training, 1 to validation.

    Raises:
        DataError: The file or a dataset of it cannot be used; says what is there.
    """
    file = require_path(path, base_dir)
    rows = pick_rows(file, [inputs, targets], split, val_fraction=val_fraction, seed=seed)
    return Hdf5Dataset(file, inputs, targets, rows=rows, transform=resolve_transform(transform, base_dir=base_dir))


class RowsDataset(BatchedDataset):
    """Reads inputs and targets from two tables by row number; subclasses make batches of them in ``get_batch``.

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
        """Return a copy that reads from other tables, and other rows if given; ``self`` stays unchanged."""
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


class Hdf5Dataset(RowsDataset):
    """Serves chosen rows of an HDF5 file as samples; safe to fork and to pickle.

    Attributes:
        target_shape: Shape of one target, () for a class.
        n_classes: 1 + the largest target when targets are single whole numbers, else None.
    """

    name = "hdf5"

    def __init__(self, path: Path, inputs: str, targets: str, *, rows: np.ndarray, transform: Callable | None = None):
        inputs_layout, targets_layout = find_layouts(path, [inputs, targets])
        self.path, self.rows, self.transform = path, rows, transform
        self.sources = build_rows(inputs_layout), build_rows(targets_layout)
        self.yields_pixels = transform is not None or inputs_layout.dtype == np.uint8
        self.target_shape = targets_layout.row_shape
        self.n_classes = self._count_classes()
        self.sample_shape = read_sample_shape(lambda: self[0][0])

    def get_batch(self, indices: Indices, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read a batch; DataError where the file was cut, damaged or removed since it was opened."""
        inputs, targets = self.read_rows(indices)
        targets = targets.long() if targets.dtype == torch.uint8 else targets
        return apply_transform(self.transform, inputs, generator), targets

    def _count_classes(self) -> int | None:
        targets = self.sources[1]
        layout = targets.layout
        if layout.row_shape not in ((), (1,)) or layout.dtype.kind not in "iub":
            return None
        step = 1 << 20
        return 1 + max(
            int(targets.read(range(first, min(first + step, layout.n_rows))).max())
            for first in range(0, layout.n_rows, step)
        )


def require_path(path: str | None, base_dir: str | None) -> Path:
    if not path:
        raise DataError("an HDF5 dataset needs its file; set data.path or give --data-path")
    return resolve_path(path, base_dir)


def pick_rows(path: Path, names: list[str], split: str, *, val_fraction: float, seed: int) -> np.ndarray:
    """Check that the file holds the datasets ``names``, and return the row numbers of one split."""
    n_rows = find_layouts(path, names)[0].n_rows
    if val_fraction == {"train": 0, "val": 1}.get(split):
        return np.arange(n_rows)
    one_class = np.zeros(n_rows, dtype=np.int64)
    return split_stratified(one_class, split, val_fraction=val_fraction, seed=seed, what=str(path))


def to_tensor(rows: np.ndarray | Tensor) -> Tensor:
    """Convert floats to float32, and all else except uint8 to int64; a tensor stays on its device."""
    if isinstance(rows, np.ndarray):
        dtype = np.float32 if rows.dtype.kind == "f" else rows.dtype if rows.dtype == np.uint8 else np.int64
        rows = torch.from_numpy(rows.astype(dtype, copy=False))
    if rows.dtype in (torch.float32, torch.int64, torch.uint8):
        return rows
    return rows.to(torch.float32 if rows.is_floating_point() else torch.int64)
