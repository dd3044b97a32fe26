"""Rows of one HDF5 dataset, read safely from any process.

Three ways, chosen by the layout of the file and where it lies:

- ``MappedRows``: without filters, rows lie at places that can be computed and are gathered out of the mapped file.
- ``DirectRows``: one array on a network file system; its rows are read with ``preadv``: no HDF5 call, no lock, and no
  file position that a forked process would share.
- ``LibraryRows``: everything else goes through h5py. Its handle belongs to one process: it is opened at the first
  read, closed before a fork, and left out of a pickle.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from fulltilt.data.tables.hdf5_layout import Layout, find_pieces
from fulltilt.data.tables.hdf5_mapped import STREAM_WINDOW_BYTES, MappedRows
from fulltilt.errors import DataError
from fulltilt.hardware import read_filesystem


class Rows(Protocol):
    """Rows of one dataset, wherever they lie; safe to fork and to pickle."""

    layout: Layout

    @property
    def placement(self) -> str:
        """Where the rows lie: a value of the lever of that name."""
        ...

    def read(self, indices: Sequence[int] | np.ndarray) -> Any:
        """(len(indices), *row_shape), in the order asked for: an array, or a tensor where the table is one."""
        ...


def build_rows(layout: Layout, *, sample_of: Layout | None = None) -> Rows:
    """The fastest way to rows that are read from the file as they are asked for.

    Args:
        layout: Of the dataset.
        sample_of: A dataset that this one is a sample of: it is then read as the whole would be in this layout, where
            the whole lies, with as large a share of it mapped.
    """
    whole = sample_of or layout
    pieces = find_pieces(layout) if sys.platform == "linux" else None  # MappedRows makes calls that only Linux has
    if pieces is None:
        return LibraryRows(layout)
    if read_filesystem(whole.path).is_network:
        # A missing page of a mapping is one round trip of 4 KB; a read asks for the row at once.
        return DirectRows(layout) if layout.chunks is None else LibraryRows(layout)
    return MappedRows(layout, pieces, window_bytes=STREAM_WINDOW_BYTES * layout.n_bytes // max(1, whole.n_bytes))


class DirectRows:
    """Rows of a plain array inside a file. The descriptor may cross a fork: ``preadv`` names its own position."""

    placement = "stream"

    def __init__(self, layout: Layout):
        self.layout = layout
        self._row_bytes = layout.row_bytes
        self._descriptor: int | None = None

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """(len(indices), *row_shape), in the order asked for.

        Raises:
            DataError: The file has become shorter or cannot be read.
        """
        layout = self.layout
        order, runs = plan_runs(indices)
        out = np.empty((len(order), *layout.row_shape), dtype=layout.dtype)
        for first, places in runs:
            if len(places) == 1:
                self._fill(out[places[0] : places[0] + 1], first)
            else:
                block = np.empty((len(places), *layout.row_shape), dtype=layout.dtype)
                self._fill(block, first)
                out[places] = block
        return out

    def _fill(self, block: np.ndarray, first_row: int) -> None:
        view = memoryview(block.reshape(-1).view(np.uint8))
        position = (self.layout.offset or 0) + first_row * self._row_bytes
        try:
            while len(view):
                n_read = os.preadv(self._open(), [view], position)
                if n_read == 0:
                    raise DataError(f"{self.layout.path} ends before row {first_row} of {self.layout.name}; it was cut")
                view, position = view[n_read:], position + n_read
        except OSError as error:
            raise DataError(f"{self.layout.path}: row {first_row} cannot be read ({error})") from error

    def _open(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self.layout.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise DataError(f"{self.layout.path} cannot be opened ({error.strerror})") from error
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "_row_bytes": self._row_bytes, "_descriptor": None}


class LibraryRows:
    """Rows through h5py."""

    placement = "stream"

    def __init__(self, layout: Layout):
        self.layout = layout
        self._prepare()

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """(len(indices), *row_shape), in the order asked for. A chunk is read (and decompressed) once per call.

        Raises:
            DataError: The file has gone or is damaged there.
        """
        layout = self.layout
        order, runs = plan_runs(indices)
        if layout.chunk_rows and layout.chunk_rows > 1:
            runs = _plan_chunks(order, indices, layout.chunk_rows)
        out = np.empty((len(order), *layout.row_shape), dtype=layout.dtype)
        with self._lock:
            dataset = self._open()
            for first, places, *picked in runs:
                try:
                    if picked:
                        rows = picked[0]
                        out[places] = dataset[first : first + int(rows[-1]) + 1][rows]
                    elif len(places) == 1:
                        out[places[0]] = dataset[first]
                    else:
                        out[places] = dataset[first : first + len(places)]
                except _H5PY_ERRORS as error:
                    rows_there = first + (picked[0] if picked else np.arange(len(places)))
                    raise DataError(
                        f"{layout.path}: {layout.name} cannot be read at row {_find_bad_row(dataset, rows_there)} "
                        f"({error}): the file is damaged, or a filter plugin is missing; copy or make it again, or "
                        f"install the plugin"
                    ) from error
        return out

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = self._dataset = None

    def _open(self) -> Any:
        if self._dataset is None:
            import h5py

            try:
                self._file = h5py.File(self.layout.path, "r")
                self._dataset = self._file[self.layout.name]
            except (OSError, KeyError) as error:
                raise DataError(f"{self.layout.path} cannot be opened any more ({error})") from error
            _OPEN.add(self)
        return self._dataset

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._file: Any = None
        self._dataset: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.layout = state["layout"]
        self._prepare()


_H5PY_ERRORS = (OSError, KeyError, RuntimeError)


def _find_bad_row(dataset: Any, rows: np.ndarray) -> int:
    """The first that cannot be read by itself; the first of all where each can."""
    for row in rows.tolist():
        try:
            dataset[row]
        except _H5PY_ERRORS:
            return row
    return int(rows[0])


def plan_runs(indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, Iterator[tuple[int, np.ndarray]]]:
    """Indices in rising order, and runs of neighbours: (first row, places in the answer)."""
    rows = np.asarray(indices, dtype=np.int64)
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    starts = np.concatenate(([0], breaks)) if len(rows) else np.empty(0, np.int64)
    ends = np.append(breaks, len(rows))
    return order, ((int(ordered[a]), order[a:b]) for a, b in zip(starts, ends, strict=False))


def _plan_chunks(
    order: np.ndarray, indices: Sequence[int] | np.ndarray, chunk_rows: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """One read per touched chunk: (first row, places in the answer, rows counted from the first)."""
    ordered = np.asarray(indices, dtype=np.int64)[order]
    breaks = np.flatnonzero(np.diff(ordered // chunk_rows)) + 1
    for places, rows in zip(np.split(order, breaks), np.split(ordered, breaks), strict=True):
        if len(rows):
            yield int(rows[0]), places, rows - rows[0]


_OPEN: weakref.WeakSet[LibraryRows] = weakref.WeakSet()


def _close_all() -> None:
    for rows in list(_OPEN):
        rows.close()


# A handle that crossed a fork would share one file position, and one HDF5 library state, between two processes.
os.register_at_fork(before=_close_all)
