"""Files of the HDF5 benchmark: the same rows in several layouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import h5py
import numpy as np

LAYOUTS = ("one array", "16 whole rows a chunk", "h5py's own chunks")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of one size, float32."""

    name: str  # "5 KB rows"
    shape: tuple[int, ...]  # of one row
    n_rows: int

    @property
    def row_bytes(self) -> int:
        return 4 * int(np.prod(self.shape))


def find_chunks(rows: Rows, layout: str) -> tuple[int, ...] | bool | None:
    """What to ask h5py for."""
    if layout == "one array":
        return None
    return True if layout == "h5py's own chunks" else (16, *rows.shape)


def write_file(folder: Path, rows: Rows, layout: str) -> Path:
    """``input`` (N, …) and ``label`` (N,), a row's label being its number. The pages are in the page cache after it."""
    path = folder / f"{rows.row_bytes}-{LAYOUTS.index(layout)}.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        table = file.create_dataset(
            "input", (rows.n_rows, *rows.shape), dtype="f4", chunks=find_chunks(rows, layout), fillvalue=None
        )
        step = (table.chunks or (1024,))[0]
        for first in range(0, rows.n_rows, step):
            end = min(first + step, rows.n_rows)
            table[first:end] = rng.random((end - first, *rows.shape), dtype=np.float32)
        file["label"] = np.arange(rows.n_rows)
    return path


def describe_chunks(path: Path) -> str:
    with h5py.File(path) as file:
        return f"chunks {file['input'].chunks}" if file["input"].chunks else "no chunks"
