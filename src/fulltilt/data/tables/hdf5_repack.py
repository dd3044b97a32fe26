"""Write an HDF5 file again with its rows laid out for training; everything else stays unchanged."""

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fulltilt.data.new_file import Counter, Progress, check_name, check_room, new_file, reserve
from fulltilt.data.tables.hdf5_file import READ_ERRORS, find_bad_row, find_dataset, list_datasets, open_hdf5
from fulltilt.data.tables.hdf5_layout import describe_layout
from fulltilt.errors import DataError, UsageError

Compression = Literal["none", "lzf", "gzip"]
CHUNK_BYTES = 1 << 20  # of a compressed chunk by default: what block shuffle reads in one go
_BLOCK_BYTES = 32 << 20
_HEADROOM_BYTES = 4 << 20  # headers, chunk indexes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A dataset that gets a new layout: chunks of ``chunk_rows`` rows, or one array where it is None."""

    name: str
    n_rows: int
    row_bytes: int
    chunk_rows: int | None
    compression: Compression

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repacked:
    """What was written: the datasets with a new layout, and the BLAKE2b of their rows, equal in both files."""

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
    """Write the samples of a file again: as one array each, or in chunks of whole rows.

    Samples are the datasets with as many rows as the largest one, and those that ``datasets`` names; all else is
    copied. The target gets its name when every row was read back and found equal.

    Memory: one block of 32 MiB, or one row of the source's chunks where those are larger.

    Args:
        datasets: Datasets with another number of rows that are samples too, such as those for validation.
        chunk_rows: Rows of the largest dataset in a chunk; other datasets take chunks of about as many bytes.
            None: one array, or chunks of about 1 MiB when compressed.
        compression: ``gzip`` (level 4, bytes shuffled), ``lzf`` (faster, larger; h5py's own) or ``none``.
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
    if compression not in get_args(Compression):
        raise UsageError(f"compression {compression!r} is not known; use {', '.join(get_args(Compression))}")
    with open_hdf5(source) as file:
        if target.exists() and target.samefile(source):
            raise UsageError(f"{target} is the file to be read; give the new file another name")
        check_name(target, force=force)
        plan = _plan_tables(source, file, datasets, chunk_rows, compression)
        needed_bytes = _estimate_bytes(source, file, plan)
        remedy = "use --compression gzip on another disk" if compression == "none" else "choose another disk"
        check_room(target, needed_bytes, remedy=remedy)
        report = Counter(progress, 2 * sum(table.n_bytes for table in plan.values()))
        with new_file(target, remedy=remedy) as temporary:
            checksum = _write_copy(source, file, temporary, plan, needed_bytes, report)
    return Repacked(
        datasets=tuple(plan),
        n_rows=tuple(table.n_rows for table in plan.values()),
        source_bytes=source.stat().st_size,
        target_bytes=target.stat().st_size,
        checksum=checksum,
        seconds=time.perf_counter() - started,
    )


def find_largest(path: Path, found: Mapping[str, Any]) -> Any:
    """Return the largest of the datasets that ``find_tables`` found; its rows are the samples."""
    if not found:
        raise DataError(f"{path} holds no dataset with rows of a fixed size; there is nothing to lay out")
    return max(found.values(), key=lambda item: item.nbytes)


def find_tables(file: Any) -> dict[str, Any]:
    """Return every dataset with rows of a fixed size by name."""
    there = list_datasets(file)
    return {name: item for name, item in there.items() if item.shape and item.size and item.dtype.kind != "O"}


def _plan_tables(
    path: Path, file: Any, names: Sequence[str], chunk_rows: int | None, compression: Compression
) -> dict[str, Table]:
    found = find_tables(file)
    largest = find_largest(path, found)
    named = {_name_table(path, file, name, found) for name in names}
    n_rows, largest_row_bytes = largest.shape[0], largest.nbytes // largest.shape[0]
    if chunk_rows is None and compression != "none":
        chunk_rows = min(n_rows, max(1, CHUNK_BYTES // max(1, largest_row_bytes)))
    chunk_bytes = None if chunk_rows is None else chunk_rows * largest_row_bytes
    tables = {}
    for name, item in found.items():
        if item.shape[0] == n_rows or name in named:
            row_bytes = item.nbytes // item.shape[0]
            tables[name] = Table(
                name=name,
                n_rows=item.shape[0],
                row_bytes=row_bytes,
                chunk_rows=None if chunk_bytes is None else min(item.shape[0], max(1, chunk_bytes // row_bytes)),
                compression=compression,
            )
    return tables


def _name_table(path: Path, file: Any, name: str, found: Mapping[str, Any]) -> str:
    """Return the key in ``found`` of the dataset that ``name`` leads to, perhaps by a link."""
    item = find_dataset(path, file, name)
    if item.file.filename != file.filename:
        raise DataError(f"{path}: {name} lies in {item.file.filename}; repack that file, and leave it out of --dataset")
    place = next((place for place, table in found.items() if table == item), None)
    if place is None:
        raise DataError(f"{path}: {name} has no rows of a fixed size; leave it out of --dataset")
    return place


def _estimate_bytes(path: Path, file: Any, plan: dict[str, Table]) -> int:
    """Estimate the size of the target where compression gains nothing."""
    stored_bytes = sum(file[name].id.get_storage_size() for name in plan)
    padded_bytes = sum(table.n_bytes + (table.chunk_rows or 0) * table.row_bytes for table in plan.values())
    n_chunks = sum(-(-table.n_rows // table.chunk_rows) for table in plan.values() if table.chunk_rows)
    return padded_bytes + max(0, path.stat().st_size - stored_bytes) + 64 * n_chunks + _HEADROOM_BYTES


def _write_copy(
    path: Path, file: Any, temporary: Path, plan: dict[str, Table], needed_bytes: int, report: Counter
) -> str:
    """Write the new file, read its rows back and return their checksum; DataError where they differ."""
    import h5py

    with h5py.File(temporary, "w") as target:
        _copy_group(path, file, target, plan, {})
    reserve(temporary, needed_bytes)
    with h5py.File(temporary, "r+") as target:
        written = _digest_rows(path, file, plan, report, target)
    with open_hdf5(temporary) as target:
        read = _digest_rows(temporary, target, plan, report)
    if read != written:
        raise DataError(f"rows read back from {temporary} differ from what was written; check the disk")
    return written


def _digest_rows(path: Path, file: Any, plan: dict[str, Table], report: Counter, target: Any = None) -> str:
    """Return the checksum of all rows, read block by block and copied to ``target`` where there is one."""
    digest = hashlib.blake2b(digest_size=16)
    for table in plan.values():
        dataset = file[table.name]
        read_rows = describe_layout(path, dataset).count_rows_in(_BLOCK_BYTES)
        for first in range(0, table.n_rows, read_rows):
            end = min(first + read_rows, table.n_rows)
            try:
                rows = dataset[first:end]
            except READ_ERRORS as error:
                row = find_bad_row(dataset, np.arange(first, end))
                raise DataError(f"{path}: {table.name} cannot be read at row {row} ({error}); it is damaged") from error
            if target is not None:
                target[table.name][first:end] = rows
            digest.update(np.ascontiguousarray(rows).view(np.uint8))
            report.add(rows.nbytes)
    return digest.hexdigest()


def _copy_group(path: Path, source: Any, target: Any, plan: dict[str, Table], seen: dict[Any, str]) -> None:
    import h5py

    _copy_attributes(path, source, target)
    for name in source:
        link = source.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            target[name] = link  # soft, or into another file: as it is
            continue
        item = source[name]
        place = item.name.lstrip("/")
        key = h5py.h5o.get_info(item.id).addr
        if key in seen:
            target[name] = target.file[seen[key]]  # a second name of one object
            continue
        seen[key] = item.name
        if isinstance(item, h5py.Group):
            _copy_group(path, item, target.create_group(name), plan, seen)
        elif place in plan:
            table = plan[place]
            create_table(target, name, item.shape, item.id.get_type(), table.chunk_rows, table.compression)
            _copy_attributes(path, item, target[name])
        else:
            _check_references(path, item)
            source.copy(item, target, name=name)


def create_table(
    group: Any, name: str, shape: tuple[int, ...], kind: Any, chunk_rows: int | None, compression: str = "none"
) -> None:
    """Create a dataset of one array or of chunks, with its place in the file but without fill values."""
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if compression == "none":
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if chunk_rows is not None:
        properties.set_chunk((chunk_rows, *shape[1:]))
    if compression == "gzip":
        properties.set_shuffle()
        properties.set_deflate(4)  # HDF5's own default
    elif compression == "lzf":
        properties.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
    h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(shape), dcpl=properties)


def _copy_attributes(path: Path, source: Any, target: Any) -> None:
    _check_references(path, source)
    for name in source.attrs:
        value = source.attrs[name]
        target.attrs.create(name, value, dtype=getattr(value, "dtype", None) and source.attrs.get_id(name).dtype)


def check_references(path: Path, file: Any) -> None:
    """Raise DataError where something in a file refers to a place in it: a copy would point nowhere."""
    _check_references(path, file)
    file.visititems(lambda _, item: _check_references(path, item))


def _check_references(path: Path, item: Any) -> None:
    import h5py

    types = [(f"attribute {name}", item.attrs.get_id(name).dtype) for name in item.attrs]
    if isinstance(item, h5py.Dataset):
        types.append(("values", item.dtype))
    for what, dtype in types:
        parts = [field[0] for field in dtype.fields.values()] if dtype.fields else [dtype]
        if any(h5py.check_ref_dtype(part) for part in parts):
            raise DataError(
                f"{path}: {what} of {item.name} are references into the file (dimension scales have such), which a "
                f"repacked file would lose; use h5repack of the HDF5 tools, or remove them"
            )
