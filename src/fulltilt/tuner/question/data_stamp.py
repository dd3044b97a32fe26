"""Stamp data files by size and modification time, so that a search notices whether they changed."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fulltilt.config import ComponentCall, Config, parse_call
from fulltilt.records.run_folder import FINGERPRINT_FILE

MAX_FILES = 10_000  # of a folder; on a network file system each costs a round trip
PATH_NAMES = ("path", "root")
DEFAULT_ROOT = "data"  # what the data sets below read when they are given no path
_SPLITS = ("train", "val", "valid", "validation", "test")
_BATCHES = ("data_batch_*", "test_batch*")
READS = {
    "cifar10": (*_BATCHES, *_SPLITS, *(f"*/{name}" for name in (*_BATCHES, *_SPLITS))),
    "image_folder": _SPLITS,
    "stl10": ("*_X.bin", "*_y.bin", "class_names.txt", "stl10_binary"),
}
"""What a data set reads of a folder, which may hold other data too; of one without any of it, all counts."""


def stamp_data(config: Config) -> dict[str, dict[str, Any]]:
    """Return size and modification time of every file and folder that the configuration names, by path.

    That is ``data.path``, and the arguments of the data sets and of the task that are paths. A file is known by its
    size and its time; of a folder what the data set reads (``READS``), at most ``MAX_FILES``: their number, their
    bytes together, the newest time. What is not there has no stamp, and data that code finds by itself is not seen.

    Cost: one stat a file.
    """
    stamps = {}
    for text, readers in _find_readers(config).items():
        path = Path(config.base_dir) / Path(text).expanduser()
        with contextlib.suppress(OSError):  # out of reach, or a text too long to be a path
            if path.is_file():
                status = path.stat()
                stamps[text] = {"n_bytes": status.st_size, "modified": _format_time(status.st_mtime_ns)}
            elif path.is_dir():
                files = list(itertools.islice(_walk_read(path, readers), MAX_FILES))
                newest_ns = max((status.st_mtime_ns for status in files), default=0)
                n_bytes = sum(status.st_size for status in files)
                stamps[text] = {"n_files": len(files), "n_bytes": n_bytes, "modified": _format_time(newest_ns)}
    return stamps


def _find_readers(config: Config) -> dict[str, list[str]]:
    """Find the paths in the configuration: path → names of what reads it."""
    readers: dict[str, list[str]] = {}
    calls = [parse_call(text) for text in (config.data.dataset, config.data.val_dataset) if text is not None]
    if config.data.path is not None:
        readers[config.data.path] = [call.name for call in calls]
    task = parse_call(config.task)
    for call in (task, *calls):
        reads_default = call is not task and call.name in READS and config.data.path is None
        for text in list(_find_paths(call)) or ([DEFAULT_ROOT] if reads_default else []):
            readers.setdefault(text, []).append(call.name)
    return readers


def _find_paths(call: ComponentCall) -> Iterator[str]:
    """Yield the arguments that are called a path or look like one, also those of calls among the arguments."""
    for name, value in (*enumerate(call.args), *call.kwargs.items()):
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, ComponentCall):
                yield from _find_paths(part)
            elif isinstance(part, str) and (name in PATH_NAMES or "/" in part or Path(part).suffix):
                yield part


def _walk_read(folder: Path, readers: Sequence[str]) -> Iterator[os.stat_result]:
    """Yield the files of ``folder`` that data sets of these names read; all files where one of them is unknown."""
    found = [_find_read(folder, name) for name in readers]
    if not found or not all(found):  # code may read the path without a data set of ours
        yield from _walk(folder)
        return
    for part in sorted(set().union(*found)):
        if part.is_dir():
            yield from _walk(part)
        else:
            yield part.stat()


def _find_read(folder: Path, name: str) -> set[Path]:
    if name == "image_folder" and not (folder / "train").is_dir():
        return set()  # every folder is a class, whatever it is called
    return {part for pattern in READS.get(name, ()) for part in folder.glob(pattern)}


def _walk(folder: Path) -> Iterator[os.stat_result]:
    """Yield the files below ``folder`` in a fixed order, without hidden ones, run folders and linked folders."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(itertools.islice(entries, MAX_FILES), key=lambda entry: entry.name)
    except OSError:
        return
    if any(entry.name == FINGERPRINT_FILE for entry in listed):
        return
    for entry in listed:
        if entry.name.startswith("."):
            continue
        try:
            is_folder, status = entry.is_dir(), entry.stat()
        except OSError:  # a link to nowhere, or gone since it was listed
            continue
        if is_folder and not entry.is_symlink():
            yield from _walk(Path(entry.path))
        elif not is_folder:
            yield status


def _format_time(time_ns: int) -> str:
    seconds, rest_ns = divmod(time_ns, 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{rest_ns:09d} UTC"
