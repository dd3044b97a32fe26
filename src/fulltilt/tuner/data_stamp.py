"""Whether the data of a search are those of the search before it: by size and time of the files, not by their bytes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulltilt.config import ComponentCall, Config, parse_call
from fulltilt.records.run_folder import FINGERPRINT_FILE

MAX_FILES = 10_000
"""Of a folder; on a network file system each costs a round trip."""
PATH_NAMES = ("path", "root")
DEFAULT_ROOT = "data"
ROOTED = ("cifar10", "image_folder", "stl10")
"""Data sets that read ``DEFAULT_ROOT`` when they are given no path."""


def stamp_data(config: Config) -> dict[str, dict[str, Any]]:
    """Path → what tells its content from another one's, for every file and folder that the configuration names.

    That is ``data.path``, and the arguments of the data sets and of the task that are paths. A file is known by its
    size and its time; of a folder ``MAX_FILES`` are looked at: their number, their bytes together, the newest time.
    What is not there has no stamp, and data that code finds by itself is not seen.

    Cost: one stat a file.
    """
    stamps = {}
    for text in _list_paths(config):
        path = Path(config.base_dir) / Path(text).expanduser()
        with contextlib.suppress(OSError):  # out of reach, or a text too long to be a path
            if path.is_file():
                stamps[text] = _stamp_file(path)
            elif path.is_dir():
                stamps[text] = _stamp_folder(path)
    return stamps


def _list_paths(config: Config) -> list[str]:
    given = [] if config.data.path is None else [config.data.path]
    found = [*given, *_find_paths(parse_call(config.task))]
    for text in (config.data.dataset, config.data.val_dataset):
        if text is not None:
            call = parse_call(text)
            own = list(_find_paths(call))
            found += own or ([DEFAULT_ROOT] if call.name in ROOTED and not given else [])
    return list(dict.fromkeys(found))


def _find_paths(call: ComponentCall) -> Iterator[str]:
    """Arguments that are called a path, or look like one."""
    for name, value in (*enumerate(call.args), *call.kwargs.items()):
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, ComponentCall):
                yield from _find_paths(part)
            elif isinstance(part, str) and (name in PATH_NAMES or "/" in part or Path(part).suffix):
                yield part


def _stamp_file(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"n_bytes": status.st_size, "modified": _format_time(status.st_mtime_ns)}


def _stamp_folder(path: Path) -> dict[str, Any]:
    files = list(itertools.islice(_walk(path), MAX_FILES))
    return {
        "n_files": len(files),
        "n_bytes": sum(status.st_size for status in files),
        "modified": _format_time(max((status.st_mtime_ns for status in files), default=0)),
    }


def _walk(folder: Path) -> Iterator[os.stat_result]:
    """Files below ``folder``, the same ones every time; without hidden ones, folders of runs and linked folders."""
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
