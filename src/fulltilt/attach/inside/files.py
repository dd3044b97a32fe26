"""Time the files that user code writes, and find one whose writes can be held back for a few steps.

Such a file exists under its name, and every step rewrites it or appends to it exactly once, through its stream.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import json
import os
import pickle
from threading import get_ident
from time import perf_counter_ns

import torch

from .held import Held, has_room
from .sites import Sites
from .spans import DATA_WAIT, FILE_WRITE
from .streams import HeldStream, TimedFile, find_plain_encoding, find_timed_file
from .user_code import find_user_frame

WINDOW_STEPS = 20  # steps of a window; the file must be written in MIN_HIT_SHARE of them
MIN_HIT_SHARE = 0.9
MIN_TIME_SHARE = 0.02
OPEN_ARGUMENTS = ("buffering", "encoding", "errors", "newline")


class Written:
    """What was observed of one file that steps write."""

    def __init__(self):
        self.n_steps = self.n_opens = self.n_missing = self.ns = 0
        self.last_step = -1


class FileCalls:
    """Wraps ``open``, ``torch.save``, ``json.dump`` and ``pickle.dump`` to time or hold back writes.

    Attributes:
        target: The file whose writes are tested.
        refused: Path → why its writes cannot be held back.
        is_removed: The current step holds the target's writes back.
    """

    def __init__(self, observer, folder):
        self._observer, self._folder = observer, folder
        self._open_real, self._save_real = builtins.open, torch.save
        self._held = Held(self._note_look, self._off_the_clock)
        self._seen = {}  # path → Written, of the current window
        self._window_ns = self._window_steps = 0
        self.sites = Sites("file_write")
        self.target = None
        self.refused = {}
        self.is_removed = False
        self._held_step = None  # the last one in which a write was held back

    def wrap_open(self):
        @functools.wraps(self._open_real)
        def open_timed(file, mode="r", *args, **kwargs):
            return self._open(file, mode, args, kwargs)

        @functools.wraps(self._save_real)
        def save_timed(obj, f, *args, **kwargs):
            return self._save(obj, f, args, kwargs)

        builtins.open = io.open = open_timed
        torch.save = save_timed

    def wrap_dumps(self):
        """Wrap ``dump`` functions of modules that the script may import after torch but before its first step."""
        json.dump = self._wrap_dump(json.dump, "json.dump", "fp")
        pickle.dump = self._wrap_dump(pickle.dump, "pickle.dump", "file")

    def time(self, function, does, path, *args, **kwargs):
        """Call ``function`` and charge its time to the calling line of user code."""
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
            self.sites.find(frame, does, path).add(took_ns)
            self._find_written(path).ns += took_ns

    def settle(self):
        """Write all that is held back."""
        if os.getpid() == self._observer.pid:
            self._held.release()

    def _note_look(self):
        """Rule out a file that is read or inspected in the step that writes it."""
        self.refused[self.target] = "the script looks at it, or starts a process, in the same step"
        self.is_removed = False

    @property
    def is_comparable(self):
        return self.target is not None and self.target not in self.refused

    def end_step(self, wall_ns):
        """Look, once per window of steps, for a file that every step writes."""
        if self.target is not None:
            return
        self._window_ns += wall_ns
        self._window_steps += 1
        if self._window_steps < WINDOW_STEPS:
            return
        fits = [
            path
            for path, seen in self._seen.items()
            if seen.n_steps >= MIN_HIT_SHARE * WINDOW_STEPS and seen.ns >= MIN_TIME_SHARE * self._window_ns
        ]
        for path in fits:
            if self._seen[path].n_opens != self._seen[path].n_steps:
                self.refused[path] = "a step does not open it exactly once"
            elif self._seen[path].n_missing > 1:  # a file counts once it exists
                self.refused[path] = "it is not there when it is opened, as a file that is renamed later"
        fits = [path for path in fits if path not in self.refused]
        if fits:
            self.target = max(fits, key=lambda path: self._seen[path].ns)
        self._window_ns = self._window_steps = 0
        self._seen = {}

    def _find_written(self, path):
        seen = self._seen.setdefault(path, Written())
        if seen.last_step != self._observer.step:
            seen.last_step = self._observer.step
            seen.n_steps += 1
        return seen

    def _note_open(self, path):
        seen = self._find_written(path)
        seen.n_opens += 1
        seen.n_missing += not os.path.exists(path)

    def _open(self, file, mode, args, kwargs):
        given = {**dict(zip(OPEN_ARGUMENTS, args)), **kwargs}
        is_plain = given.pop("buffering", -1) == -1 and not given.keys() - set(OPEN_ARGUMENTS)
        how = mode.strip("bt") if isinstance(mode, str) else ""
        is_ours = is_plain and how in ("w", "a") and isinstance(file, (str, os.PathLike)) and self._is_writing_step()
        if not is_ours or find_user_frame(2) is None:
            if self._held.touches(file):
                self._held.look()
            return self._open_real(file, mode, *args, **kwargs)
        path = self._resolve(file)
        options = {name: value for name, value in given.items() if value is not None}
        has_codec = "b" in mode or find_plain_encoding(options.get("encoding")) is not None
        if self._must_hold(path, None if has_codec else "its encoding has a mark at its start, or is not known"):
            return HeldStream(self._held, path, file, mode, options)
        self._let_go(path, how)
        self._note_open(path)
        return self.time(self._build_stream, "open", path, path, file, mode, how, options)

    def _must_hold(self, path, obstacle=None):
        """Return whether this write is to be held back; rule the file out if it cannot be."""
        if not self.is_removed or path != self.target:
            return False
        if self._held_step == self._observer.step:  # no plain step, or none: the training may be over
            self.is_removed, self._observer.is_disturbed = False, True
            return False
        obstacle = obstacle or self._off_the_clock(self._held.begin, path)
        if obstacle:
            self.refused[path], self.is_removed = obstacle, False
        self._held_step = self._observer.step
        return self.is_removed

    def _build_stream(self, path, file, mode, how, options):
        """Build the stream that ``open`` would return, over a file that times its calls."""
        raw = TimedFile(self, path, file, how)
        size = max(getattr(os.fstat(raw.fileno()), "st_blksize", 0), io.DEFAULT_BUFFER_SIZE)
        binary = io.BufferedWriter(raw, size)
        if "b" in mode:
            return binary
        text = io.TextIOWrapper(binary, **options)
        text.mode = mode
        return text

    def _resolve(self, file):
        """Return the real path of a name without counting as a look at the file."""
        return self.target if self._held.touches(file) else os.path.realpath(file)

    def _let_go(self, path, how):
        """Let a real write happen: a rewrite replaces what was held back, an append follows it."""
        if path == self.target:
            self._held.supersede() if how == "w" else self._held.release()

    def _save(self, obj, f, args, kwargs):
        is_ours = isinstance(f, (str, os.PathLike)) and self._is_writing_step()
        if not is_ours or find_user_frame(2) is None:
            if isinstance(f, HeldStream) or find_timed_file(f) is not None:
                return self._dump(self._save_real, "torch.save", f, (obj, f, *args), kwargs)
            return self._save_real(obj, f, *args, **kwargs)
        path = self._resolve(f)
        if self._must_hold(path) and self._serialise(self._save_to_memory, path, obj, args, kwargs):
            return None
        self._let_go(path, "w")
        self._note_open(path)
        return self.time(self._save_real, "torch.save", path, obj, f, *args, **kwargs)

    def _save_to_memory(self, path, obj, args, kwargs):
        """Save to memory, under the file's own name as torch stores that in the archive; return whether it worked."""
        copy = os.path.join(self._folder, os.path.basename(path))
        try:
            if not has_room(self._folder):
                raise OSError(f"{self._folder} is nearly full")
            self._save_real(obj, copy, *args, **kwargs)
            with self._open_real(copy, "rb") as stream:
                content = stream.read()
        except Exception as error:  # the script gets its own error from its own save
            self.refused[path], self.is_removed = f"no copy of it could be kept: {error}", False
            with contextlib.suppress(OSError):
                os.truncate(copy, 0)
            return False
        self._held.keep(path, "w", content)
        return True

    def _wrap_dump(self, dump, does, name):
        @functools.wraps(dump)
        def timed(*args, **kwargs):
            stream = kwargs[name] if name in kwargs else args[1] if len(args) > 1 else None
            return self._dump(dump, does, stream, args, kwargs)

        return timed

    def _dump(self, dump, does, stream, args, kwargs):
        if isinstance(stream, HeldStream):  # now, as the object may change later; the time is not the step's
            return self._serialise(dump, *args, **kwargs)
        file = find_timed_file(stream)
        return dump(*args, **kwargs) if file is None else self.time(dump, does, file.path, *args, **kwargs)

    def _serialise(self, function, *args, **kwargs):
        """Call it off the clock, but wait for the device on the clock: its work for the step is not the write's."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._off_the_clock(function, *args, **kwargs)

    def _off_the_clock(self, function, *args, **kwargs):
        began_ns = perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            self._observer.leave_out(perf_counter_ns() - began_ns)

    def _is_writing_step(self):
        """Return whether this is the training's thread, outside of sample loading and other writes."""
        spans = self._observer.spans
        is_here = get_ident() == self._observer.thread
        return is_here and not spans.is_inside(DATA_WAIT) and not spans.is_inside(FILE_WRITE)
