"""Two stand-ins for files that user code opens for writing: one that times the disk, one that holds writes back."""

from __future__ import annotations

import io

PLAIN_ENCODINGS = (None, "utf-8", "utf8", "ascii", "latin-1")  # without a mark at the start of the file


class TimedFile(io.FileIO):
    """The file under a stream as ``open`` builds it; what reaches the disk is timed, and nothing else is slower."""

    def __init__(self, calls, path, file, how):
        self._calls, self.path = calls, path
        super().__init__(file, how)

    def write(self, data):
        return self._calls.time(super().write, "write", self.path, data)

    def close(self):
        if not self.closed:
            self._calls.time(super().close, "close", self.path)


def find_timed_file(stream):
    """Return the TimedFile that ``stream`` writes to; None where there is none."""
    raw = getattr(getattr(stream, "buffer", stream), "raw", None)
    return raw if isinstance(raw, TimedFile) else None


class HeldStream:
    """Takes what is written to a file whose writes are held back, and hands it over as bytes when it is closed.

    Whatever else is asked of it, the real file is opened and answers from then on.
    """

    def __init__(self, held, path, file, mode, options):
        self._held, self._path, self._options = held, path, options
        self._parts, self._real = [], None
        self.name, self.mode, self.closed = file, mode, False
        held.streams.add(self)

    def write(self, data):
        if self._real is not None:
            return self._real.write(data)
        if "b" not in self.mode:
            if not isinstance(data, str):
                raise TypeError(f"write() argument must be str, not {type(data).__name__}")
            self._parts.append(data)
            return len(data)
        self._parts.append(data if isinstance(data, bytes) else bytes(memoryview(data)))  # a buffer may change later
        return len(self._parts[-1])

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def flush(self):
        if self._real is not None:
            self._real.flush()

    def close(self):
        if self.closed:
            return
        self.closed = True
        self._held.streams.discard(self)
        if self._real is not None:
            self._real.close()
        else:
            self._held.off_the_clock(self._hand_over)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __del__(self):
        self.close()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self._held.look()
        return getattr(self._real, name)

    def switch(self):
        """Open the file, with what was written so far."""
        if self._real is None:
            self._real = self._held.open(self.name, self.mode, **self._options)
            self._real.writelines(self._parts)
            self._real.flush()

    def _hand_over(self):
        plain = io.BytesIO()
        stream = plain if "b" in self.mode else io.TextIOWrapper(plain, **self._options)
        stream.writelines(self._parts)
        stream.flush()
        self._held.keep(self._path, self.mode[0], plain.getvalue())
        self._parts = []
