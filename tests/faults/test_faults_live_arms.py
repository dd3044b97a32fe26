"""Processes of several plans that take turns: who waits stands still, and no end of one leaves anything of another."""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.faults.leftovers import watch_zygote

from fulltilt.errors import find_remedy
from fulltilt.levers import default_plan
from fulltilt.records import TrialRequest, WorkloadSource
from fulltilt.stats import Turns
from fulltilt.tuner.trials import client, live
from fulltilt.tuner.trials.live import ArmFailedError, GroupRunner, LiveArm, open_arms
from fulltilt.tuner.trials.rows import build_turns_row
from fulltilt.tuner.trials.target import ProcessTarget

HERE = Path(__file__).parent
ASKED = {"id": "", "why": "", "seconds": 1.0}
BODIES = (str(HERE), str(HERE.parent / "chaos"))


class Family:
    """Arms whose bodies note what they start; ``find_leftovers`` lists what is left of all."""

    def __init__(self, zygote, find_leftovers, folder: Path):
        self.zygote, self.find_leftovers, self.folder = zygote, find_leftovers, folder

    def build(self, name, *, deadline_s=300.0, rank_devices=(), **config) -> TrialRequest:
        details = {"act": "take_turns", "note": str(self.folder / f"note-{name}"), "has_company": True} | config
        return TrialRequest(
            id=name, source=WorkloadSource(config=details, base_dir=".", import_paths=BODIES), device="cpu",
            plan=default_plan({"batch_size": 8}), deadline_s=deadline_s, rank_devices=rank_devices,
        )  # fmt: skip

    def build_turns(self, name, **config) -> TrialRequest:
        return dataclasses.replace(self.build(name, **config), kind="turns")

    def read_notes(self, name) -> list[list[str]]:
        """For each process of an arm: its kind, its id, and then its child's, its loner's and its file."""
        note = self.folder / f"note-{name}"
        return [line.split() for line in note.read_text().splitlines()] if note.exists() else []

    def list_kinds(self, name) -> list[str]:
        return [words[0] for words in self.read_notes(name)]

    def read_states(self, name) -> list[str]:
        """States of the arm's newest process and of its child, as ps says them."""
        return [read_state(pid) for pid in self.read_notes(name)[-1][1:3]]

    def open(self, **configs):
        return open_arms(
            lambda request: self.zygote, {name: self.build(name, **own) for name, own in configs.items()}, self.folder
        )


