"""Writes an HDF5 file again with its rows laid out for training; everything else in it stays as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.data.new_file import check_name, check_room, new_file, reserve
from fulltilt.data.tables.hdf5_file import find_dataset, open_hdf5
from fulltilt.data.tables.hdf5_frame import Compression, Table, write_frame
from fulltilt.data.tables.hdf5_layout import describe_layout
from fulltilt.errors import DataError, UsageError

COMPRESSIONS: tuple[Compression, ...] = ("none", "lzf", "gzip")
CHUNK_BYTES = 1 << 20  # of a compressed chunk when nobody says: what block shuffle reads in one go
_BLOCK_BYTES = 32 << 20
_HEADROOM_BYTES = 4 << 20  # headers, chunk indexes

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repacked:
    """What was written.

    Attributes:
        datasets: Names of those that were laid out anew; the others were copied.
        n_rows: Of each of them.
        source_bytes: Size of the file that was read.
        target_bytes: Size of the file that was written.
        checksum: BLAKE2b over all rows that were laid out anew, equal in both files.
        seconds: For writing and reading back.
    """

    datasets: tuple[str, ...]
    n_rows: tuple[int, ...]
    source_bytes: int
    target_bytes: int
    checksum: str
    seconds: float


def repack_hdf5(
    source: str | Path,
    target: str | Path,
    *,
    datasets: Sequence[str] = (),
    chunk_rows: int | None = None,
    compression: Compression = "none",
    force: bool = False,
    progress: Progress | None = None,
) -> Repacked:
    """Lay the samples of a file out anew: as one array each, or in chunks of whole rows.

    Samples are the datasets with as many rows as the largest one, and those that ``datasets`` names. All else (other
    datasets, groups, links, attributes) is copied. The target appears under its name when every row was read back from
    it and found equal.

    Memory: one block of 32 MiB, or one row of the source's chunks where those are larger.

    Args:
        source: The file to read.
        target: The file to write.
        datasets: Names of datasets with another number of rows that are samples too, such as those for validation.
        chunk_rows: Rows of the largest dataset in a chunk, the other datasets take chunks of about as many bytes.
            None: one array without chunks, or chunks of about 1 MiB when compressed.
        compression: ``gzip`` (level 4, bytes shuffled), ``lzf`` (faster, larger; h5py's own) or ``none``.
        force: Replace an existing target.
        progress: Called with (bytes done, bytes to do); writing and reading back count one pass each.

    Raises:
        DataError: The source cannot be read or repacked, the target exists, or a row came back different.
        StorageError: There is no room for the target; nothing is left of it.
        UsageError: Source and target are one file, or a number is out of range.
    """
    source, target = Path(source), Path(target)
    started = time.perf_counter()
    if chunk_rows is not None and chunk_rows < 1:
        raise UsageError(f"chunk_rows {chunk_rows} must be 1 or more")
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r} is not known; use {', '.join(COMPRESSIONS)}")
    with open_hdf5(source) as file:
        if target.exists() and target.samefile(source):
            raise UsageError(f"{target} is the file to be read; give the new file another name")
        check_name(target, force=force)
        plan = _plan_tables(source, file, datasets, chunk_rows, compression)
        needed_bytes = _estimate_bytes(source, file, plan)
        remedy = "use --compression gzip on another disk" if compression == "none" else "choose another disk"
        check_room(target, needed_bytes, remedy=remedy)
        with new_file(target, remedy=remedy) as temporary:
            write_frame(source, file, temporary, plan)
            reserve(temporary, needed_bytes)
            report = _Progress(progress, 2 * sum(table.n_bytes for table in plan.values()))
            written = _write_rows(source, file, temporary, plan, report)
            _compare(temporary, plan, written, report)
    return Repacked(
        datasets=tuple(plan),
        n_rows=tuple(table.n_rows for table in plan.values()),
        source_bytes=source.stat().st_size,
        target_bytes=target.stat().st_size,
        checksum=written,
        seconds=time.perf_counter() - started,
    )


def choose_chunk_rows(row_bytes: int, n_rows: int) -> int:
    """Rows of a chunk of about ``CHUNK_BYTES``."""
    return min(n_rows, max(1, CHUNK_BYTES // max(1, row_bytes)))


def find_largest(path: Path, found: Mapping[str, Any]) -> Any:
    """The dataset whose rows are samples, among those that ``find_tables`` found.

    Raises:
        DataError: There is none.
    """
    if not found:
        raise DataError(f"{path} holds no dataset with rows of a fixed size; there is nothing to lay out")
    return max(found.values(), key=lambda item: item.nbytes)


def find_tables(file: Any) -> dict[str, Any]:
    """Every dataset with rows of a fixed size, by name."""
    import h5py

    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape and item.size and item.dtype.kind != "O":
            found[name] = item

    file.visititems(visit)
    return found


def _plan_tables(
    path: Path, file: Any, names: Sequence[str], chunk_rows: int | None, compression: Compression
) -> dict[str, Table]:
    found = find_tables(file)
    largest = find_largest(path, found)
    named = {_name_table(path, file, name, found) for name in names}
    n_rows, largest_row_bytes = largest.shape[0], largest.nbytes // largest.shape[0]
    if chunk_rows is None and compression != "none":
        chunk_rows = choose_chunk_rows(largest_row_bytes, n_rows)
    chunk_bytes = None if chunk_rows is None else chunk_rows * largest_row_bytes
    tables = {}
    for name, item in found.items():
        if item.shape[0] == n_rows or name in named:
            row_bytes = item.nbytes // item.shape[0]
            tables[name] = Table(
                name=name,
                n_rows=item.shape[0],
                row_bytes=row_bytes,
                read_rows=describe_layout(path, item).count_rows_in(_BLOCK_BYTES),
                chunk_rows=None if chunk_bytes is None else min(item.shape[0], max(1, chunk_bytes // row_bytes)),
                compression=compression,
            )
    return tables


def _name_table(path: Path, file: Any, name: str, found: Mapping[str, Any]) -> str:
    """The place in the file of the dataset that is called ``name``, which may be a link."""
    item = find_dataset(path, file, name)
    if item.file.filename != file.filename:
        raise DataError(f"{path}: {name} lies in {item.file.filename}; repack that file, and leave it out of --dataset")
    place = next((place for place, table in found.items() if table == item), None)
    if place is None:
        raise DataError(f"{path}: {name} has no rows of a fixed size; leave it out of --dataset")
    return place


def _estimate_bytes(path: Path, file: Any, plan: dict[str, Table]) -> int:
    """The rows as they are in memory, as compression may fail on them, and what else lies in the source."""
    stored_bytes = sum(file[name].id.get_storage_size() for name in plan)
    padded_bytes = sum(table.n_bytes + (table.chunk_rows or 0) * table.row_bytes for table in plan.values())
    n_chunks = sum(-(-table.n_rows // table.chunk_rows) for table in plan.values() if table.chunk_rows)
    return padded_bytes + max(0, path.stat().st_size - stored_bytes) + 64 * n_chunks + _HEADROOM_BYTES


def _write_rows(path: Path, file: Any, temporary: Path, plan: dict[str, Table], report: _Progress) -> str:
    """Copy block by block; returns the checksum of what was read."""
    import h5py

    digest = hashlib.blake2b(digest_size=16)
    with h5py.File(temporary, "r+") as target:
        for table in plan.values():
            for first, rows in _read_blocks(path, file[table.name], table):
                target[table.name][first : first + len(rows)] = rows
                digest.update(np.ascontiguousarray(rows).view(np.uint8))
                report.add(rows.nbytes)
    return digest.hexdigest()


def _compare(temporary: Path, plan: dict[str, Table], written: str, report: _Progress) -> None:
    digest = hashlib.blake2b(digest_size=16)
    with open_hdf5(temporary) as file:
        for table in plan.values():
            dataset = file[table.name]
            again = dataclasses.replace(
                table, read_rows=describe_layout(temporary, dataset).count_rows_in(_BLOCK_BYTES)
            )
            for _, rows in _read_blocks(temporary, dataset, again):
                digest.update(np.ascontiguousarray(rows).view(np.uint8))
                report.add(rows.nbytes)
    if digest.hexdigest() != written:
        raise DataError(f"rows read back from {temporary} differ from what was written; check the disk and try again")


def _read_blocks(path: Path, dataset: Any, table: Table) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(0, table.n_rows, table.read_rows):
        end = min(first + table.read_rows, table.n_rows)
        try:
            yield first, dataset[first:end]
        except (OSError, RuntimeError) as error:
            row = next((row for row in range(first, end) if not _can_read(dataset, row)), first)
            raise DataError(f"{path}: {table.name} cannot be read at row {row} ({error}); it is damaged") from error


def _can_read(dataset: Any, row: int) -> bool:
    try:
        dataset[row]
    except (OSError, RuntimeError):
        return False
    return True


class _Progress:
    def __init__(self, tell: Progress | None, total: int):
        self._tell, self._total, self._done = tell, total, 0

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._tell is not None:
            self._tell(self._done, self._total)
