"""Read rows of one HDF5 dataset safely from any process.

The layout and the file system choose one of three readers:

- ``MappedRows``: rows without filters lie at computed positions and are gathered out of the mapped file.
- ``DirectRows``: one array on a network file system is read with ``preadv``, without HDF5, a lock, or a file position
  that a forked process would share.
- ``LibraryRows``: everything else goes through h5py. A handle belongs to one process: it is opened at the first read,
  closed before a fork, and left out of a pickle.
"""

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from fulltilt.data.tables.hdf5_file import READ_ERRORS, find_bad_row
from fulltilt.data.tables.hdf5_layout import Layout, find_pieces
from fulltilt.data.tables.hdf5_mapped import STREAM_WINDOW_BYTES, MappedRows, open_descriptor
from fulltilt.errors import DataError
from fulltilt.hardware import read_filesystem


class Rows(Protocol):
    """Reads rows of one dataset, wherever they lie; safe to fork and to pickle."""

    layout: Layout

    @property
    def placement(self) -> str:
        """Return where the rows lie, as a value of ``data.placement``, such as ``stream`` or ``ram``."""
        ...

    def read(self, indices: Sequence[int] | np.ndarray) -> Any:
        """Read (len(indices), *row_shape) in the order asked for: an array, or a tensor where the table is one."""
        ...


def build_rows(layout: Layout, *, sample_of: Layout | None = None) -> Rows:
    """Build the fastest reader of a dataset in its file.

    Args:
        layout: Of the dataset.
        sample_of: The dataset that this one is a sample of. The sample is then read as the whole would be: by the
            reader of its file system, with as large a share mapped.
    """
    whole = sample_of or layout
    pieces = find_pieces(layout) if sys.platform == "linux" else None  # MappedRows makes calls that only Linux has
    if pieces is None:
        return LibraryRows(layout)
    if read_filesystem(whole.path).is_network:
        # A missing page of a mapping is one round trip of 4 KB; a read asks for the row at once.
        return DirectRows(layout) if layout.chunks is None else LibraryRows(layout)
    return MappedRows(layout, pieces, STREAM_WINDOW_BYTES * layout.n_bytes // max(1, whole.n_bytes))


class DirectRows:
    """Reads rows of an unchunked HDF5 dataset on a network file system with ``preadv``, which is safe across a fork."""

    placement = "stream"

    def __init__(self, layout: Layout):
        self.layout = layout
        self._descriptor: int | None = None

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read (len(indices), *row_shape) in the order asked for; DataError where the file became shorter."""
        layout = self.layout
        if self._descriptor is None:
            self._descriptor = open_descriptor(self, layout.path)
        out = np.empty((len(indices), *layout.row_shape), dtype=layout.dtype)
        for rows, places in plan_runs(indices):
            if len(places) == 1:
                self._fill(self._descriptor, out[places[0] : places[0] + 1], int(rows[0]))
            else:
                block = np.empty((len(places), *layout.row_shape), dtype=layout.dtype)
                self._fill(self._descriptor, block, int(rows[0]))
                out[places] = block
        return out

    def _fill(self, descriptor: int, block: np.ndarray, first_row: int) -> None:
        view = memoryview(block.reshape(-1).view(np.uint8))
        position = (self.layout.offset or 0) + first_row * self.layout.row_bytes
        try:
            while len(view):
                n_read = os.preadv(descriptor, [view], position)
                if n_read == 0:
                    raise DataError(f"{self.layout.path} ends before row {first_row} of {self.layout.name}; it was cut")
                view, position = view[n_read:], position + n_read
        except OSError as error:
            raise DataError(f"{self.layout.path}: row {first_row} cannot be read ({error})") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layout,)


class LibraryRows:
    """Reads rows through h5py."""

    placement = "stream"

    def __init__(self, layout: Layout):
        self.layout = layout
        self._lock = threading.Lock()
        self._file: Any = None
        self._dataset: Any = None

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read (len(indices), *row_shape) in the order asked for; each chunk is read and decompressed once."""
        layout = self.layout
        out = np.empty((len(indices), *layout.row_shape), dtype=layout.dtype)
        with self._lock:
            dataset = self._open()
            for rows, places in plan_runs(indices, layout.chunk_rows or 1):
                try:
                    block = dataset[rows[0] : rows[-1] + 1]
                    out[places] = block if (layout.chunk_rows or 1) == 1 else block[rows - rows[0]]
                except READ_ERRORS as error:
                    raise DataError(
                        f"{layout.path}: {layout.name} cannot be read at row {find_bad_row(dataset, rows)} "
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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layout,)


def plan_runs(indices: Sequence[int] | np.ndarray, chunk_rows: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield runs of neighbours, or of rows in one chunk: their rising row numbers and positions in ``indices``."""
    rows = np.asarray(indices, dtype=np.int64)
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    is_break = np.diff(ordered) != 1 if chunk_rows == 1 else np.diff(ordered // chunk_rows) != 0
    borders = [0, *(np.flatnonzero(is_break) + 1).tolist(), len(rows)]
    for start, end in itertools.pairwise(borders if len(rows) else ()):
        yield ordered[start:end], order[start:end]


_OPEN: weakref.WeakSet[LibraryRows] = weakref.WeakSet()


def _close_all() -> None:
    for rows in list(_OPEN):
        rows.close()


# A handle that crossed a fork would share one file position, and one HDF5 library state, between two processes.
os.register_at_fork(before=_close_all)