def read_state(pid) -> str:
    """Read the state as ps says it; "gone" also where init has yet to reap what ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return "gone" if state == "Z" else state


def wait_until(condition, limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with watch_zygote(tmp_path_factory.mktemp("arms"), body="trial_bodies:do", preload=("json",)) as watched:
        yield watched


@pytest.fixture
def family(watched, tmp_path):
    zygote, find_leftovers = watched
    yield Family(zygote, find_leftovers, tmp_path)
    assert find_leftovers() == []


@contextlib.contextmanager
def interrupt_when(condition):
    """SIGINT to this process as soon as the condition holds."""

    def interrupt():
        wait_until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt, daemon=True)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    helper.join()


def test_while_one_works_the_other_stands_still_with_all_it_started(family, tmp_path):
    go = tmp_path / "go"
    blocks = []
    with family.open(a={"at": 2, "then": "wait_for", "details": {"path": str(go)}}, b={"rate": 500.0}) as arms:
        wait_until(lambda: family.read_states("a") == family.read_states("b") == ["T", "T"])
        blocks += [arms[name].run_block() for name in "abb"]
        worker = threading.Thread(target=lambda: blocks.append(arms["a"].run_block()))
        worker.start()
        try:
            # A stop takes effect when the process comes to run next, which on a busy machine is later.
            wait_until(lambda: "T" not in family.read_states("a") and family.read_states("b") == ["T", "T"])
            assert "T" not in family.read_states("a")
            assert family.read_states("b") == ["T", "T"]
        finally:
            go.touch()
            worker.join()
        wait_until(lambda: family.read_states("a") == ["T", "T"])
        assert len(family.find_leftovers()) > 4, "it sees what is there"
    assert [block.n_samples / block.seconds for block in blocks] == pytest.approx([1000, 500, 500, 1000])
    assert family.find_leftovers() == []
    assert family.zygote.pid is not None, "it serves the next group"


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("then", "details", "status", "words"),
    [
        ("send", {"number": int(signal.SIGKILL)}, "error", "SIGKILL"),
        ("kill_own_group", {}, "error", "SIGKILL"),
        ("raise_error", {"type": "ValueError", "message": "planted"}, "error", "ValueError: planted"),
        ("raise_error", {"type": "MemoryError", "message": "no room"}, "out_of_memory", "MemoryError: no room"),
        ("call_exit", {"code": 0}, "error", "SystemExit"),
        ("leave_at_once", {"code": 0}, "error", ""),
        ("hang", {}, "timeout", "the deadline is 0.5 s"),
        ("send", {"number": int(signal.SIGSTOP)}, "timeout", "the deadline is 0.5 s"),
    ],
)
def test_an_arm_that_fails_says_how_and_nothing_is_left_of_any(family, at, then, details, status, words):
    failing = {"at": at, "then": then, "details": details, "deadline_s": 0.5 if status == "timeout" else 300.0}
    with pytest.raises(ArmFailedError) as failed, family.open(a={}, b=failing, c={}) as arms:  # noqa: PT012
        for name in "abcba":
            arms[name].run_block()
    assert (failed.value.name, failed.value.status) == ("b", status)
    assert words in failed.value.reason
    assert failed.value.reason.endswith(f"(log: {failed.value.log_path})")
    assert "\n" not in failed.value.reason
    assert family.find_leftovers() == []
    assert not [name for name in os.listdir("/dev/shm") if name.endswith("_12345_0")]
    with family.open(a={}) as arms:
        assert arms["a"].run_block().n_samples == 10


def test_a_deadline_is_of_each_turn_and_does_not_run_while_an_arm_waits(family, tmp_path):
    go = tmp_path / "go"
    with family.open(a={"deadline_s": 1.0}, b={"at": 1, "then": "wait_for", "details": {"path": str(go)}}) as arms:
        threading.Timer(1.5, go.touch).start()
        arms["b"].run_block()
        for _ in range(3):
            assert arms["a"].run_block().n_samples == 10


@pytest.mark.parametrize("n_fit", [math.inf, 1])
def test_a_group_ends_with_the_budget_however_many_plans_it_has(family, tmp_path, n_fit):
    """Each process, and each of its turns, had what was left of the budget when the group began."""
    usual = family.build("", at=0, then="rest", whole="rest", details={"seconds": 1.0})
    target = ProcessTarget(usual, tmp_path, zygote=family.zygote)
    target.runner.n_fit, target.end_s = n_fit, time.monotonic() + 2.5
    (row,) = target.run_group({f"t{n}": usual.plan.replace(batch_size=n) for n in range(1, 7)}, why="")
    assert target.end_s <= time.monotonic() < target.end_s + 1.5
    assert row.status == "timeout"
    assert find_remedy(row.reason) == "give a larger --budget"


def test_a_server_that_does_not_answer_a_missed_deadline_leaves_the_reason_as_it_is(family, monkeypatch):
    for module in (live.Watch.__init__.__globals__, vars(client)):
        monkeypatch.setitem(module, "EXIT_PATIENCE_S", 0.5)
    monkeypatch.setattr(live, "END_PATIENCE_S", 0.5)
    with (
        pytest.raises(ArmFailedError) as failed,
        family.open(a={}, b={"at": 1, "then": "stop_zygote", "deadline_s": 0.5}) as arms,
    ):
        arms["b"].run_block()
    assert failed.value.status == "timeout"
    assert family.find_leftovers() == []


def test_a_server_that_was_killed_costs_a_group_a_new_one_once(family, tmp_path):
    runner = GroupRunner(lambda environment: family.zygote, tmp_path)
    dying = {"at": 2, "then": "kill_zygote", "details": {"marker": str(tmp_path / "marker")}}
    group = runner({"a": family.build("a"), "b": family.build("b", rate=2000.0, **dying)})
    assert group["b"].samples_per_s / group["a"].samples_per_s == pytest.approx(2)
    assert family.list_kinds("a") == family.list_kinds("b") == ["turns", "turns"]
    assert runner.takes_turns
    with pytest.raises(ArmFailedError, match="ended by SIGKILL, twice") as failed:
        runner({"a": family.build("a"), "b": family.build("b", at=2, then="kill_zygote")})
    assert (failed.value.name, failed.value.status) == ("b", "error"), "as of one that does so in a run of its own"
    assert family.zygote.pid is None
    assert family.find_leftovers() == []


def test_as_many_plans_as_cannot_live_together_run_whole_one_after_the_other_from_then_on(family, tmp_path):
    runner = GroupRunner(lambda environment: family.zygote, tmp_path)
    full = {"at": 1, "then": "raise_error", "details": {"type": "MemoryError", "message": "no room for three"}}
    requests = {name: family.build(name) for name in "ac"} | {"b": family.build("b", rate=2000.0, **full)}
    for n in (1, 2):
        group = runner(requests)
        assert {name: turns.samples_per_s for name, turns in group.items()} == {"a": 1000.0, "b": 2000.0, "c": 1000.0}
        assert {turns.way for turns in group.values()} == {"whole"}
        assert family.list_kinds("a") == family.list_kinds("b") == ["turns"] + n * ["trial"]
    group = runner({name: requests[name] for name in "ac"})
    assert (group["a"].way, family.list_kinds("a")[-1]) == ("usual", "turns"), "two have room"
    assert family.find_leftovers() == []


def build_rows(way, n, group, stalled_pct=0.0):
    turns = Turns(samples_per_s=1.0, stalled_pct=stalled_pct, way=way)
    row = build_turns_row(default_plan({"batch_size": 8}), turns, **ASKED)
    return [dataclasses.replace(row, id=f"{group}-{i}", group=group) for i in range(n)]


def test_groups_of_a_search_that_goes_on_are_as_those_before(tmp_path):
    runner = GroupRunner(lambda environment: pytest.fail("no process is needed"), tmp_path)
    runner.recall([])
    assert (runner.stalled_pct, runner.waits_passively, runner.n_fit) == ({}, False, math.inf)
    runner.recall([*build_rows("whole", 4, 1), *build_rows("usual", 3, 2, stalled_pct=3.0)])
    (shares,) = runner.stalled_pct.values()
    assert (shares, runner.waits_passively, runner.n_fit) == ([3.0] * 3, False, 3)
    for way in ("passive", "pinned"):
        runner.recall([*build_rows(way, 2, 1), *build_rows("whole", 5, 2)])
        assert (runner.stalled_pct, runner.waits_passively, runner.n_fit) == ({}, True, 4)


@pytest.mark.slow
def test_threads_sleep_while_they_wait_from_when_each_plan_that_can_tell_has_stalled(family, tmp_path):
    def run(runner, *, stalled_pct, n_threads=2, **n_workers):
        environments = []
        runner.find_zygote = lambda environment: environments.append(environment) or family.zygote
        requests = {name: family.build(name, stalled_pct=0.0 if n else stalled_pct) for name, n in n_workers.items()}
        values = {"batch_size": 8, "threads": n_threads}
        plans = {name: default_plan({**values, "num_workers": n}) for name, n in n_workers.items()}
        group = runner({name: dataclasses.replace(request, plan=plans[name]) for name, request in requests.items()})
        (way,) = {turns.way for turns in group.values()}
        return way, [bool(environment) for environment in environments]

    switched, quiet, blind, mixed = (GroupRunner(lambda environment: family.zygote, tmp_path) for _ in range(4))
    assert run(switched, stalled_pct=50.0, a=0, b=2) == ("pinned", [False] * 2 + [True] * 2), "no row of the first way"
    assert run(switched, stalled_pct=0.0, a=0, b=0) == ("pinned", [True] * 2)
    assert run(quiet, stalled_pct=0.0, a=0) == ("usual", [False])
    assert run(quiet, stalled_pct=8.0, a=0) == ("usual", [False]), "4 % of two groups"
    assert run(quiet, stalled_pct=50.0, a=0) == ("pinned", [False, True]), "the first group happened to be undisturbed"
    assert run(blind, stalled_pct=50.0, a=2, b=2) == ("usual", [False] * 2)
    assert run(mixed, stalled_pct=0.0, n_threads=1, a=0) == ("usual", [False])
    assert run(mixed, stalled_pct=50.0, a=0, b=0) == ("usual", [False] * 2), "a plan that does not stall is known"


def test_threads_are_pinned_where_they_can_be_unless_that_is_what_plans_differ_in(family):
    def find_pinned(*plans, device="cpu"):
        requests = {
            number: dataclasses.replace(family.build("a"), device=device, plan=default_plan({"batch_size": 8, **plan}))
            for number, plan in enumerate(plans)
        }
        pinned = live.pin_threads(requests).values()
        return [(request.plan["thread_affinity"], request.settles) for request in pinned]

    assert find_pinned({}, {"threads": 1}) == [(True, True)] * 2
    assert find_pinned({}, {"thread_affinity": True}) == [(False, False), (True, False)]
    assert find_pinned({}, {}, device="cuda") == [(False, False)] * 2


def test_arms_on_a_cpu_share_what_is_free_and_no_arm_has_more_than_a_whole_run(family, monkeypatch):
    monkeypatch.setattr(live, "read_memory_bytes", lambda: (100, 50))
    monkeypatch.setattr(live, "read_memory_room_bytes", lambda: None)

    def share(*limits, device="cpu"):
        request = dataclasses.replace(family.build("a"), device=device)
        requests = {n: dataclasses.replace(request, memory_limit_bytes=limit) for n, limit in enumerate(limits)}
        return [request.memory_limit_bytes for request in live.share_memory(requests).values()]

    assert share(45, 45, 45) == [15, 15, 15]
    assert share(7, 45, None) == [7, 15, None]
    assert share(45, 45, device="cuda:0") == [45, 45]
    monkeypatch.setattr(live, "read_memory_room_bytes", lambda: 40)
    assert share(45, 45) == [18, 18]


def test_processes_start_in_random_order(family, tmp_path):
    orders = set()
    for n in range(12):
        with family.open(**{f"{n}-{name}": {} for name in "ab"}) as arms:
            pids = [int(family.read_notes(name)[0][1]) for name in arms]
        orders.add(pids[0] < pids[1])
    assert orders == {True, False}, "both, but for once in 2,000 times"


def test_a_plan_that_fails_for_itself_is_not_run_whole_unless_it_was_for_memory(family, tmp_path):
    def measure(**config):
        runner = GroupRunner(lambda environment: family.zygote, tmp_path)
        with pytest.raises(ArmFailedError) as failed:
            runner({"a": family.build("a"), "b": family.build("b", at=1, then="raise_error", **config)})
        assert failed.value.name == "b"
        return failed.value.status, runner.n_fit

    assert measure() == ("error", math.inf)
    assert "trial" not in family.list_kinds("b")
    full = {"type": "MemoryError", "message": "no room, not even alone"}
    assert measure(details=full, whole="raise_error") == ("out_of_memory", math.inf), "the others may fit together"
    assert family.list_kinds("b")[-1] == "trial"


@pytest.mark.parametrize("then", ["hang", "spin"])
def test_an_interrupt_in_a_block_leaves_nothing(family, tmp_path, then):
    begun = tmp_path / "begun"
    hanging = {"at": 2, "then": "note_and", "details": {"path": str(begun), "act": then}}
    with interrupt_when(begun.exists), family.open(a={}, b=hanging) as arms:
        for name in "abba":
            arms[name].run_block()
    assert family.find_leftovers() == []


def test_an_interrupt_between_asking_for_a_process_and_hearing_of_it_leaves_nothing(family, monkeypatch):
    fork = client.Zygote.fork

    def interrupt_second(zygote, scratch, descriptors):
        pid = fork(zygote, scratch, descriptors)
        if family.read_notes("a") or family.read_notes("b"):
            raise KeyboardInterrupt
        return pid

    monkeypatch.setattr(client.Zygote, "fork", interrupt_second)
    with pytest.raises(KeyboardInterrupt), family.open(a={}, b={}):
        pass
    assert family.find_leftovers() == []


def test_a_second_interrupt_while_the_first_ends_all_leaves_nothing(family, tmp_path, monkeypatch):
    monkeypatch.setattr(live.Watch, "kill", lambda watch: os.kill(os.getpid(), signal.SIGINT))
    begun = tmp_path / "begun"
    hanging = {"at": 1, "then": "note_and", "details": {"path": str(begun), "act": "hang"}}
    with interrupt_when(begun.exists), family.open(a={}, b=hanging) as arms:
        arms["b"].run_block()
    assert family.find_leftovers() == []


def test_an_arm_that_does_not_end_when_told_is_ended(family, monkeypatch):
    monkeypatch.setattr(live, "END_PATIENCE_S", 0.3)
    with family.open(a={"linger_s": 600}) as arms:
        arms["a"].run_block()
    assert family.find_leftovers() == []
    assert family.zygote.pid is not None


def test_arms_end_at_the_same_time(family):
    with family.open(**{name: {"linger_s": 1.0} for name in "abcd"}):
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 3.0, "each takes a second to end"


def test_the_end_of_one_trial_is_not_that_of_another_and_an_orphan_of_it_ends_at_last(family, tmp_path):
    family.zygote.start()
    orphan = tmp_path / "orphan"
    leaving = {"at": 1, "then": "leave_orphan", "details": {"note": str(orphan)}}
    with contextlib.ExitStack() as stack:
        arms = {}
        for name, own in (("a", leaving), ("b", {})):
            arm = LiveArm(name, family.build_turns(name, **own), family.zygote, tmp_path / f"{name}.log")
            stack.callback(arm.close)
            arm.start()
            arms[name] = arm
        arms["a"].run_block()
        (_, pid, child, loner, file), (_, *others, _) = family.read_notes("a")[0], family.read_notes("b")[0]
        arms["a"].close()
        assert [read_state(number) for number in (pid, child)] == ["gone", "gone"]
        assert not Path(file).parent.exists()
        assert not Path(f"/dev/shm/torch_{pid}_12345_0").exists()
        assert "gone" not in [read_state(number) for number in others]
        assert arms["b"].run_block().n_samples == 10
        arms["b"].close()
        left = [read_state(number) for number in (loner, orphan.read_text())]
        assert left == ["gone", "gone"], "once no other trial is alive, it is known that nobody needs them"
    assert family.find_leftovers() == []


def test_a_kill_of_the_whole_process_group_while_all_stand_still_leaves_nothing(family, tmp_path):
    """As ``kill -9 %1`` in a shell: none of ours is asked, and a process that is stopped sees no end of its parent."""
    code = f"""
import pathlib, sys, time
sys.path[:0] = {[str(HERE.parents[1]), *BODIES]}
from tests.faults import test_faults_live_arms as t
folder = pathlib.Path({str(tmp_path)!r})
family = t.Family(t.client.Zygote(folder / "command.log", body="trial_bodies:do", preload=("json",)), None, folder)
with family.open(a={{}}, b={{}}):
    print("still", flush=True)
    time.sleep(600)
"""
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    with command:
        assert command.stdout.readline() == b"still\n"
        wait_until(lambda: family.read_states("a") == family.read_states("b") == ["T", "T"])
        assert len(family.find_leftovers()) > 4
        os.killpg(command.pid, signal.SIGKILL)
    wait_until(lambda: family.find_leftovers() == [])
