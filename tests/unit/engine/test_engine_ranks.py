"""Several processes started, watched and ended: results, events, signals, and every way in which one can go wrong."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import rank_bodies

from fulltilt.engine.announce import Announcer
from fulltilt.engine.ranks.group import run_ranks
from fulltilt.engine.ranks.process import IS_ALONE, N_CELLS, Link, Marks
from fulltilt.errors import ConfigError, DeviceMemoryError, RankFailedError, RankHungError, UsageError
from fulltilt.records import CheckpointStarted, Noted, RunEnded, StepsDone

OPTIONS = (
    "max_restarts",
    "restarted_with",
    "hang_limit_s",
    "start_limit_s",
    "raised_by",
    "plan_again",
    "on_start",
    "environment",
)


def run(function, listeners=(), **given):
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    return run_ranks(function, given, devices=("cpu", "cpu"), announcer=Announcer(listeners), **options)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def notes(tmp_path):
    """Where ranks note their processes; none of them is left after the test."""
    yield str(tmp_path / "pids")
    pids = (tmp_path / "pids").read_text().split()
    assert pids
    assert not [pid for pid in pids if is_alive(pid)]


def test_ranks_know_their_place_and_the_first_one_returns(capfd):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert run(rank_bodies.read_environment, names=names) == (dict(zip(names, "0202", strict=True)), 0)
    assert capfd.readouterr().out == "printed by a rank\n"  # once


def test_ranks_have_the_variables_that_their_plan_wants(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    wanted = {"OMP_WAIT_POLICY": "passive"}
    assert run(rank_bodies.read_environment, names=[*wanted], environment=wanted) == (wanted, 0)


def test_listeners_stay_in_the_parent_and_have_stored_what_a_checkpoint_counts_on(tmp_path):
    stored = tmp_path / "stored"
    held = []

    def store(event):
        assert os.getpid() == here
        if isinstance(event, StepsDone):
            held.append(str(event.step))
        elif isinstance(event, CheckpointStarted):
            time.sleep(0.2)
            stored.write_text(" ".join(held))

    here = os.getpid()
    assert run(rank_bodies.send_events, [store], n_steps=50, stored=str(stored)) == [str(n) for n in range(1, 51)]


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("kill_self", RankFailedError, ["rank 1 (cpu, process ", "was killed by SIGKILL", "no memory left"]),
        ("exit_early", RankFailedError, ["exit code 7 before its work was done", "last words: about to leave"]),
        ("raise_any", RankFailedError, ["rank 1 (", "ValueError: a shape does not fit", "rank_bodies.py:"]),
        ("raise_evaluating", RankFailedError, ["rank 1 (", "(in the evaluation, ", "rank_bodies.py:"]),
        ("raise_memory", DeviceMemoryError, ["rank 1 (", "Tried to allocate 2.00 GiB"]),
        ("raise_own", ConfigError, ["optim.lr: lr is -1; give a positive one"]),
    ],
)
def test_one_that_fails_ends_all_and_is_named(notes, how, kind, words):
    events, given = [], {"max_restarts": 3 if kind is ConfigError else 0}
    with pytest.raises(kind) as caught:
        run(rank_bodies.fail, [events.append], who=1, how=how, notes=notes, **given)
    assert len(Path(notes).read_text().split()) == 2, "a mistake of the user is not tried again"
    assert all(word in str(caught.value) for word in words), str(caught.value)
    # Rank 0 could not say that the run had ended; its files are closed all the same.
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert ended.step == 12
    assert ended.reason == f"failed: {caught.value}" or kind is ConfigError


MORE = "run.hang_timeout_s allows more"
HANGS_AT_START = {"hang_limit_s": 0.5, "start_limit_s": 2.0, "raised_by": ("--deadline", "run.hang_timeout_s")}


@pytest.mark.parametrize(
    ("body", "given", "who", "where", "remedy"),
    [
        ("fail", {"who": 0, "how": "hang", "hang_limit_s": 2.0}, 0, "data_wait, after step 13", MORE),
        # Both were through the same step, so neither was ahead: a rank stopped there held the run for good.
        ("stop_as_it_waits", {"hang_limit_s": 1.5}, 1, "optimizer", MORE + ": it is stopped by a signal"),
        ("hang_at_start", HANGS_AT_START, 1, "data_wait, after step 0", "--deadline allows more"),
    ],
)
def test_one_that_hangs_ends_all_and_is_named_with_where_it_was(notes, body, given, who, where, remedy):
    said = (
        rf"^rank {who} \(cpu, process \d+\) hangs: .* further than {where}.*, while another rank waits for it; {remedy}"
    )
    with pytest.raises(RankHungError, match=said):
        run(getattr(rank_bodies, body), notes=notes, **given)


@pytest.mark.parametrize("later_s", [0.0, 0.4])
def test_the_cause_is_told_and_not_what_followed_from_it(notes, later_s):
    """a broken connection to a rank that died may be heard of before the death itself"""
    with pytest.raises(RankFailedError, match=r"^rank 1 .* was killed by SIGKILL"):
        run(rank_bodies.break_off, cause_first_s=later_s, notes=notes)


def test_what_followed_from_a_failure_ends_no_run_that_goes_on(tmp_path):
    """rank 0 told the listeners that the run had failed when its connection to the one that ran out had broken"""
    events, causes = [], []

    def plan_again(cause):
        causes.append(cause)
        return {"has_room": True} if len(causes) == 1 else None

    given = {"has_room": False, "notes": str(tmp_path / "pids"), "plan_again": plan_again}
    assert run(rank_bodies.run_out, [events.append], **given) == "done"
    assert [cause.rank for cause in causes] == [1]
    assert [event.reason for event in events if isinstance(event, RunEnded)] == ["finished"]


def test_a_death_restarts_all_so_often_as_allowed(tmp_path):
    events = []
    given = {"folder": str(tmp_path), "max_restarts": 2, "restarted_with": {"resume": True}}
    assert run(rank_bodies.count_attempts, [events.append], **given) == {"attempts": 3, "resume": True}
    notes = [event.message.rpartition("; ")[2] for event in events if isinstance(event, Noted)]
    assert notes.count("at the start") == 1, "once a run, however often it starts"
    assert [note for note in notes if note != "at the start"] == [
        f"all ranks start again from the newest checkpoint ({n} of 2 restarts)" for n in (1, 2)
    ]


def test_what_cannot_travel_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="cannot be sent to other processes"):
        run(rank_bodies.read_environment, names=threading.Lock())


PARENT = """
import sys
sys.path.insert(0, sys.argv[2])
import rank_bodies
from fulltilt.engine.announce import Announcer
from fulltilt.engine.ranks.group import run_ranks
print(run_ranks(rank_bodies.wait_for_stop, {"pids": sys.argv[1]}, devices=("cpu", "cpu"), announcer=Announcer(())))
"""


def start_parent(pids):
    folder = str(Path(rank_bodies.__file__).parent)
    command = [sys.executable, "-c", PARENT, str(pids), folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 300
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < until_s
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_parent_to_which_a_signal_is_a_wish_first(tmp_path, number):
    process = start_parent(tmp_path / "pids")
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == -number
    until_s = time.monotonic() + (300 if number == signal.SIGKILL else 0)  # of SIGTERM not before all had ended well
    while any(is_alive(pid) for pid in (tmp_path / "pids").read_text().split()):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_ranks_are_started_and_watched_although_none_reads_its_request(monkeypatch):
    """A large request was sent through a pipe, and sending it waited for ever."""
    monkeypatch.setattr("fulltilt.engine.ranks.group.COMMAND", "import time; time.sleep(600)")
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run(rank_bodies.read_environment, names=("x" * 4_000_000,), on_start=kill_all)


def kill_all(pids):
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_large_request_reaches_every_rank():
    names = ("RANK", *("x" * 1_000_000 + str(n) for n in range(3)))
    with pytest.raises(RankFailedError, match="KeyError"):
        run(rank_bodies.read_environment, names=names)


def test_waiting_inside_waiting_goes_on_until_the_outer_one_ends(tmp_path):
    with (tmp_path / "marks").open("w+b") as file:
        file.truncate(N_CELLS * 8)
        marks = Marks(file.fileno(), 1)
        mine, theirs = Pipe()
        with mine, theirs:
            link, seen = Link(mine, marks, 0), []
            with link.mark(IS_ALONE):
                with link.mark(IS_ALONE):
                    seen.append(marks.read(0).is_alone)
                seen.append(marks.read(0).is_alone)
            assert [*seen, marks.read(0).is_alone] == [1, 1, 0]
