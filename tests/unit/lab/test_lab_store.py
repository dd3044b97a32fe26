"""The files of the records: synced, checked, brought up to date, written to by one process, and a full disk."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import event
from tests.lab_cases import ON_A_SLOT, build_points, lease

from fulltilt.errors import StorageError, UsageError
from fulltilt.lab.states import ARROWS, OWNED, STATES
from fulltilt.lab.store import StaleAttemptError, Store, open_store
from fulltilt.lab.store.tables import TABLES

GRID = Path("/somewhere/grid.yaml")
OPTIONS = {"include_object": lambda _, __, kind, *___: kind != "index"}  # Alembic does not see what is descending
OF_BEFORE = Path(__file__).with_name("lab_of_one_machine.sql")


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(open_store(tmp_path, create=True)) as store:
        yield store


def test_the_table_of_arrows_is_whole():
    assert {arrow.target for arrow in ARROWS.values()} == set(STATES)
    sources = {source for arrow in ARROWS.values() for source in arrow.sources}
    assert "succeeded" not in sources
    assert set(OWNED) <= sources <= set(STATES)


def test_of_many_that_want_one_experiment_one_gets_it(store):
    store.add(GRID, build_points(1), [])
    (row,) = store.read_experiments()
    got, refused = [], []

    def claim() -> None:
        try:
            got.append(lease(store, row))
        except StaleAttemptError:
            refused.append(1)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)


def test_threads_that_write_at_once_share_a_transaction_and_one_that_is_refused_takes_nothing_from_the_others(store):
    store.add(GRID, build_points(40), [])
    rows = store.read_experiments()
    commits = []
    event.listen(store._engine, "commit", commits.append)
    barrier, refused = threading.Barrier(8), []

    def work(mine) -> None:
        barrier.wait()
        for row in mine:
            attempt, _ = lease(store, row)
            with pytest.raises(StaleAttemptError):
                store.advance("commit", attempt)
            refused.append(row.id)
            store.advance("fail", attempt, outcome="lost")

    threads = [threading.Thread(target=work, args=(rows[start::8],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.count_states() == {"failed": 40}
    assert len(refused) == 40
    assert len(commits) < 100, "80 changes and 40 refusals"


def test_a_folder_without_a_lab_and_a_file_that_is_none(tmp_path):
    with pytest.raises(UsageError, match="submit --local CONFIG makes one"):
        open_store(tmp_path)
    (tmp_path / "lab.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="is no lab of fulltilt"):
        open_store(tmp_path)


def test_a_damaged_file_is_told_when_it_is_opened(store, tmp_path):
    store.add(GRID, build_points(500), [])
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "lab.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray((tmp_path / "lab.db").read_bytes())
    content[8192:40960] = b"\xff" * 32768
    (tmp_path / "lab.db").write_bytes(content)
    with pytest.raises(StorageError, match=r"lab\.db (is damaged|is no lab)"):
        open_store(tmp_path)


def test_what_is_committed_is_synced_and_on_a_full_disk_states_can_still_be_written(store, tmp_path):
    store.add(GRID, build_points(2), [])
    with store._engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        assert pragmas == ["wal", 2], "what is committed is synced"
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    assert (tmp_path / "ballast").stat().st_blocks > 1000
    with pytest.raises(StorageError, match="no space left"):
        store.add(GRID, build_points(5000), [])
    assert not (tmp_path / "ballast").exists(), "its room is for changes of state"
    assert store.has_room()
    assert (tmp_path / "ballast").exists(), "taken again as soon as there is room"
    assert len(store.read_experiments()) == 2


def test_the_migrations_lead_to_the_tables_and_indices_of_the_code(store):
    with store._engine.connect() as connection, sa.create_engine("sqlite://").begin() as other:
        assert compare_metadata(MigrationContext.configure(connection, opts=OPTIONS), TABLES) == []
        TABLES.create_all(other)
        found, wanted = (
            set(each.exec_driver_sql("SELECT sql FROM sqlite_master WHERE type = 'index' AND sql != ''"))
            for each in (connection, other)
        )
    assert found == wanted


def test_what_a_page_reads_takes_hardly_longer_in_a_long_queue(store):
    """Counted in steps of the database: an entry of an index takes five, a row that is read several times as many."""
    steps = []

    def watch(connection, *_) -> None:
        connection.connection.driver_connection.set_progress_handler(lambda: steps.append(1), 1)

    reads = {
        "state": lambda: store.read_experiments(states=("succeeded",), limit=10),
        "owner": lambda: store.read_experiments(states=("queued",), owner="kim", limit=10),
        "sweep": lambda: store.read_experiments(sweep="grid", limit=10),
        "sweep and state": lambda: store.read_experiments(sweep="grid", states=("succeeded",), limit=10),
        "newest": lambda: store.read_newest(("succeeded",), 10),
        "newest of none": lambda: store.read_newest(("failed", "held"), 10),
    }
    taken = {name: [] for name in reads}
    for n in (40, 240):
        store.add(GRID, build_points(n), [], owner="kim")
        rows = store.read_experiments(states=("queued",))[n // 2 :]
        for attempt, _ in store.lease_all([(row, ON_A_SLOT) for row in rows]):
            store.advance("finish", attempt, then="commit")
        event.listen(store._engine, "before_cursor_execute", watch)
        for name, read in reads.items():
            steps.clear()
            read()
            taken[name].append(len(steps))
        event.remove(store._engine, "before_cursor_execute", watch)
    growth = {name: (many - few) / 240 for name, (few, many) in taken.items()}  # of each experiment more
    assert {name for name, n in growth.items() if n > 0.1} == {"state", "sweep"}
    assert max(growth.values()) < 6.5, "an entry of an index, and not a row"


def test_a_lab_of_one_machine_is_brought_up_to_date_and_its_file_is_kept(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "lab.db")) as database:
        database.executescript(OF_BEFORE.read_text())
    with contextlib.closing(open_store(tmp_path)) as store:
        rows = store.read_experiments()
        assert [(row.id, row.state, row.attempt) for row in rows] == [("e1", "succeeded", 1), ("e2", "queued", 1)]
        assert (rows[0].metrics["accuracy"], rows[0].n_devices, rows[0].owner) == (0.75, 1, "")
        attempt, _ = lease(store, rows[1])
        assert attempt.number == 2
    with contextlib.closing(sqlite3.connect(tmp_path / "lab.db.before-0003")) as database:
        assert database.execute("SELECT count(*) FROM experiment").fetchone() == (2,)
        assert not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'node'").fetchone()


KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import Engine, event
from fulltilt.lab.store import open_store

n_left = int(sys.argv[2])

@event.listens_for(Engine, "before_cursor_execute")
def count(connection, cursor, statement, *rest):
    global n_left
    n_left -= statement.lstrip().split()[0] in ("CREATE", "ALTER", "DROP", "INSERT", "UPDATE")
    if n_left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

open_store(Path(sys.argv[1])).close()
print(n_left)
"""


