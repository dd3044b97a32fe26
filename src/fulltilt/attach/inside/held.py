"""``Held``: bytes that a script wrote to a file and that are not there yet, and everybody who could notice.

They are written when the file is opened, looked at or moved, when a process is started or ended, and on SIGTERM. A
program that runs already cannot be guarded: it may see the file as it was some steps ago.
"""

from __future__ import annotations

import builtins
import functools
import os
import signal
import subprocess
import threading
import weakref

BY_PATH = ("stat", "lstat", "open", "replace", "rename", "remove", "unlink", "link", "symlink", "truncate", "utime")
ALWAYS = ("scandir", "system", "fork", "posix_spawn", "execv", "execve", "_exit", "kill", "killpg", "abort")


class Held:
    """Keeps bytes back from one file, and writes them as soon as somebody could notice."""

    def __init__(self, note_look, off_the_clock):
        self._note_look = note_look  # called when somebody looks at what is held back
        self.off_the_clock = off_the_clock  # calls a function in no time of the step
        self.open, self._stat = builtins.open, os.stat
        self.streams = weakref.WeakSet()  # HeldStreams that are still open
        self._writes = []  # (path, "w" or "a", bytes), in order
        self._file = None  # device and inode of the file
        self._guarded = []  # (where, name, as it was)
        self._lock = threading.RLock()

    def begin(self, path):
        """A write is about to be held back: watch who may look at the file."""
        with self._lock:
            if self._guarded:
                return
            found = self._stat(path)
            self._file = found.st_dev, found.st_ino
            for name in BY_PATH + ALWAYS:
                self._replace(os, name, self._guard(getattr(os, name), name in BY_PATH))
            self._replace(subprocess.Popen, "__init__", self._guard(subprocess.Popen.__init__, False))
            if _is_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._end_by_signal)

    def keep(self, path, how, content):
        """Hold ``content`` back; a file that is written anew supersedes what was held back of it."""
        with self._lock:
            if not self._guarded:  # somebody looked between its opening and its end
                self._write(path, how, content)
                return
            if how == "w":
                self._writes = []
            self._writes.append((path, how, content))

    def supersede(self):
        """The file is being written anew, for real."""
        with self._lock:
            self._writes = []
            self.release()

    def touches(self, file):
        """Whether ``file`` is the one that is held back, by whatever name or descriptor."""
        if not self._guarded:
            return False
        try:
            found = self._stat(file)
        except (OSError, TypeError, ValueError):
            return False
        return (found.st_dev, found.st_ino) == self._file

    def look(self):
        """Somebody may see the file: write what is held back, and say so."""
        if self._guarded:
            self._note_look()
        self.release()

    def release(self):
        """Write all that is held back, and let everybody look again."""
        with self._lock:
            for where, name, function in self._guarded:
                setattr(where, name, function)
            if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._end_by_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._guarded = []
            writes, self._writes = self._writes, []
            for path, how, content in writes:
                self._write(path, how, content)
            for stream in list(self.streams):
                stream.switch()

    def _write(self, path, how, content):
        with self.open(path, how + "b") as stream:
            stream.write(content)

    def _replace(self, where, name, function):
        self._guarded.append((where, name, getattr(where, name)))
        setattr(where, name, function)

    def _guard(self, function, is_by_path):
        @functools.wraps(function)
        def guarded(*args, **kwargs):
            if not is_by_path or any(self.touches(arg) for arg in args[:2]) or not args:
                self.look()
            return function(*args, **kwargs)

        return guarded

    def _end_by_signal(self, number, frame):
        self.release()
        os.kill(os.getpid(), number)


def _is_main_thread():
    return threading.current_thread() is threading.main_thread()
