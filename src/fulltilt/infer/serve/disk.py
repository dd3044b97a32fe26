"""Keep bytes by key in a bounded SQLite file, whose failure stops nobody."""

import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

FILE = "cache.db"
LAYOUT = 1
TABLE = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, expires_s REAL NOT NULL, data BLOB NOT NULL)"
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT)
BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
MOST_PENDING = 1000  # answers that wait to be written; more are not kept
AT_ONCE = 64  # written in a transaction, and looked at when room is made
PATIENCE_S = 2.0  # with other servers that write to the same file


class Disk:
    """Writes in a thread of its own, so that nobody waits for the disk; reads where it is asked.

    Args:
        say: Told once of a file that was set aside, and of a disk that takes no more.
    """

    def __init__(self, folder: Path, *, most_bytes: int, say: Callable[[str], None]):
        self._path, self._most_bytes, self._say = folder / FILE, most_bytes, say
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._damage: sqlite3.Error | None = None
        self.is_writing = True
        self._lock = threading.Lock()  # the reader is used by one thread, and replaced by another
        self._pending: queue.Queue[tuple[bytes, float, bytes] | None] = queue.Queue(MOST_PENDING)
        self._open()
        self._thread = threading.Thread(target=self._run, name="cache", daemon=True)
        self._thread.start()

    def read(self, key: bytes, now_s: float) -> tuple[bytes, float] | None:
        """Return the bytes of a key that has not expired, and when it does."""
        with self._lock:
            if self._reader is None or self._damage is not None:
                return None
            try:
                found = self._reader.execute("SELECT data, expires_s FROM answers WHERE key = ?", (key,)).fetchone()
            except sqlite3.Error as error:
                if error.sqlite_errorcode & 0xFF not in BUSY:
                    self._damage = error
                    with contextlib.suppress(queue.Full):
                        self._pending.put_nowait(None)  # the thread looks after it
                return None
        return found if found and found[1] > now_s else None

    def write(self, key: bytes, data: bytes, expires_s: float) -> None:
        with contextlib.suppress(queue.Full):
            self._pending.put_nowait((key, expires_s, data))

    def close(self) -> None:
        self._pending.put((b"", 0.0, b""))  # no key is empty: it is the end
        self._thread.join()
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            rows = [self._pending.get()]
            with contextlib.suppress(queue.Empty):
                while len(rows) < AT_ONCE:
                    rows.append(self._pending.get_nowait())
            is_over = any(row is not None and not row[0] for row in rows)
            if self._damage is not None:
                self._set_aside(self._damage)
            self._write([row for row in rows if row is not None and row[0]])

    def _write(self, rows: list[tuple[bytes, float, bytes]]) -> None:
        if not rows or not self.is_writing or self._writer is None:
            return
        try:
            with self._writer as writer:
                writer.executemany("INSERT OR REPLACE INTO answers (key, expires_s, data) VALUES (?, ?, ?)", rows)
            self._make_room()
        except sqlite3.Error as error:
            code = error.sqlite_errorcode & 0xFF
            if code in DAMAGED:
                self._set_aside(error)
            elif code not in BUSY:
                self._stop(error)

    def _make_room(self) -> None:
        """Delete the oldest: those that have expired, and as many as the size asks for."""
        assert self._writer is not None
        oldest = f"SELECT rowid FROM answers ORDER BY rowid LIMIT {AT_ONCE}"
        with self._writer as writer:
            writer.execute(f"DELETE FROM answers WHERE rowid IN ({oldest}) AND expires_s < ?", (time.time(),))
        while self._measure() > self._most_bytes:
            with self._writer as writer:
                if not writer.execute(f"DELETE FROM answers WHERE rowid IN ({oldest})").rowcount:
                    return

    def _measure(self) -> int:
        assert self._writer is not None
        pages, free, size = (
            self._writer.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _open(self) -> None:
        """Open the file, a new one where it is damaged; without one nothing is kept on disk."""
        for is_first in (True, False):
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = self._connect()
                layout = self._writer.execute("PRAGMA user_version").fetchone()[0]
                if layout not in (0, LAYOUT):
                    raise sqlite3.DatabaseError(f"it has layout {layout}, this is {LAYOUT}")
                self._writer.execute("PRAGMA journal_mode = WAL")
                self._writer.execute("PRAGMA synchronous = NORMAL")
                self._writer.execute(TABLE)
                self._writer.execute(f"PRAGMA user_version = {LAYOUT}")
                self._reader = self._connect()
                self._reader.execute("SELECT key, expires_s, data FROM answers LIMIT 1").fetchone()
                return
            except (OSError, sqlite3.Error) as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
                if not is_first or isinstance(error, OSError) or code not in DAMAGED:
                    self._stop(error)
                    return
                self._move_away(error)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=PATIENCE_S, check_same_thread=False)

    def _set_aside(self, error: sqlite3.Error) -> None:
        with self._lock:
            self._move_away(error)
            self._open()
            self._damage = None

    def _move_away(self, error: Exception) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None
        aside = self._path.with_name(f"{FILE}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        with contextlib.suppress(OSError):
            self._path.rename(aside)
        for end in ("-wal", "-shm"):
            self._path.with_name(FILE + end).unlink(missing_ok=True)
        self._say(f"the cache {self._path} is damaged ({error}); it was set aside as {aside.name}, a new one begins")

    def _stop(self, error: Exception) -> None:
        self.is_writing = False
        self._say(f"the cache {self._path} takes nothing more ({error}); answers are kept in memory only")
