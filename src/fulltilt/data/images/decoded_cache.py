"""Decoded images kept on disk, so that a search of many processes decodes a folder once.

A cache file holds two .npy arrays; its name has a fingerprint of the names, sizes and times of the source's files.
"""

import contextlib
import os
import zipfile
from pathlib import Path

import numpy as np

from fulltilt.data.new_file import new_file
from fulltilt.errors import StorageError

_N_KEPT = 8


def _find_file(fingerprint: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "fulltilt" / "decoded" / f"images-{fingerprint}.npz"


def read_cached(fingerprint: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Read (images, targets), or None where they are not there or damaged."""
    try:
        # Opened here: np.load leaves a file open that turns out to be torn.
        with _find_file(fingerprint).open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return arrays["images"], arrays["targets"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def write_cached(fingerprint: str, images: np.ndarray, targets: np.ndarray) -> None:
    """Keep decoded images; a disk that does not take them costs time only."""
    file = _find_file(fingerprint)
    with contextlib.suppress(OSError, StorageError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file, remedy="clear the cache") as temporary, temporary.open("wb") as stream:
            np.savez(stream, images=images, targets=targets)
        _drop_oldest(file.parent)


def _drop_oldest(folder: Path) -> None:
    aged = []
    for file in folder.glob("images-*.npz"):
        with contextlib.suppress(OSError):  # another process drops files too
            aged.append((file.stat().st_mtime, file))
    for _, file in sorted(aged)[:-_N_KEPT]:
        file.unlink(missing_ok=True)
