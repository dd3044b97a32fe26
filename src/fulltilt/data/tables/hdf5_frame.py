"""Copying an HDF5 file without its samples, which get a new layout and no rows yet."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from fulltilt.errors import DataError

Compression = Literal["none", "lzf", "gzip"]

_GZIP_LEVEL = 4  # HDF5's own default


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


def write_frame(path: Path, file: Any, temporary: Path, plan: dict[str, Table]) -> None:
    """Write everything but the rows of the planned tables."""
    import h5py

    with h5py.File(temporary, "w") as target:
        _copy_group(path, file, target, plan, {})


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
            _create_table(item, target, name, plan[place])
            _copy_attributes(path, item, target[name])
        else:
            _check_references(path, item)
            source.copy(item, target, name=name)


def _create_table(item: Any, target: Any, name: str, table: Table) -> None:
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if table.compression == "none":
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if table.chunk_rows is not None:
        properties.set_chunk((table.chunk_rows, *item.shape[1:]))
    if table.compression == "gzip":
        properties.set_shuffle()
        properties.set_deflate(_GZIP_LEVEL)
    elif table.compression == "lzf":
        properties.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
    space = h5py.h5s.create_simple(item.shape)
    h5py.h5d.create(target.id, name.encode(), item.id.get_type(), space, dcpl=properties)


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
