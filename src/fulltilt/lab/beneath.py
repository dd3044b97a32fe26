"""Open files below a folder by their names. No link on the way is followed, and nothing but a file is opened."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not keep us waiting


def open_beneath(folder: Path, *names: str, mode: Literal["rb", "ab"] = "rb") -> BinaryIO:
    """Open a file without a buffer; with ``ab`` it is made where it is missing.

    Raises:
        FileNotFoundError: it is not there, or a link, or no plain file.
    """
    place = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            inner = os.open(name, _FOLDER, dir_fd=place)
            os.close(place)
            place = inner
        how = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.open(names[-1], _FILE | how, 0o600, dir_fd=place)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, "it is no file", str(folder.joinpath(*names))) from error
        raise
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "it is no file", str(folder.joinpath(*names)))
    return os.fdopen(file, mode, buffering=0)
