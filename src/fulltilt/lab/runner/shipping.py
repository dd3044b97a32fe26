"""Bring an attempt's log, events and checkpoints to the server while it trains.

Bytes are sent from where the server says its end is, so nothing arrives twice and nothing is left out. While the server
is away they wait in the files themselves.
"""

import contextlib
import math
import os
import tarfile
import threading
import time
from pathlib import Path

from fulltilt.hardware.filesystem import free_beginning
from fulltilt.lab.records import is_plain_name
from fulltilt.lab.runner.link import FencedError, Link, RejectedError, UnreachableError
from fulltilt.lab.runner.renewal import Renewal
from fulltilt.records.run_folder import drop_torn_line

TURN_S = 0.5
RETRY_S = 1.0
PIECE_BYTES, PIECES_A_TURN = 1 << 20, 16  # of a stream: a log must not keep checkpoints waiting
MOST_LOG_BYTES = 1 << 30  # of an attempt
KEPT_BYTES = 64 << 20  # of a log that has arrived: a server that loses its last seconds asks again
MOST_FOLDER_BYTES = 4 << 30  # in a folder of a result: the device waits while it is packed and sent
CUT = b"\n[fulltilt: the log is cut here, after 1 GiB; print less]\n"
CHECKPOINT, FINGERPRINT = "checkpoint.pt", "fingerprint.json"
CHECKPOINTS = (CHECKPOINT, FINGERPRINT)  # what a training goes on from elsewhere
LEFT_OUT = (".lock", "checkpoint.previous.pt")  # of a run folder: of use on its node only


class Shipping:
    """Ships what one attempt writes, in a thread of its own."""

    def __init__(self, link: Link, *, log: Path, out_dir: Path, renewal: Renewal):
        self._link, self._renewal, self._out_dir = link, renewal, out_dir
        events = out_dir / "events.jsonl"
        self._streams = [
            _Stream("log.txt", log, 0, MOST_LOG_BYTES),
            _Stream("events.jsonl", events, _measure_whole(events)),
        ]
        self._sent: tuple[int, int] | None = _identify(out_dir / CHECKPOINT)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shipping", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Wait until all that was written has arrived; the guard ends this where the server stays away."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._renewal.is_fenced:
            raise FencedError

    def _run(self) -> None:
        while not self._renewal.is_fenced:
            is_last = self._is_over.is_set()
            try:
                if self._ship():
                    continue
                if is_last:
                    return
                self._is_over.wait(TURN_S)
            except RejectedError:  # a checkpoint is too large: the result meets the same, and says so
                self._sent = _identify(self._out_dir / CHECKPOINT)
            except UnreachableError:
                time.sleep(RETRY_S)
            except FencedError:
                self._renewal.is_fenced = True

    def _ship(self) -> bool:
        """Send a part of what is new, and return whether there is more."""
        has_more = False
        for stream in self._streams:
            for _ in range(PIECES_A_TURN):
                if not (piece := stream.read()):
                    break
                stream.n_sent = self._link.append(stream.name, stream.n_sent, piece)
            else:
                has_more = True
        self._streams[0].release()
        found = _identify(self._out_dir / CHECKPOINT)
        if found is not None and found != self._sent:
            files = [self._out_dir / name for name in CHECKPOINTS if (self._out_dir / name).exists()]
            self._link.commit_checkpoint([self._link.send(file) for file in files])
            self._sent = found
        return has_more


class _Stream:
    """A file that grows, and how much of it has arrived."""

    def __init__(self, name: str, path: Path, start: int, most: float = math.inf):
        self.name, self._path, self._start, self._most = name, path, start, most
        self.n_sent = 0

    def read(self) -> bytes:
        n_left = self._most - self.n_sent
        if n_left <= 0:
            return CUT if n_left == 0 else b""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._start + self.n_sent)
                return stream.read(int(min(PIECE_BYTES, n_left)))
        except FileNotFoundError:
            return b""

    def release(self) -> None:
        """Give back the node's disk what has arrived and what never will; a training may print for weeks."""
        with contextlib.suppress(OSError):  # somebody removed it
            n_bytes = self._path.stat().st_size if self.n_sent > self._most else self.n_sent - KEPT_BYTES
            if n_bytes > 0:
                free_beginning(self._path, n_bytes)


def list_result_files(out_dir: Path) -> list[Path]:
    """Return the files of a run folder that belong to its result."""
    return [path for path in _list_result(out_dir) if path.is_file() and is_plain_name(path.name)]


def pack_result_folders(out_dir: Path, target: Path) -> tuple[list[Path], list[str]]:
    """Pack each folder of a run folder, as loggers write them, into a file of its name and ``.tar`` below ``target``.

    Returns:
        The files, and for each folder that is in none the reason.
    """
    packed, left = list[Path](), list[str]()
    for folder in _list_result(out_dir):
        if not folder.is_dir():
            continue
        archive = target / f"{folder.name}.tar"
        try:
            if not is_plain_name(archive.name) or (out_dir / archive.name).exists():
                raise OSError(f"a file of the result cannot be named {archive.name!r}")
            if _measure_folder(folder) > MOST_FOLDER_BYTES:
                raise OSError(f"more than {MOST_FOLDER_BYTES >> 30} GiB")
            with tarfile.open(archive, "w") as tar:
                tar.add(folder, folder.name)
            packed.append(archive)
        except (OSError, tarfile.TarError) as error:
            with contextlib.suppress(OSError):
                archive.unlink()
            left.append(f"{folder} ({error})")
    return packed, left


def _list_result(out_dir: Path) -> list[Path]:
    return sorted(
        path
        for path in out_dir.iterdir()
        if not path.is_symlink() and path.name not in LEFT_OUT and not path.name.startswith(".")
    )


def _measure_folder(folder: Path) -> int:
    return sum(os.lstat(os.path.join(here, name)).st_size for here, _, names in os.walk(folder) for name in names)


def _measure_whole(path: Path) -> int:
    """Cut off a torn last line, as the training will, and return the size in bytes."""
    if not path.exists():
        return 0
    with path.open("rb+", buffering=0) as stream:
        return drop_torn_line(stream)


def _identify(path: Path) -> tuple[int, int] | None:
    """Tell one checkpoint from the next, which takes its place as another file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
