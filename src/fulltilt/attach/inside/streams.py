"""Stand-ins for files that user code writes: one times the writes, one holds them back."""

from __future__ import annotations

import io

PLAIN_ENCODINGS = (None, "utf-8", "utf8", "ascii", "latin-1")  # encodings that write no byte order mark


class TimedFile(io.FileIO):
    """The raw file under a stream of ``open``; it times each write to the disk."""

    def __init__(self, calls, path, file, how):
        self._calls, self.path = calls, path
        super().__init__(file, how)

    def write(self, data):
        return self._calls.time(super().write, "write", self.path, data)

    def close(self):
        if not self.closed:
            self._calls.time(super().close, "close", self.path)


def find_timed_file(stream):
    """Return the TimedFile under ``stream``, or None."""
    raw = getattr(getattr(stream, "buffer", stream), "raw", None)
    return raw if isinstance(raw, TimedFile) else None


class HeldStream:
    """Collects what is written to a held-back file, and hands it over as bytes when it is closed.

    Any other use opens the real file, which answers from then on.
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
        self._parts.append(
            data if isinstance(data, bytes) else bytes(memoryview(data))
        )  # a copy, as the caller may change its buffer
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
        """Open the real file and write what was collected so far."""
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
