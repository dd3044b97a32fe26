"""How an HDF5 dataset lies in its file, and where the bytes of a row are.

A dataset without filters is plain bytes: one array (contiguous) or a grid of equal arrays (chunks). A row is then one
piece of the file, or one piece of every chunk that the row crosses, and its place can be computed.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

MAX_CHUNKS = 4_000_000  # a table of more would take over 32 MB in every process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What an HDF5 dataset looks like.

    Attributes:
        chunks: Shape of a chunk, None when the dataset is one array.
        filters: ``("gzip(4)", "shuffle")``, empty when nothing is compressed.
        offset: Where the array starts in the file; None when it is chunked or not plain.
        has_plain_chunks: Every chunk is there, of a native type, without a filter.
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
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def chunk_rows(self) -> int | None:
        return self.chunks[0] if self.chunks else None

    @property
    def chunk_bytes(self) -> int | None:
        return int(np.prod(self.chunks, dtype=np.int64)) * self.dtype.itemsize if self.chunks else None

    @property
    def n_chunks_a_row(self) -> int:
        """Chunks that one row crosses; 1 for a dataset that is one array."""
        if not self.chunks:
            return 1
        return int(np.prod([-(-n // c) for n, c in zip(self.row_shape, self.chunks[1:], strict=True)], dtype=np.int64))

    @property
    def read_bytes_a_row(self) -> int:
        """Bytes that one row takes out of the file when whole chunks have to be read for it."""
        return self.n_chunks_a_row * self.chunk_bytes if self.chunk_bytes else self.row_bytes

    def count_rows_in(self, n_bytes: int) -> int:
        """Rows in about ``n_bytes``: whole chunks, and one of them at least; it may be more than there are rows."""
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
        has_plain_chunks=bool(is_plain and dataset.chunks and _has_every_chunk(dataset)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Where the bytes of every row lie, in rows of P pieces of equal size.

    Attributes:
        starts: (G, P) byte positions of the chunks, G of them along the rows; (1, 1) for one array.
        group_rows: Rows of a chunk; of the whole array.
        piece_bytes: Bytes of a row in one chunk.
        grid: Chunks along every dimension of a row, () where a row is one piece.
        tile: Shape of a row in one chunk.
    """

    starts: np.ndarray
    group_rows: int
    piece_bytes: int
    grid: tuple[int, ...]
    tile: tuple[int, ...]

    @property
    def n_pieces(self) -> int:
        return self.starts.shape[1]

    @property
    def end(self) -> int:
        """The first byte behind the last piece."""
        return int(self.starts.max()) + self.group_rows * self.piece_bytes

    @functools.cached_property
    def is_one_array(self) -> bool:
        return self.starts.shape == (1, 1)

    def find(self, rows: np.ndarray) -> np.ndarray:
        """(B, P) byte positions of the pieces of ``rows``."""
        group, within = np.divmod(rows, self.group_rows)
        return self.starts[group] + (within * self.piece_bytes)[:, None]

    def find_first(self, row: int) -> int:
        """Byte position of the first piece of one row."""
        group, within = divmod(row, self.group_rows)
        return int(self.starts[group, 0]) + within * self.piece_bytes


def find_pieces(layout: Layout) -> Pieces | None:
    """Where the rows of a plain dataset lie, checked on its first and its last one; None when it is not plain.

    Cost: for chunks, a walk over their index: about 4 µs a chunk.
    """
    import h5py

    if layout.offset is None and not layout.has_plain_chunks:
        return None
    with h5py.File(layout.path, "r") as file:
        dataset = file[layout.name]
        pieces = _place_array(layout) if layout.chunks is None else _place_chunks(layout, dataset)
        return pieces if pieces is not None and _agrees(pieces, layout, dataset) else None


def assemble(raw_BPb: np.ndarray, pieces: Pieces, layout: Layout) -> np.ndarray:
    """Pieces of rows (B, P, piece_bytes) uint8 put together to rows (B, *row_shape)."""
    n = len(raw_BPb)
    if not pieces.grid:
        return raw_BPb.view(layout.dtype).reshape(n, *layout.row_shape)
    k = len(pieces.grid)
    tiles = raw_BPb.view(layout.dtype).reshape(n, *pieces.grid, *pieces.tile)
    crossed = tiles.transpose(0, *(axis for j in range(k) for axis in (1 + j, 1 + k + j)))
    padded = crossed.reshape(n, *(g * t for g, t in zip(pieces.grid, pieces.tile, strict=True)))
    return np.ascontiguousarray(padded[(slice(None), *(slice(size) for size in layout.row_shape))])


def _place_array(layout: Layout) -> Pieces:
    starts = np.array([[layout.offset]], dtype=np.int64)
    return Pieces(starts=starts, group_rows=layout.n_rows, piece_bytes=layout.row_bytes, grid=(), tile=())


def _place_chunks(layout: Layout, dataset: Any) -> Pieces | None:
    chunks = layout.chunks
    assert chunks is not None
    counts = tuple(-(-n // c) for n, c in zip(layout.shape, chunks, strict=True))
    if int(np.prod(counts, dtype=np.int64)) > MAX_CHUNKS:
        return None
    starts = np.full(counts, -1, dtype=np.int64)

    def note(chunk: Any) -> None:
        starts[tuple(at // c for at, c in zip(chunk.chunk_offset, chunks, strict=True))] = chunk.byte_offset

    dataset.id.chunk_iter(note)
    if starts.min() < 0:
        return None
    piece_bytes = int(np.prod(chunks[1:], dtype=np.int64)) * layout.dtype.itemsize
    is_whole = layout.n_chunks_a_row == 1 and chunks[1:] == layout.row_shape
    return Pieces(
        starts=starts.reshape(counts[0], -1),
        group_rows=chunks[0],
        piece_bytes=piece_bytes,
        grid=() if is_whole else counts[1:],
        tile=() if is_whole else chunks[1:],
    )


def _agrees(pieces: Pieces, layout: Layout, dataset: Any) -> bool:
    """A user block, or what a later version of the format may bring, moves bytes; then h5py reads instead."""
    ends = np.array([0, layout.n_rows - 1])
    raw = np.empty((2, pieces.n_pieces, pieces.piece_bytes), dtype=np.uint8)
    with layout.path.open("rb") as stream:
        for out_Pb, positions_P in zip(raw, pieces.find(ends), strict=True):
            for out, position in zip(out_Pb, positions_P.tolist(), strict=True):
                stream.seek(position)
                if stream.readinto(out) != len(out):
                    return False
    rows = assemble(raw, pieces, layout)
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


def _has_every_chunk(dataset: Any) -> bool:
    """A chunk that was never written has no bytes in the file: its rows are the fill value."""
    counts = (-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True))
    return dataset.id.get_num_chunks() == int(np.prod(list(counts), dtype=np.int64))


def _list_filters(dataset: Any) -> tuple[str, ...]:
    properties = dataset.id.get_create_plist()
    filters = (properties.get_filter(i) for i in range(properties.get_nfilters()))
    known = {"deflate": "gzip"}
    return tuple(
        known.get(text, text) for text in (name.decode(errors="replace") or str(code) for code, _, _, name in filters)
    )
