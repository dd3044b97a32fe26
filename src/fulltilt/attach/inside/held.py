"""``Held``: keeps bytes back that a script wrote to a file, until anything could notice that they are missing.

They are written when the file is opened, inspected or moved, when a process is started or ended, and on a signal that
ends the script. Other programs that already run cannot be guarded: they may see the file as it was some steps ago.
"""

from __future__ import annotations

import builtins
import functools
import os
import resource
import signal
import subprocess
import threading
import weakref

BY_PATH = ("stat", "lstat", "open", "replace", "rename", "remove", "unlink", "link", "symlink", "truncate", "utime")
ALWAYS = ("scandir", "system", "fork", "posix_spawn", "execv", "execve", "_exit", "kill", "killpg", "abort")
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
MIN_ROOM_BYTES = 256 << 20


class Held:
    """Keeps back the bytes of one file and writes them as soon as anything could notice."""

    def __init__(self, note_look, off_the_clock):
        self._note_look = note_look  # called when something looks at the file
        self.off_the_clock = off_the_clock  # calls a function without charging its time to the step
        self.open, self._stat = builtins.open, os.stat
        self.streams = weakref.WeakSet()  # HeldStreams that are still open
        self._writes = []  # (path, "w" or "a", bytes), in order
        self._file = None  # device and inode of the file
        self._guarded = []  # (owner, attribute name, original)
        self._lock = threading.RLock()

    def begin(self, path):
        """Guard every call that could look at the file, before its first write is held back.

        Returns:
            Why the file cannot be held back, or None.
        """
        with self._lock:
            if self._guarded:
                return None
            try:
                found, is_roomy, descriptors = self._stat(path), has_room(path), os.listdir("/proc/self/fd")
                ending = self._list_ending()
            except OSError:
                return "it is not there when it is opened, or /proc cannot be read"
            if not is_roomy:
                return "the disk is nearly full or file sizes are limited, and a write must fail in its own step"
            self._file = found.st_dev, found.st_ino
            if any(self._is_file(int(number)) for number in descriptors):
                return "the script keeps it open"
            for name in BY_PATH + ALWAYS:
                self._replace(os, name, self._guard(getattr(os, name), name in BY_PATH))
            self._replace(subprocess.Popen, "__init__", self._guard(subprocess.Popen.__init__, False))
            for number in ending:
                signal.signal(number, self._end_by_signal)
            return None

    def keep(self, path, how, content):
        """Hold ``content`` back; a rewrite of the file replaces what was held back before."""
        with self._lock:
            if not self._guarded:  # something looked while the stream was open
                self._write(path, how, content)
                return
            if how == "w":
                self._writes = []
            self._writes.append((path, how, content))

    def supersede(self):
        """Drop what is held back: the file is being rewritten for real."""
        with self._lock:
            self._writes = []
            self.release()

    def touches(self, file):
        """Return whether ``file``, a path or descriptor, is the file that is held back."""
        return bool(self._guarded) and self._is_file(file)

    def look(self):
        """Write what is held back, because something may look at the file, and report the look."""
        if self._guarded:
            self._note_look()
        self.release()

    def release(self):
        """Write all that is held back and remove the guards."""
        with self._lock:
            for where, name, function in self._guarded:
                setattr(where, name, function)
            for number in ENDING if _is_main_thread() else ():
                if signal.getsignal(number) == self._end_by_signal:
                    signal.signal(number, signal.SIG_DFL)
            self._guarded = []
            writes, self._writes = self._writes, []
            for path, how, content in writes:
                self._write(path, how, content)
            for stream in list(self.streams):
                stream.switch()

    def _is_file(self, file):
        try:
            found = self._stat(file)
        except (OSError, TypeError, ValueError):
            return False
        return (found.st_dev, found.st_ino) == self._file

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

    def _list_ending(self):
        """List the signals that would end the process at once; those that C code catches look unhandled to Python."""
        if not _is_main_thread():
            return []
        with self.open("/proc/self/status", "rb") as status:
            caught = next((int(line.split()[1], 16) for line in status if line.startswith(b"SigCgt")), 0)
        return [
            number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL and not caught >> (number - 1) & 1
        ]

    def _end_by_signal(self, number, frame):
        self.release()
        os.kill(os.getpid(), number)


def has_room(path):
    disk, size_limit = os.statvfs(path), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return disk.f_bavail * disk.f_frsize >= MIN_ROOM_BYTES and size_limit == resource.RLIM_INFINITY


def _is_main_thread():
    return threading.current_thread() is threading.main_thread()
