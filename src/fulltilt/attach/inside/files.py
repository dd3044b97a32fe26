"""Times the files that user code writes, and holds writes back while their step is measured without them.

A file is held back only if two things were seen before: every step writes it, and its write, done again from what was
kept of it when the step was over, gives the same bytes. What is held back is written when the file is opened, at any use
of a file's name or of another process (GUARDED), at the end of the loop over the loader, and at exit; a file that is
rewritten whole is superseded by the next write.
"""

from __future__ import annotations

import builtins
import filecmp
import functools
import io
import json
import os
import pickle
from threading import get_ident

import torch

from .sites import Sites
from .spans import DATA_WAIT, FILE_WRITE
from .user_code import find_user_frame

WINDOW_STEPS = 20  # in which a file has to be written at least MIN_HIT_SHARE of the steps
MIN_HIT_SHARE = 0.9
MIN_TIME_SHARE = 0.02
N_REHEARSALS = 2
MAX_REHEARSED_BYTES = 64 << 20
OPEN_ARGUMENTS = ("buffering", "encoding", "errors", "newline")
GUARDED = (
    *("stat", "lstat", "replace", "rename", "remove", "unlink", "link", "truncate", "listdir", "scandir"),
    *("system", "fork", "posix_spawn", "execv", "execve", "_exit", "kill", "killpg", "abort"),
)


class Write:
    """One writing of one file: how it was opened, and what was written in order."""

    def __init__(self, path, how, arguments):
        self.path, self.how, self.arguments = path, how, arguments  # how: "w", "a" or "save"
        self.operations = []

    def do(self, real, path, is_anew=False):
        """Write it to ``path``; what is appended makes a file of its own if ``is_anew``."""
        args, kwargs = self.arguments
        if self.how == "save":
            real.save(self.operations[0], path, *args, **kwargs)
            return
        mode = args[0].replace("a", "w") if is_anew else args[0]
        with real.open(path, mode, **kwargs) as stream:
            self.write_into(stream)

    def write_into(self, stream):
        for operation in self.operations:
            operation(stream) if callable(operation) else stream.write(operation)

    def note(self, data):
        """Take down what is written; a buffer may change after it was."""
        self.operations.append(data if isinstance(data, (str, bytes)) else bytes(data))


class TimedStream:
    """Mixed into the streams that user code opens for writing."""

    calls = write_record = None  # of FileCalls; the Write that takes down what is written

    def write(self, data):
        if self.write_record is not None:
            self.write_record.note(data)
        return self.calls.time(super().write, "write", self.path, data)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def flush(self):
        return self.calls.time(super().flush, "flush", self.path)

    def close(self):
        if self.closed:
            return
        self.calls.time(super().close, "close", self.path)
        if self.write_record is not None:
            self.calls.plan_rehearsal(self.write_record)
            self.write_record = None

    def fileno(self):
        return self._look_behind(super().fileno)

    def tell(self):
        return self._look_behind(super().tell)

    def seek(self, *args):
        return self._look_behind(super().seek, *args)

    def truncate(self, *args):
        return self._look_behind(super().truncate, *args)

    def _look_behind(self, method, *args):
        """Refuse a write that goes past the stream: it cannot be done again from what was written."""
        if self.write_record is not None:
            self.write_record = None
            self.calls.refuse(self.path, "the script asks for its descriptor or position")
        return method(*args)


class TimedText(TimedStream, io.TextIOWrapper):
    pass


class TimedBinary(TimedStream, io.BufferedWriter):
    pass


class HeldStream:
    """Stands for a file whose write is held back: nothing reaches the disk.

    Whatever else than writing is asked of it, the real file is opened and answers from then on.
    """

    def __init__(self, calls, write):
        self._calls, self._write, self._real = calls, write, None
        self.name, self.mode, self.closed = write.path, write.arguments[0][0], False

    def take(self, operation):
        """Keep what would be done with the file; False where it is open for real."""
        if self._real is None:
            self._write.operations.append(operation)
        return self._real is None

    def write(self, data):
        if self._real is not None:
            return self._real.write(data)
        self._write.note(data)
        return len(data) if isinstance(data, str) else memoryview(data).nbytes

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def flush(self):
        if self._real is not None:
            self._real.flush()

    def close(self):
        self.closed = True
        if self._real is not None:
            self._real.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self._real is None:
            self._real = self._calls.open_held(self._write)
        return getattr(self._real, name)


class Real:
    """The functions as they were."""

    def __init__(self):
        self.open, self.save = builtins.open, torch.save


class Written:
    """What is known of one file that steps write."""

    def __init__(self):
        self.n_steps = self.n_writes = self.ns = self.n_equal = 0
        self.last_step = -1


