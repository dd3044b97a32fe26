"""Open the database of a lab: check it, bring it up to date, keep other writers out.

SQLite in the lab's folder by default, with a write-ahead log and a ballast file for the day when the disk is full;
PostgreSQL by URL.
"""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from fulltilt.errors import RunFolderError, StorageError, UsageError
from fulltilt.lab.store.store import Store, begin

DATABASE, BALLAST = "lab.db", "ballast"
BALLAST_BYTES = 2 << 20  # for some thousand changes of state
SPARE_BYTES = 1 << 20  # with less beside the ballast the disk is full
N_CONNECTIONS = 16  # kept open: to open one takes longer than to read
BUSY_TIMEOUT_S = 60.0  # to wait for another process's transaction, which takes milliseconds
SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # NORMAL may lose what was committed when the power fails
    "PRAGMA foreign_keys = ON",
)
FIRST = "0001"  # what a database without a version is: that of a lab of one machine
ADVISORY_LOCK = 0x66756C6C  # any number that nothing else takes


def open_store(lab: Path, *, url: str | None = None, create: bool = False) -> Store:
    """Open the records of a lab. The caller holds the lock of its folder where it writes.

    Args:
        url: ``postgresql://…``; None: SQLite in the folder.

    Raises:
        UsageError: the folder holds no queue. RunFolderError: another server writes to the database.
        StorageError: it cannot be read or written, is damaged or no database, or belongs to a newer fulltilt.
    """
    if url is not None:
        return _open_postgresql(url)
    path = lab / DATABASE
    if not create and not path.is_file():
        raise UsageError(f"there is no lab in {lab}; fulltilt lab submit --local CONFIG makes one, --lab names another")
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT_S}, pool_size=N_CONNECTIONS)
    event.listen(engine, "connect", _set_up_connection)
    ballast = Ballast(lab / BALLAST)
    with explain_storage_errors(str(path)):
        ballast.restore()
        _check_integrity(engine, path)
        _migrate(engine, keep=path)
    return Store(engine, explain=lambda: explain_storage_errors(str(path)), ballast=ballast)


class Ballast:
    """A file that is given up when the disk is full, so that states can still be written."""

    def __init__(self, path: Path):
        self._path = path

    def release(self) -> bool:
        """Give the room back to the disk; False where that was done already."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True

    def restore(self) -> bool:
        """Take the room again; False where there is too little, or nothing beside it."""
        n_free = shutil.disk_usage(self._path.parent).free
        if self._path.exists() or n_free < BALLAST_BYTES + SPARE_BYTES:  # what it gave up is not taken at once
            return n_free >= SPARE_BYTES and self._path.exists()
        partial = self._path.with_name(f".{self._path.name}")
        try:
            with partial.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, BALLAST_BYTES)
            partial.replace(self._path)
        except OSError:
            partial.unlink(missing_ok=True)
            return False
        return True


def _open_postgresql(url: str) -> Store:
    shown = sa.make_url(url).set(drivername="postgresql+psycopg")
    place = shown.render_as_string(hide_password=True).replace("+psycopg", "")
    with explain_storage_errors(place):
        engine = sa.create_engine(shown, pool_pre_ping=True)
        holder = engine.connect()  # the lock lasts as long as this connection
        if not holder.scalar(sa.select(sa.func.pg_try_advisory_lock(ADVISORY_LOCK))):
            holder.close()
            engine.dispose()
            raise RunFolderError(f"another server of a lab writes to {place}; stop it, or name another database")
        holder.commit()
        _migrate(engine)
    return Store(engine, explain=lambda: explain_storage_errors(place), on_close=holder.close)


def _migrate(engine: sa.Engine, *, keep: Path | None = None) -> None:
    """Run what is missing of the migrations, in one transaction; a file is copied to the side before that."""
    from alembic import command
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    scripts = ScriptDirectory.from_config(settings)
    with engine.begin() as connection:
        version = MigrationContext.configure(connection).get_current_revision()
        tables = sa.inspect(connection).get_table_names()
    newest = scripts.get_current_head()
    if version == newest:
        return
    known = {script.revision for script in scripts.walk_revisions()}
    if version is not None and version not in known:
        raise StorageError(
            f"{keep or 'the database'} has version {version}, and this fulltilt knows {newest}; install the newer one"
        )
    is_old = version is not None or "experiment" in tables
    if keep is not None and is_old:
        copy_database(keep, keep.with_name(f"{keep.name}.before-{newest}"))
    with engine.begin() as connection:
        begin(connection)
        settings.attributes["connection"] = connection
        if is_old and version is None:
            command.stamp(settings, FIRST)
        command.upgrade(settings, "head")


def copy_database(source: Path, target: Path) -> None:
    """Copy a database as it is at one moment, also while others write to it."""
    partial = target.with_name(f".{target.name}")
    with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(partial)) as new:
        old.backup(new)
    partial.replace(target)


def _check_integrity(engine: sa.Engine, path: Path) -> None:
    with engine.connect() as connection:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise StorageError(f"{path} is damaged ({found}); restore a copy with fulltilt lab restore, or move it away")


def _set_up_connection(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where begin says, and not at the driver's discretion
    for setting in SETTINGS:
        connection.execute(setting)


@contextlib.contextmanager
def explain_storage_errors(place: str) -> Iterator[None]:
    """Turn errors of the database into ours, which name the place and the remedy."""
    try:
        yield
    except exc.DatabaseError as error:
        said = str(error.orig).strip().partition("\n")[0]
        if "full" in said or "No space left" in said:
            raise StorageError(f"no space left for {place}; free some and try again") from error
        if "not a database" in said or "malformed" in said:
            raise StorageError(
                f"{place} is no lab of fulltilt ({said}); move it away, or name another --lab"
            ) from error
        raise StorageError(
            f"{place} cannot be used ({said}); see that it can be reached and written and its disk has room, or name "
            "another --lab"
        ) from error
