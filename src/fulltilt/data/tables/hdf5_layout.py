"""The layout of an HDF5 dataset in its file, and where the bytes of a row lie.

A dataset without filters is plain bytes: one array (contiguous) or a grid of equal arrays (chunks). A row is then one
piece of the file, or one piece of every chunk that it crosses, at positions that can be computed.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

MAX_CHUNKS = 4_000_000  # a table of more would take over 32 MB in every process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The shape, type and storage of an HDF5 dataset.

    Attributes:
        chunks: Shape of a chunk; None for one array.
        filters: Such as ``("shuffle", "gzip")``.
        offset: Byte position of the array in the file; None where it is chunked or not plain.
        has_plain_chunks: Whether it has chunks of a native type without a filter.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    offset: int | None
    has_plain_chunks: bool

    @property
    def n_rows(self) -> int:
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def chunk_rows(self) -> int | None:
        return self.chunks[0] if self.chunks else None

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along every dimension; () for one array."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True)) if self.chunks else ()

    @property
    def n_chunks_a_row(self) -> int:
        """How many chunks one row crosses; 1 for one array."""
        return math.prod(self.grid[1:])

    @property
    def read_bytes_a_row(self) -> int:
        """Bytes read for one row where only whole chunks can be read."""
        return self.n_chunks_a_row * math.prod(self.chunks) * self.dtype.itemsize if self.chunks else self.row_bytes

    @property
    def is_numeric(self) -> bool:
        return self.dtype.kind in "iufb"

    def count_rows_in(self, n_bytes: int) -> int:
        """Count the rows of whole chunks in about ``n_bytes``: at least one chunk, perhaps more rows than there are."""
        unit = self.chunk_rows or 1
        return max(1, n_bytes // max(1, unit * self.row_bytes)) * unit


def describe_layout(path: Path, dataset: Any) -> Layout:
    """Read the layout of an open ``h5py.Dataset``."""
    is_plain = _is_plain(dataset)
    return Layout(
        path=path,
        name=dataset.name,
        shape=tuple(dataset.shape),
        dtype=dataset.dtype,
        chunks=tuple(dataset.chunks) if dataset.chunks else None,
        filters=_list_filters(dataset),
        offset=dataset.id.get_offset() if is_plain and not dataset.chunks else None,
        has_plain_chunks=bool(is_plain and dataset.chunks),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """The byte positions of all rows, each of P pieces of equal size.

    Attributes:
        starts: (G, P) positions of the chunks, G of them along the rows; (1, 1) for one array.
        group_rows: Rows of a chunk, or of the whole array.
        piece_bytes: Bytes of a row in one chunk.
        grid: Chunks along every dimension of a row; () where a row is one piece.
        tile: Shape of a row in one chunk.
    """

    starts: np.ndarray
    group_rows: int
    piece_bytes: int
    grid: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()

    @property
    def n_pieces(self) -> int:
        return self.starts.shape[1]

    @property
    def end(self) -> int:
        """Position of the first byte behind the last piece."""
        return int(self.starts.max()) + self.group_rows * self.piece_bytes

    def find(self, rows: np.ndarray) -> np.ndarray:
        """Compute the (B, P) positions of the pieces of ``rows``."""
        group, within = np.divmod(rows, self.group_rows)
        return self.starts[group] + (within * self.piece_bytes)[:, None]

    def find_first(self, row: int) -> int:
        """Compute the position of the first piece of one row."""
        group, within = divmod(row, self.group_rows)
        return int(self.starts[group, 0]) + within * self.piece_bytes


def find_pieces(layout: Layout) -> Pieces | None:
    """Find the rows of a plain dataset and check the first and the last one; None where it is not plain.

    Cost: about 4 µs a chunk.
    """
    import h5py

    if layout.offset is None and not layout.has_plain_chunks:
        return None
    with h5py.File(layout.path, "r") as file:
        dataset = file[layout.name]
        if layout.chunks is None:
            starts = np.array([[layout.offset]], dtype=np.int64)
            pieces = Pieces(starts=starts, group_rows=layout.n_rows, piece_bytes=layout.row_bytes)
        else:
            pieces = _find_chunks(layout, layout.chunks, dataset)
        return pieces if pieces is not None and _agrees(pieces, layout, dataset) else None


def assemble(raw_BPb: np.ndarray, pieces: Pieces, layout: Layout) -> np.ndarray:
    """Join pieces (B, P, piece_bytes) uint8 to rows (B, *row_shape)."""
    n = len(raw_BPb)
    if not pieces.grid:
        return raw_BPb.view(layout.dtype).reshape(n, *layout.row_shape)
    k = len(pieces.grid)
    tiles = raw_BPb.view(layout.dtype).reshape(n, *pieces.grid, *pieces.tile)
    crossed = tiles.transpose(0, *(axis for j in range(k) for axis in (1 + j, 1 + k + j)))
    padded = crossed.reshape(n, *(g * t for g, t in zip(pieces.grid, pieces.tile, strict=True)))
    return np.ascontiguousarray(padded[(slice(None), *(slice(size) for size in layout.row_shape))])


def _find_chunks(layout: Layout, chunks: tuple[int, ...], dataset: Any) -> Pieces | None:
    if math.prod(layout.grid) > MAX_CHUNKS:
        return None
    starts = np.full(layout.grid, -1, dtype=np.int64)

    def note(chunk: Any) -> None:
        starts[tuple(at // c for at, c in zip(chunk.chunk_offset, chunks, strict=True))] = chunk.byte_offset

    dataset.id.chunk_iter(note)
    if starts.min() < 0:  # rows of a chunk that was never written are the fill value
        return None
    is_whole = chunks[1:] == layout.row_shape
    return Pieces(
        starts=starts.reshape(layout.grid[0], -1),
        group_rows=chunks[0],
        piece_bytes=math.prod(chunks[1:]) * layout.dtype.itemsize,
        grid=() if is_whole else layout.grid[1:],
        tile=() if is_whole else chunks[1:],
    )


def _agrees(pieces: Pieces, layout: Layout, dataset: Any) -> bool:
    """Compare two rows with what h5py reads: a user block or a later version of the format may move bytes."""
    ends = np.array([0, layout.n_rows - 1])
    positions = pieces.find(ends).ravel().tolist()
    with layout.path.open("rb") as stream:
        raw = b"".join(os.pread(stream.fileno(), pieces.piece_bytes, position) for position in positions)
    if len(raw) != len(positions) * pieces.piece_bytes:
        return False
    rows = assemble(np.frombuffer(raw, np.uint8).reshape(2, pieces.n_pieces, -1), pieces, layout)
    return all(
        mine.tobytes() == np.asarray(dataset[int(row)], dtype=layout.dtype).tobytes()
        for mine, row in zip(rows, ends, strict=True)
    )


def _is_plain(dataset: Any) -> bool:
    native = dataset.dtype.isnative and dataset.dtype.kind in "iufb" and dataset.dtype.fields is None
    stored_here = not dataset.external and not dataset.is_virtual
    return bool(
        native and stored_here and dataset.size and dataset.ndim and not dataset.id.get_create_plist().get_nfilters()
    )


def _list_filters(dataset: Any) -> tuple[str, ...]:
    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(i) for i in range(properties.get_nfilters())]
    names = [name.decode(errors="replace") or str(code) for code, _, _, name in filters]
    return tuple("gzip" if name == "deflate" else name for name in names)