@pytest.mark.slow
def test_after_a_kill_between_two_steps_of_a_migration_the_next_start_makes_them_all(tmp_path):
    def start(folder: Path, n: int) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        if not (folder / "lab.db").exists():
            with contextlib.closing(sqlite3.connect(folder / "lab.db")) as database:
                database.executescript(OF_BEFORE.read_text())
        return subprocess.run([sys.executable, "-c", KILLED, folder, str(n)], capture_output=True, text=True)

    n_steps = 99 - int(start(tmp_path / "whole", 99).stdout)
    assert n_steps > 5
    folder = tmp_path / "lab"
    for n in (1, n_steps // 2, n_steps - 1):
        assert start(folder, n).returncode == -signal.SIGKILL
        with contextlib.closing(sqlite3.connect(folder / "lab.db")) as database:
            assert not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'node'").fetchone()
            assert database.execute("SELECT count(*) FROM experiment").fetchone() == (2,)
    with contextlib.closing(open_store(folder)) as store:
        assert [(row.id, row.state) for row in store.read_experiments()] == [("e1", "succeeded"), ("e2", "queued")]
        lease(store, store.read_experiments()[1])
        with store._engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection, opts=OPTIONS), TABLES) == []


def test_a_lab_of_a_newer_fulltilt_is_left_alone(store, tmp_path):
    with store._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store.close()
    with pytest.raises(StorageError, match="has version 9999, and this fulltilt knows 0003"):
        open_store(tmp_path)


def test_what_is_over_can_be_removed_and_what_runs_cannot(store: Store):
    store.add(GRID, build_points(2), [])
    first, second = store.read_experiments()
    store.advance("drop", first.newest)
    with pytest.raises(StaleAttemptError):
        store.remove(first)  # as it was when it was read
    (first,) = store.read_experiments(id="e1")
    store.remove(first)
    assert [row.id for row in store.read_experiments()] == ["e2"]
    assert {event.experiment for event in store.read_events()} == {second.id}
