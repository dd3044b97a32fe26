"""Open an HDF5 file that may be missing, a folder, text, cut short, or without the datasets asked for."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.data.tables.hdf5_layout import Layout, describe_layout
from fulltilt.errors import DataError, format_nearest

READ_ERRORS = (OSError, KeyError, RuntimeError)
"""What h5py raises for data that cannot be read."""


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """Open an ``h5py.File`` for reading; DataError says why it cannot be opened."""
    import h5py

    _check_file(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DataError(_describe_open_error(path, str(error))) from error
    with file:
        yield file


def find_layouts(path: Path, names: list[str]) -> list[Layout]:
    """Read the layouts of the named datasets, which have one row for each sample."""
    with open_hdf5(path) as file:
        found = [find_dataset(path, file, name) for name in names]
        layouts = [describe_layout(Path(item.file.filename), item) for item in found]  # a link may lead out of this one
    for layout, name in zip(layouts, names, strict=True):
        if not layout.shape or layout.n_rows == 0:
            raise DataError(f"{path}: {name} has shape {layout.shape}; at least one row (first dimension) is needed")
        if not layout.is_numeric:
            raise DataError(f"{path}: {name} holds {layout.dtype}; only whole numbers and floats become tensors")
    if len({layout.n_rows for layout in layouts}) > 1:
        lengths = ", ".join(f"{name} {layout.n_rows}" for name, layout in zip(names, layouts, strict=True))
        raise DataError(f"{path}: numbers of rows differ: {lengths}; every sample needs one row in each")
    return layouts


def find_dataset(path: Path, file: Any, name: str) -> Any:
    """Return the dataset ``name`` (``group/name`` works); DataError lists what the file has instead."""
    import h5py

    try:
        found = file.get(name)
    except READ_ERRORS as error:
        raise DataError(f"{path}: {name} cannot be read ({error}): it is damaged; copy or make it again") from error
    if isinstance(found, h5py.Dataset):
        if found.shape is None:
            raise DataError(f"{path}: {name} is empty (it has a type and no shape); name another dataset")
        return found
    links, place = list_links(file), name.strip("/")
    if found is None and place in links:
        raise DataError(f"{path}: {links[place]}; put that there, or name another dataset")
    there = {key: item.shape for key, item in list_datasets(file).items()}
    if isinstance(found, h5py.Group) and place in links:  # visiting a file does not follow its links
        there |= {f"{place}/{key}": item.shape for key, item in list_datasets(found).items()}
    if not there and found is None:
        raise DataError(f"{path} holds no datasets at all, so no {name}")
    kind = "is a group" if found is not None else "is not in it"
    nearest = format_nearest(name, there).split("valid:")[0].strip()
    listing = ", ".join(f"{known} {shape}" for known, shape in sorted(there.items())[:20]) or "no datasets"
    raise DataError(f"{path}: {name} {kind}; {nearest + ' ' if nearest else ''}it holds: {listing}")


def list_links(file: Any) -> dict[str, str]:
    """Describe, by name, the links into other files and those that lead to nothing."""
    import h5py

    links: dict[str, str] = {}

    def note(name: str, link: Any) -> None:
        if isinstance(link, h5py.HardLink):
            return
        is_external = isinstance(link, h5py.ExternalLink)
        leads = f"{name} links to {link.path}" + (f" in {link.filename}" if is_external else "")
        try:
            file[name]
        except READ_ERRORS:
            links[name] = f"{leads}, which cannot be opened"
        else:
            if is_external:
                links[name] = leads

    file.visititems_links(note)
    return links


def list_datasets(group: Any) -> dict[str, Any]:
    """Return every dataset below a group by its name; links are not followed."""
    import h5py

    found: dict[str, Any] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item

    group.visititems(note)
    return found


def find_bad_row(dataset: Any, rows: np.ndarray) -> int:
    """Return the first row that cannot be read by itself, or the first of all where each can."""
    for row in rows.tolist():
        try:
            dataset[row]
        except READ_ERRORS:
            return row
    return int(rows[0])


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the HDF5 file in it")
    try:
        with path.open("rb") as stream:
            is_empty = not stream.read(1)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; check data.path or --data-path, or make a file: fulltilt data make"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    if is_empty:
        raise DataError(f"{path} is empty (0 bytes); make or copy it again")


def _describe_open_error(path: Path, message: str) -> str:
    size = path.stat().st_size
    if "truncated" in message.lower():
        return f"{path} is truncated: {size:,} bytes are there and more were written ({message}); copy or make it again"
    if "signature" in message.lower():
        return f"{path} is not an HDF5 file ({size:,} bytes, no HDF5 signature); give an .h5 file"
    if "lock" in message.lower():
        return f"{path} is open for writing elsewhere ({message}); wait for that program to close it"
    return f"{path} cannot be opened as HDF5 ({message}); copy or make it again"
