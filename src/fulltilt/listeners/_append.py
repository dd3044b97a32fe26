"""A text file that grows by whole lines: the operating system has them after ``append``, the disk after ``sync``."""

import contextlib
import errno
import io
import os
from collections.abc import Sequence
from pathlib import Path

from fulltilt.errors import StorageError
from fulltilt.records.run_folder import drop_torn_line


class AppendFile:
    """Opened on first use. A torn last line, left by a killed process, is cut off then.

    Raises:
        StorageError: it cannot be opened or written; what an append wrote of its lines is taken back.
    """

    def __init__(self, path: str | Path):
        self._stream: io.FileIO | None = None
        self.path = Path(path)
        self._end = 0

    def append(self, lines: Sequence[str]) -> None:
        """Hand lines to the operating system in one write, all or none: they survive a killed process."""
        data = "".join([f"{line}\n" for line in lines]).encode()
        try:
            stream = self._stream or self._open()
            if stream.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if self._stream is not None:
                with contextlib.suppress(OSError):
                    self._stream.truncate(self._end)
            lost = f"{len(lines)} line{'s are' if len(lines) > 1 else ' is'} lost"
            raise StorageError(f"{self.path} cannot be written: {error.strerror}; {lost}") from error
        self._end += len(data)

    def sync(self) -> None:
        """Wait until every line is on the disk: they survive a loss of power. Cost: milliseconds."""
        if self._stream is not None:
            try:
                os.fsync(self._stream.fileno())
            except OSError as error:
                raise StorageError(f"{self.path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> io.FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # "a": after the file was cut back, the next write goes to its end again.
        stream = self.path.open("ab+", buffering=0)
        self._end = drop_torn_line(stream)
        self._stream = stream
        return stream
