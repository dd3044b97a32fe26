"""The durable queue: rows once, changes guarded by state and attempt, refusals that name a remedy."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from fulltilt.errors import StorageError, UsageError
from fulltilt.lab.records import Attempt, Experiment, Point
from fulltilt.lab.scheduler import plan_starts
from fulltilt.lab.store import StaleAttemptError, Store, open_store

GRID = Path("/somewhere/grid.yaml")


def build_points(n: int) -> list[Point]:
    return [Point(values={"optim.lr": i}, config={"optim": {"lr": i}}, digest=f"d{i}") for i in range(n)]


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(tmp_path, create=True)


def lease(store: Store, id: str) -> Attempt:
    return store.lease(store.read_experiments(id=id)[0], node="here", devices=["cpu:0"], n_threads=1)


def test_points_become_rows_once(store):
    assert store.add(GRID, build_points(4), ["epochs=1"]) == 4
    assert store.add(GRID, build_points(6), []) == 2
    assert store.add(GRID, build_points(6), []) == 0
    rows = store.read_experiments()
    assert [(row.id, row.state, row.attempt) for row in rows] == [(f"e{i}", "queued", 0) for i in range(1, 7)]
    assert rows[0].overrides == ["epochs=1"]
    assert [event.arrow for event in store.read_events()] == ["submit"] * 6
    assert store.read_work("e3") == (GRID, {"optim": {"lr": 2}})
    assert store.read_ids(GRID, {"d1", "d9"}) == {"d1": "e2"}
    for folder in ("a", "b"):
        assert store.add(Path(f"/{folder}/grid.yaml"), build_points(1), []) == 1
    assert [row.sweep for row in store.read_experiments()][5:] == ["grid", "grid-2", "grid-3"], "each file has its own"


def test_a_stale_attempt_changes_nothing(store):
    store.add(GRID, build_points(1), [])
    first = lease(store, "e1")
    store.advance("start", first, pid=7)
    store.advance("requeue", first, outcome="lost")
    second = lease(store, "e1")
    store.advance("start", second, pid=8)
    n_events = len(store.read_events())
    for arrow in ("finish", "fail", "requeue", "cancel"):
        with pytest.raises(StaleAttemptError, match="attempt 1"):
            store.advance(arrow, first, metrics={"loss": 0.0})
    assert len(store.read_events()) == n_events
    store.advance("finish", second, metrics={"loss": 1.0}, outcome="succeeded")
    store.advance("commit", second)
    (row,) = store.read_experiments()
    assert (row.state, row.attempt, row.pid, row.outcome) == ("succeeded", 2, 8, "succeeded")
    assert row.metrics == {"loss": 1.0}


def test_of_many_that_want_one_experiment_one_gets_it(store, tmp_path):
    store.add(GRID, build_points(1), [])
    (row,) = store.read_experiments()
    got, refused = [], []

    def claim() -> None:
        mine = open_store(tmp_path)
        try:
            got.append(mine.lease(row, node="here", devices=[], n_threads=None))
        except StaleAttemptError:
            refused.append(1)
        mine.close()

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)


def test_a_folder_without_a_lab_and_a_file_that_is_none(tmp_path):
    with pytest.raises(UsageError, match="submit --local CONFIG makes one"):
        open_store(tmp_path)
    (tmp_path / "lab.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="is no lab of fulltilt"):
        open_store(tmp_path)


def test_what_is_committed_is_synced_and_a_full_disk_is_told_and_the_rows_stay(store, tmp_path):
    store.add(GRID, build_points(2), [])
    with store._engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        assert pragmas == ["wal", 2], "what is committed is synced"
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="no space left"):
        store.add(GRID, build_points(5000), [])
    assert len(open_store(tmp_path).read_experiments()) == 2
    assert sqlite3.connect(tmp_path / "lab.db").execute("PRAGMA integrity_check").fetchone() == ("ok",)


def build_row(id: str, priority: int = 0) -> Experiment:
    return Experiment(id=id, sweep="s", state="queued", attempt=0, priority=priority, point={}, overrides=())


def test_the_oldest_of_the_most_urgent_start_and_the_others_wait():
    rows = [build_row("e1"), build_row("e2", 5), build_row("e3"), build_row("e4", 5)]
    assert [(row.id, slot) for row, slot in plan_starts(rows, "abc")] == [("e2", "a"), ("e4", "b"), ("e1", "c")]
    assert plan_starts(rows, []) == []
    assert plan_starts([], ["a"]) == []