class FileCalls:
    def __init__(self, observer, folder):
        self._observer, self._folder = observer, folder
        self._real = Real()
        self._held = {}  # path → writes in order
        self._seen = {}  # path → Written, of the current window
        self._window_ns = self._window_steps = 0
        self._candidate = None
        self._rehearsal = None  # the write that is to be done again when its step is over
        self._guarded = {}  # functions of os as they were, while something is held back
        self.sites = Sites("file_write")
        self.target = None
        self.refused = {}  # path → why its writes cannot be held back
        self.is_removed = False

    def wrap_open(self):
        @functools.wraps(self._real.open)
        def open_timed(file, mode="r", *args, **kwargs):
            return self._open(file, mode, args, kwargs)

        @functools.wraps(self._real.save)
        def save_timed(obj, f, *args, **kwargs):
            return self._save(obj, f, args, kwargs)

        builtins.open = io.open = open_timed
        torch.save = save_timed

    def wrap_dumps(self):
        """Modules that the script may import after torch; by the first step it has."""
        json.dump = self._wrap_dump(json.dump, "json.dump")
        pickle.dump = self._wrap_dump(pickle.dump, "pickle.dump")

    def time(self, function, does, path, *args, **kwargs):
        """Call ``function`` and book its time to the line of user code that it comes from."""
        observer = self._observer
        if get_ident() != observer.thread or observer.spans.is_inside(FILE_WRITE):
            return function(*args, **kwargs)
        frame = find_user_frame(2)
        if frame is None:
            return function(*args, **kwargs)
        observer.spans.enter(FILE_WRITE)
        try:
            return function(*args, **kwargs)
        finally:
            took_ns = observer.spans.leave()
            self.sites.find(frame, does, path).add(took_ns, observer.step)
            self._note(path, took_ns)

    def _note(self, path, ns):
        seen = self._seen.setdefault(path, Written())
        seen.ns += ns
        if seen.last_step != self._observer.step:
            seen.last_step = self._observer.step
            seen.n_steps += 1

    # What takes the place of open, torch.save, json.dump and pickle.dump

    def _open(self, file, mode, args, kwargs):
        real = self._real.open
        is_path = isinstance(file, (str, os.PathLike))
        path = os.path.abspath(os.fspath(file)) if is_path else None
        how = mode.strip("bt") if isinstance(mode, str) else ""
        given = {**dict(zip(OPEN_ARGUMENTS, args)), **kwargs}
        is_plain = given.pop("buffering", -1) == -1 and not given.keys() - set(OPEN_ARGUMENTS)
        is_ours = is_plain and isinstance(path, str) and how in ("w", "a") and self._is_writing_step()
        if not is_ours or find_user_frame(2) is None:
            if path is not None:
                self.settle(path)
            return real(file, mode, *args, **kwargs)
        kwargs = {name: value for name, value in given.items() if value is not None}
        write = Write(path, how, ((mode,), kwargs))
        if self._is_held_back(path):
            return self._hold(write)
        if path in self._held:
            self._release(path, is_superseded=how == "w")
        existed = os.path.exists(path)  # after the release, which a look at the file would call for
        stream = self.time(self._build_stream, "open", path, file, mode, kwargs)
        stream.calls, stream.path = self, path
        self._seen[path].n_writes += 1
        if self._may_rehearse(path, existed):
            stream.write_record = write
        return stream

    def _build_stream(self, file, mode, kwargs):
        """The stream that ``open`` gives, of a class that times its calls."""
        binary = self._real.open(file, mode.replace("t", "").replace("b", "") + "b", 0)
        size = max(getattr(os.fstat(binary.fileno()), "st_blksize", 0), io.DEFAULT_BUFFER_SIZE)
        if "b" in mode:
            return TimedBinary(binary, size)
        stream = TimedText(io.BufferedWriter(binary, size), **kwargs)
        stream.mode = mode
        return stream

    def _save(self, obj, f, args, kwargs):
        if isinstance(f, (TimedStream, HeldStream)):
            return self._dump(self._real.save, "torch.save", obj, f, args, kwargs)
        if not isinstance(f, (str, os.PathLike)) or not self._is_writing_step() or find_user_frame(2) is None:
            return self._real.save(obj, f, *args, **kwargs)
        path = os.path.abspath(os.fspath(f))
        write = Write(path, "save", (args, kwargs))
        write.operations.append(obj)
        if self._is_held_back(path):
            self._keep(write)
            return None
        self._release(path, is_superseded=True)
        existed = os.path.exists(path)
        result = self.time(self._real.save, "torch.save", path, obj, f, *args, **kwargs)
        self._seen[path].n_writes += 1
        if self._may_rehearse(path, existed):
            self.plan_rehearsal(write)
        return result

    def _wrap_dump(self, dump, does):
        @functools.wraps(dump)
        def timed(obj, file, *args, **kwargs):
            if isinstance(file, (TimedStream, HeldStream)):
                return self._dump(dump, does, obj, file, args, kwargs)
            return dump(obj, file, *args, **kwargs)

        return timed

    def _dump(self, dump, does, obj, file, args, kwargs):
        """Serialise into one of our streams: as one operation, at the speed of the plain stream."""

        def operation(stream):
            dump(obj, stream, *args, **kwargs)

        if isinstance(file, HeldStream):
            return None if file.take(operation) else dump(obj, file, *args, **kwargs)
        if file.write_record is not None:
            file.write_record.operations.append(operation)
        return self.time(dump, does, file.path, obj, _PlainWriter(file), *args, **kwargs)

    def _is_writing_step(self):
        """Whether this is the training's own thread and process, and nothing that is timed as another write."""
        spans = self._observer.spans
        is_here = get_ident() == self._observer.thread
        return is_here and not spans.is_inside(DATA_WAIT) and not spans.is_inside(FILE_WRITE)

    # Holding back

    def _is_held_back(self, path):
        return self.is_removed and path == self.target

    def _hold(self, write):
        self._keep(write)
        return HeldStream(self, write)

    def open_held(self, write):
        """Open the real file of a write that was held back, with what was written of it so far."""
        self._held[write.path].remove(write)
        self._release(write.path)
        stream = self._real.open(write.path, *write.arguments[0], **write.arguments[1])
        write.write_into(stream)
        return stream

    def _keep(self, write):
        if write.how == "a":
            self._held.setdefault(write.path, []).append(write)
        else:
            self._held[write.path] = [write]
        for name in () if self._guarded else GUARDED:
            self._guarded[name] = getattr(os, name)
            setattr(os, name, self._guard(self._guarded[name]))

    def _guard(self, function):
        @functools.wraps(function)
        def guarded(*args, **kwargs):
            self.settle()
            return function(*args, **kwargs)

        return guarded

    def settle(self, path=None):
        """Write what is held back: of one file, or of all."""
        if self._held and os.getpid() == self._observer.pid:
            for held in [path] if path is not None else list(self._held):
                self._release(held)

    def _release(self, path, is_superseded=False):
        writes = self._held.pop(path, ())
        if not self._held:
            for name, function in self._guarded.items():
                setattr(os, name, function)
            self._guarded = {}
        if not is_superseded:
            for write in writes:
                write.do(self._real, path)

    def _may_rehearse(self, path, existed):
        if path == self._candidate and not existed:
            self.refuse(path, "it is not there yet when it is written, as a file that is renamed later")
        return path == self._candidate

    def plan_rehearsal(self, write):
        self._rehearsal = write

    def rehearse(self):
        """Do a write again elsewhere, when its step is over: only what comes out equal may be held back."""
        write, self._rehearsal = self._rehearsal, None
        if write is None:
            return
        self._observer.is_disturbed = True
        copy = os.path.join(self._folder, str(self._observer.pid), os.path.basename(write.path))
        seen = self._seen.get(write.path)
        try:
            if os.path.getsize(write.path) > MAX_REHEARSED_BYTES:
                self.refuse(write.path, "it is larger than 64 MiB")
                return
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            write.do(self._real, copy, is_anew=True)
            compare = _ends_with if write.how == "a" else functools.partial(filecmp.cmp, shallow=False)
            is_equal = compare(write.path, copy)
            os.unlink(copy)
        except Exception as error:  # of whatever the user's objects do when they are written twice
            self.refuse(write.path, f"its write cannot be repeated ({type(error).__name__})")
            return
        if not is_equal or seen is None:
            self.refuse(write.path, "its write, repeated, gives other bytes")
            return
        seen.n_equal += 1
        if seen.n_equal >= N_REHEARSALS:
            self.target, self._candidate = write.path, None

    def refuse(self, path, why):
        self.refused[path] = why
        self._candidate = None

    def end_step(self, wall_ns):
        """Look for a file that every step writes, once a window."""
        if self.target is not None or self._candidate is not None:
            return
        self._window_ns += wall_ns
        self._window_steps += 1
        if self._window_steps < WINDOW_STEPS:
            return
        fits = {
            path: seen.ns
            for path, seen in self._seen.items()
            if path not in self.refused
            and seen.n_steps >= MIN_HIT_SHARE * WINDOW_STEPS
            and seen.ns >= MIN_TIME_SHARE * self._window_ns
        }
        for path in [path for path in fits if self._seen[path].n_writes != self._seen[path].n_steps]:
            self.refuse(path, "a step does not open it exactly once")
            del fits[path]
        if fits:
            self._candidate = max(fits, key=fits.__getitem__)
        self._window_ns = self._window_steps = 0
        self._seen = {path: seen for path, seen in self._seen.items() if path == self._candidate}


class _PlainWriter:
    """What a serialiser writes to: the stream's own method, without the timing around it."""

    def __init__(self, stream):
        kind = io.TextIOWrapper if isinstance(stream, io.TextIOWrapper) else io.BufferedWriter
        self.write = functools.partial(kind.write, stream)
        self.flush = functools.partial(kind.flush, stream)


def _ends_with(path, tail):
    with io.FileIO(tail) as stream:
        wanted = stream.read()
    with io.FileIO(path) as stream:
        stream.seek(-len(wanted), os.SEEK_END)
        return stream.read() == wanted
