"""Keep bytes by key in a bounded SQLite file, whose failure stops nobody."""

import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

FILE = "cache.db"  # other columns need another name
TABLE = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, expires_s REAL NOT NULL, data BLOB NOT NULL)"
READ = "SELECT data, expires_s FROM answers WHERE key = ? AND expires_s > ?"
WRITE = "INSERT OR REPLACE INTO answers (key, expires_s, data) VALUES (?, ?, ?)"
SIZE = (
    "SELECT (page_count - freelist_count) * page_size "
    "FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
)
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
MOST_PENDING = 1000  # answers that wait to be written; more are not kept
AT_ONCE = 64  # answers written, or deleted, in a transaction
OLDEST = "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers ORDER BY rowid LIMIT ?)"
PATIENCE_S = 2.0  # with other servers that write to the same file


class Disk:
    """Writes in a thread of its own, so that nobody waits for the disk; is read by one thread.

    Args:
        say: Told once of a file that is damaged, or of a disk that takes no more.
    """

    def __init__(self, folder: Path, *, most_bytes: int, say: Callable[[str], None]):
        self._path, self._most_bytes, self._say = folder / FILE, most_bytes, say
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._failure: Exception | None = None
        self._pending: queue.Queue[tuple[bytes, float, bytes] | None] = queue.Queue(MOST_PENDING)
        try:
            try:
                self._open()
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._set_aside()
                say(f"the cache {self._path} is damaged ({error}); it was set aside, and a new one begins")
                self._open()
        except (OSError, sqlite3.Error) as error:
            self._fail(error)
        self._thread = threading.Thread(target=self._run, name="cache", daemon=True)
        self._thread.start()

    def read(self, key: bytes, now_s: float) -> tuple[bytes, float] | None:
        """Return the bytes of a key that has not expired, and when it does."""
        try:
            return self._reader and self._reader.execute(READ, (key, now_s)).fetchone()
        except sqlite3.Error as error:
            self._fail(error)
            return None

    def write(self, key: bytes, data: bytes, expires_s: float) -> None:
        if not self._pending.full() and len(data) <= self._most_bytes // 16:  # for a larger one much else would go
            self._pending.put_nowait((key, expires_s, data))

    def close(self) -> None:
        """Write what is pending; a file that turned out to be damaged is set aside."""
        self._pending.put(None)
        self._thread.join()
        if is_damage(self._failure):
            self._set_aside()
        self._disconnect()

    def _run(self) -> None:
        rows: list[tuple[bytes, float, bytes] | None] = []
        while None not in rows:
            rows = [self._pending.get()]
            with contextlib.suppress(queue.Empty):
                while len(rows) < AT_ONCE:
                    rows.append(self._pending.get_nowait())
            if self._writer is not None and self._failure is None:
                try:
                    self._write(self._writer, [row for row in rows if row is not None])
                except sqlite3.Error as error:
                    self._fail(error)

    def _write(self, writer: sqlite3.Connection, rows: list[tuple[bytes, float, bytes]]) -> None:
        """Write answers in place of the oldest: those that have expired, and as many as the size asks for."""
        with writer:
            writer.execute(f"{OLDEST} AND expires_s < ?", (AT_ONCE, time.time()))
            writer.executemany(WRITE, rows)
            while writer.execute(SIZE).fetchone()[0] > self._most_bytes and writer.execute(OLDEST, (1,)).rowcount:
                writer.commit()  # others write to the file too

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer, self._reader = (
            sqlite3.connect(self._path, timeout=PATIENCE_S, check_same_thread=False) for _ in range(2)
        )
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = NORMAL")
        self._writer.execute(TABLE)
        self._reader.execute(READ, (b"", 0.0)).fetchone()

    def _disconnect(self) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()

    def _set_aside(self) -> None:
        self._disconnect()
        with contextlib.suppress(OSError):
            self._path.rename(self._path.with_name(f"{FILE}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"))
        for end in ("-wal", "-shm"):
            self._path.with_name(FILE + end).unlink(missing_ok=True)

    def _fail(self, error: Exception) -> None:
        """Write nothing more, and say so, unless others only keep the file busy."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in BUSY or self._failure is not None:
            return
        self._failure = error
        how = "is damaged" if is_damage(error) else "takes nothing more"
        self._say(f"the cache {self._path} {how} ({error}); answers are kept in memory only until the next start")


def is_damage(error: Exception | None) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED
