"""What a lab's records promise, held by SQLite, PostgreSQL, and the dictionaries that tests use in their place."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab_cases import ON_A_SLOT, lease
from tests.memory_store import MemoryStore

from fulltilt.errors import RunFolderError
from fulltilt.lab.records import Artefact, Attempt, Code, Node, Point
from fulltilt.lab.states import ARROWS, OVER, STATES
from fulltilt.lab.store import StaleAttemptError, open_store

GRID = Path("/somewhere/grid.yaml")
UNTOLD = {"started_s": None, "ended_s": None, "fence": None}
WAYS = {"queued": [], "leased": ["lease"], "running": ["lease", "start"], "cancelled": ["drop"], "held": ["hold"]}
WAYS |= {"finalizing": [*WAYS["running"], "finish"], "cancelling": [*WAYS["running"], "cancel"]}
WAYS |= {"succeeded": [*WAYS["finalizing"], "commit"], "failed": [*WAYS["running"], "fail"]}
WAYS |= {"backoff": [*WAYS["running"], "back_off"]}


def find_postgresql() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@pytest.fixture(scope="module")
def postgresql():
    """A PostgreSQL of our own, reached through a socket in its folder only.

    The folder is none of pytest's: another session of pytest that begins takes others' rights on these away.
    """
    programs = find_postgresql()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    as_user = {}
    with tempfile.TemporaryDirectory(prefix="fulltilt-pg-") as folder:
        if os.geteuid() == 0:  # it refuses to run as root
            user = pwd.getpwnam("postgres")
            as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            shutil.chown(folder, user.pw_uid, user.pw_gid)
        data, log = Path(folder, "data"), Path(folder, "log")
        run = {"check": True, "capture_output": True, "cwd": folder, **as_user}
        subprocess.run([programs / "initdb", "-D", data, "-A", "trust", "-U", "lab", "--no-sync"], **run)
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        subprocess.run([programs / "pg_ctl", "-D", data, "-w", "-l", log, "-o", options, "start"], **run)
        yield f"postgresql://lab@/postgres?host={folder}"
        subprocess.run([programs / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **run)


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "memory"])
def store(request, tmp_path_factory):
    if request.param == "memory":
        yield MemoryStore()
        return
    url = request.getfixturevalue("postgresql") if request.param == "postgresql" else None
    with contextlib.closing(open_store(tmp_path_factory.mktemp("lab"), url=url, create=True)) as store:
        yield store


def build_points(n: int, name: str) -> list[Point]:
    return [Point(values={"optim.lr": i}, config={"optim": {"lr": i}}, digest=f"{name} {i}") for i in range(n)]


def add(store, n: int = 1, **given) -> list[str]:
    """New experiments, of a file that nothing else is of."""
    before = {found.id for found in store.read_experiments()}
    store.add(Path(f"/somewhere/{len(before)}.yaml"), build_points(n, "d"), [], **given)
    return [found.id for found in store.read_experiments() if found.id not in before]


def read(store, id: str):
    (found,) = store.read_experiments(id=id)
    return found


def take(store, arrow: str, attempt: Attempt) -> None:
    if arrow == "lease":
        found = read(store, attempt.experiment)
        if found.attempt != attempt.number:
            raise StaleAttemptError
        lease(store, found)
    else:
        store.advance(arrow, attempt)


def bring(store, id: str, state: str) -> None:
    for arrow in WAYS[state]:
        take(store, arrow, read(store, id).newest)


def test_of_two_servers_on_one_postgresql_the_second_is_refused_and_may_follow_the_first(postgresql, tmp_path):
    url = postgresql.replace("/postgres?", "/template1?")  # another database than the other tests', and another lock
    with contextlib.closing(open_store(tmp_path, url=url)) as store:
        with pytest.raises(RunFolderError, match="another server of a lab writes to postgresql://"):
            open_store(tmp_path, url=url)
        (id,) = add(store)
    with contextlib.closing(open_store(tmp_path, url=url)) as store:
        assert read(store, id).state == "queued"


def test_points_become_rows_once(store):
    n_before = len(store.read_events())
    assert store.add(GRID, build_points(4, "d"), ["epochs=1"], owner="kim", n_devices=2) == 4
    assert store.add(GRID, build_points(6, "d"), []) == 2
    assert store.add(GRID, build_points(6, "d"), []) == 0
    rows = store.read_experiments(sweep="grid")
    assert [(row.state, row.attempt, row.owner) for row in rows] == [("queued", 0, "kim")] * 4 + [("queued", 0, "")] * 2
    assert (rows[0].overrides, rows[0].n_devices, rows[3].point) == (["epochs=1"], 2, {"optim.lr": 3})
    assert [event.arrow for event in store.read_events()[n_before:]] == ["submit"] * 6
    assert store.add(Path("/elsewhere/grid.yaml"), build_points(1, "d"), []) == 1
    assert len(store.read_experiments(sweep="grid-2")) == 1, "each file has its own"


@pytest.mark.parametrize("state", STATES)
def test_every_arrow_starts_where_the_table_says_and_nowhere_else(store, state):
    for name, arrow in ARROWS.items():
        (id,) = add(store)
        bring(store, id, state)
        before = read(store, id)
        assert before.state == state
        if state in arrow.sources:
            take(store, name, before.newest)
            assert (read(store, id).state, read(store, id).wish) == (arrow.target, arrow.wish)
        else:
            with pytest.raises(StaleAttemptError):
                take(store, name, before.newest)
            assert read(store, id) == before


@settings(max_examples=12)
@given(tries=st.lists(st.tuples(st.sampled_from(sorted(ARROWS)), st.integers(0, 3)), max_size=25))
def test_whatever_is_tried_the_twin_says_the_same_and_one_result_is_accepted_at_most(store, tries):
    (id,), twin = add(store), MemoryStore()
    (twin_id,) = add(twin)
    first, n_accepted = store.read_events()[-1].seq, 0
    for name, number in tries:
        said = []
        for each, own in ((store, id), (twin, twin_id)):
            try:
                take(each, name, Attempt(experiment=own, number=number))
                said.append("done")
            except StaleAttemptError:
                said.append("refused")
        assert said[0] == said[1]
        n_accepted += name == "commit" and said[0] == "done"
        mine, its = (dataclasses.replace(read(each, own), **UNTOLD) for each, own in ((store, id), (twin, twin_id)))
        assert dataclasses.replace(mine, id=its.id, sweep=its.sweep) == its
        assert n_accepted == (mine.state == "succeeded")
    events = store.read_events(after=first, experiment=id)
    for before, event in zip(["queued", *(event.state for event in events)], events, strict=False):
        assert before in ARROWS[event.arrow].sources
    assert sum(event.state in OVER for event in events) >= (read(store, id).state in OVER)


def test_a_stale_attempt_changes_nothing_and_the_newest_is_found_by_its_token(store):
    (id,) = add(store)
    first, old = lease(store, read(store, id), node="a")
    store.advance("back_off", first, delay_s=3.0, n_lost=1, outcome="lost")
    assert (read(store, id).delay_s, read(store, id).n_lost, read(store, id).node) == (3.0, 1, "a")
    store.advance("wake", first)
    assert (read(store, id).delay_s, read(store, id).node, read(store, id).last_node) == (None, None, "a")
    second, token = lease(store, read(store, id), node="b")
    store.note(second, ref="job 7")
    n_events = len(store.read_events())
    for arrow in ("finish", "fail", "back_off", "cancel"):
        with pytest.raises(StaleAttemptError):
            store.advance(arrow, first, metrics={"loss": 0.0})
    assert len(store.read_events()) == n_events
    assert (store.find_attempt(old), store.find_attempt(token), store.find_attempt("x")) == (first, second, None)
    store.advance("finish", second, metrics={"loss": 1.0}, outcome="succeeded")
    store.advance("commit", second)
    row = read(store, id)
    assert (row.state, row.attempt, row.outcome, row.ref, row.metrics) == (
        "succeeded", 2, "succeeded", "job 7", {"loss": 1.0},
    )  # fmt: skip


def test_of_several_that_are_leased_together_those_that_changed_are_left_out(store):
    ids = add(store, 3)
    rows = [read(store, id) for id in ids]
    bring(store, ids[1], "cancelled")
    first, none, third = store.lease_all([(row, ON_A_SLOT) for row in rows])
    assert none is None
    assert [read(store, id).state for id in ids] == ["leased", "cancelled", "leased"]
    for id, (attempt, token) in ((ids[0], first), (ids[2], third)):
        assert (store.find_attempt(token), attempt) == (read(store, id).newest, read(store, id).newest)


def test_two_arrows_at_once_are_both_taken_or_none(store):
    (id,) = add(store)
    bring(store, id, "leased")
    attempt, n_events = read(store, id).newest, len(store.read_events())
    with pytest.raises(StaleAttemptError):
        store.advance("start", attempt, then="commit", pid=7)
    assert (read(store, id).state, read(store, id).pid, len(store.read_events())) == ("leased", None, n_events)
    store.advance("finish", attempt, then="commit", outcome="succeeded", metrics={"loss": 1.0})
    assert (read(store, id).state, read(store, id).metrics) == ("succeeded", {"loss": 1.0})
    assert [event.arrow for event in store.read_events()[n_events:]] == ["finish", "commit"]


def test_the_most_urgent_and_oldest_of_each_owner_come_first(store):
    mine, theirs = add(store, 5, owner="mine", priority=1), add(store, 3, owner="theirs", priority=1)
    store.set_priority(mine[3], 7)
    heads = [found.id for found in store.read_heads(2) if found.owner in ("mine", "theirs")]
    assert sorted(heads) == sorted([mine[3], mine[0], theirs[0], theirs[1]])
    found = store.read_experiments(states=("queued",), owner="mine", limit=2, offset=1)
    assert [each.id for each in found] == mine[:2]
    sweep = read(store, mine[0]).sweep
    bring(store, mine[0], "failed")
    assert store.count_states(sweep=sweep) == {"queued": 4, "failed": 1}


def test_what_changed_last_comes_first_and_once_whatever_it_was_before(store):
    first, second, third, fourth = add(store, 4)
    for id in (first, second, third):
        bring(store, id, "failed")
    for arrow in ("retry", "lease", "start", "fail"):
        take(store, arrow, read(store, first).newest)
    store.advance("retry", read(store, third).newest)
    store.advance("hold", read(store, fourth).newest)
    assert [each.id for each in store.read_newest(("failed", "held"), 3)] == [fourth, first, second]
    assert [each.attempt for each in store.read_newest(("failed",), 1)] == [2]


def test_files_of_attempts_are_kept_by_name_the_newest_first(store):
    (id,), (other,) = add(store), add(store)

    def keep(number: int, digest: str, *, of: str = id) -> str:
        artefact = Artefact(name="checkpoint.pt", digest=digest * 64, n_bytes=3 << 30)
        gone = store.add_artefacts(Attempt(experiment=of, number=number), [artefact])
        return "".join(sorted(digest[0] for digest in gone))

    assert [keep(1, "0"), keep(1, "1"), keep(1, "1")] == ["", "0", ""], "the newest of an attempt"
    assert [keep(1, "2", of=other), keep(2, "2"), keep(2, "3")] == ["", "", ""], "another one has the same file"
    assert all(each.time_s for each in store.read_artefacts(id)), "since when it is there"
    found = [(each.attempt, each.digest[0], each.n_bytes) for each in store.read_artefacts(id)]
    assert found == [(2, "3", 3 << 30), (1, "1", 3 << 30)]
    assert keep(3, "4") == "1", "of earlier attempts the last one's"


def test_a_node_that_started_again_is_told_from_one_that_is_heard_again(store):
    node = Node(name="n1", boot="first", versions={"torch": "2"}, devices=["cuda:0"])
    assert [store.meet_node(node), store.meet_node(node)] == [False, False]
    store.mark_node("n1", n_bad=2, last_bad="e7")
    assert store.meet_node(dataclasses.replace(node, boot="second"))
    assert store.read_nodes("n2") == []
    (found,) = store.read_nodes("n1")
    assert (found.boot, found.n_bad, found.last_bad, found.devices) == ("second", 2, "e7", ["cuda:0"])


def test_a_token_for_one_use_is_used_up_once_and_an_old_one_is_not_known(store):
    store.add_token("join me", role="join", label="n1", lasts_s=60, is_single_use=True)
    store.add_token("read", role="read", label="kim", lasts_s=None, is_single_use=False)
    store.add_token("gone", role="read", label="kim", lasts_s=-1, is_single_use=False)
    assert [found and found.role for found in map(store.find_token, ("join me", "join me"))] == ["join", "join"]
    assert [store.use_up(token) for token in ("join me", "join me", "read", "?")] == [True, False, False, False]
    assert store.find_token("join me") is None
    assert [found and found.label for found in map(store.find_token, ("read", "read", "gone", "?"))] == [
        "kim", "kim", None, None,
    ]  # fmt: skip
    found = [(each["label"], each["role"], each["expires_s"] is None) for each in store.read_tokens()]
    assert found == [("kim", "read", True)], "neither the used one nor the old one, and no token"
    assert store.remove_tokens("kim") == 2
    assert store.find_token("read") is None


def test_who_waits_what_did_not_change_since_and_which_files_count_is_known(store, monkeypatch):
    code = Code(digest="c" * 64, root="/somewhere", entry="grid.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1000.0)
        old, touched, gone = add(store, 3, owner="ann", code=code)
        store.advance("drop", read(store, gone).newest)
    store.advance("hold", read(store, touched).newest)
    assert store.count_queued()["ann"] == 1
    assert [each.id for each in store.read_experiments(owner="ann", unchanged_since_s=1001.0)] == [old, gone]
    assert [each.id for each in store.read_experiments(states=OVER, unchanged_since_s=1001.0)] == [gone]
    assert not store.read_experiments(unchanged_since_s=1000.0)
    store.add_artefacts(Attempt(experiment=old, number=1), [Artefact(name="a", digest="a" * 64, n_bytes=1)])
    found = store.read_digests()
    assert {"a" * 64, "c" * 64} <= found
    assert None not in found, "what was submitted without code"


def test_code_and_configuration_of_an_experiment_are_those_it_was_submitted_with(store):
    code = Code(digest="d" * 64, root="/somewhere", entry="grid.yaml")
    (id,) = add(store, code=code)
    work = store.read_work(id)
    assert (work.code, work.config, work.source.suffix) == (code, {"optim": {"lr": 0}}, ".yaml")
    (other,) = add(store)
    assert store.read_work(other).code is None


def test_what_failed_or_was_cancelled_runs_again_with_what_is_sent_then_and_nothing_else_does(store):
    old, new = (Code(digest=digit * 64, root="/somewhere", entry="grid.yaml") for digit in "ab")
    ids = add(store, 4, code=old)
    source = str(store.read_work(ids[0]).source)
    for id, state in zip(ids, ("failed", "cancelled", "held", "failed"), strict=True):
        bring(store, id, state)
    n_events, points = len(store.read_events()), build_points(3, "d")
    points[0] = dataclasses.replace(points[0], config={"sent": "now"})
    assert store.retry(source, points, ["lr=1"], n_devices=2, code=new) == 2
    rows = [read(store, id) for id in ids]
    assert [row.state for row in rows] == ["queued", "queued", "held", "failed"]
    assert [(row.overrides, row.n_devices) for row in rows] == [(["lr=1"], 2)] * 2 + [([], 1)] * 2
    assert [store.read_work(id).code for id in ids] == [new, new, old, old]
    assert store.read_work(ids[0]).config == {"sent": "now"}
    assert [event.arrow for event in store.read_events()[n_events:]] == ["retry", "retry"]
    for where in (source, "/nowhere.yaml"):
        assert store.retry(where, points, [], n_devices=1, code=None) == 0
