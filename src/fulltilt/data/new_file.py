"""Write a file that gets its name only when it is complete, on a disk that may be full."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fulltilt.errors import DataError, StorageError
from fulltilt.records import format_bytes

_MARGIN_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do, both in bytes or pieces."""


class Counter:
    """Counts what is done towards ``total`` and tells it to ``progress``, where there is one."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._n_done = progress, total, 0

    def add(self, n: int = 1) -> None:
        self._n_done += n
        if self._progress is not None:
            self._progress(self._n_done, self._total)


@contextlib.contextmanager
def new_file(path: Path, *, remedy: str) -> Iterator[Path]:
    """Yield an empty file beside ``path`` that gets this name when the block ends without an error.

    Raises:
        DataError: The folder cannot be written.
        StorageError: The disk, the quota or the limit on file sizes had no room (with ``remedy``); nothing is left.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise DataError(f"{path.parent} cannot be written ({error.strerror}); give another name") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        sync(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:  # h5py raises RuntimeError where closing a file could not flush it
        if not says_no_room(error):
            raise
        raise StorageError(f"no space left for {path}; free some, or {remedy}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_name(path: Path, *, force: bool) -> None:
    """Make the folder of ``path``; raise DataError where the file cannot be written, or exists without ``force``."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the name of a file in it")
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is a device or a pipe, and a data file is written in pieces; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path.parent} cannot be made ({error.strerror}); give another name") from error
    if path.exists() and not force:
        raise DataError(f"{path} exists ({path.stat().st_size:,} bytes); give another name, or --force to replace it")


def check_room(path: Path, needed_bytes: int, *, remedy: str) -> None:
    """Raise StorageError where the disk has less than ``needed_bytes`` and 1 MiB free."""
    folder = os.statvfs(path.parent)
    free_bytes = folder.f_bavail * folder.f_frsize
    if needed_bytes + _MARGIN_BYTES > free_bytes:
        raise StorageError(
            f"{path} needs {format_bytes(needed_bytes)} and {path.parent} has {format_bytes(free_bytes)} free; "
            f"free some, choose another place, or {remedy}"
        )


def reserve(path: Path, n_bytes: int) -> None:
    """Allocate the blocks of the file on the disk, where the file system can.

    HDF5 can crash the process when a flush meets a full disk; a file whose room was taken before does not meet one.
    """
    with path.open("r+b") as stream:
        try:
            os.posix_fallocate(stream.fileno(), 0, n_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def says_no_room(error: BaseException) -> bool:
    """Tell whether an error (of h5py: its text) means a full disk, a used-up quota, or the file-size limit."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    text = str(error)
    return getattr(error, "errno", None) in numbers or any(
        f"errno = {number}," in text or os.strerror(number) in text for number in numbers
    )


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
