"""The loop of the server, with an engine and a clock of the test's own: who starts, who is lost, who is told to end."""

from __future__ import annotations

import errno

import pytest
from tests.lab_cases import Clock

from fulltilt.errors import StorageError
from fulltilt.lab import operations
from fulltilt.lab.coordinator import BUSY_S, HAND_IN_TERMS, Coordinator
from fulltilt.lab.executors import AwayError, Place, RefusedError
from fulltilt.lab.lab import Heard
from fulltilt.lab.records import Artefact, Node, Point
from fulltilt.lab.runner.order import Order
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.scheduling.leases import STALE_S, Leases, Term
from fulltilt.lab.scheduling.retries import MOST_LOST
from fulltilt.lab.serving import open_lab
from fulltilt.lab.settling import settle
from fulltilt.lab.states import LIVE

TTL_S, GRACE_S = 100.0, 10.0


class Engine:
    """Takes orders and says of each what the test wants it to say."""

    name, is_lasting = "engine", True

    def __init__(self, **places: int):
        self.places, self.started, self.ended = places, [], []
        self.seen, self.used, self.busy, self.away, self.says_itself = {}, {}, {}, (), False
        self.refuses: type[RefusedError] | None = None

    def read_places(self):
        names = {node: [f"{node}:{k}" for k in range(n)] for node, n in self.places.items()}
        same = {"busy": self.busy, "says_itself": self.says_itself}
        return [
            Place(node=node, devices=devices, n_used=self.used.get(node, 0), is_away=node in self.away, **same)
            for node, devices in names.items()
        ]

    def submit(self, attempt, order, node, devices):
        if self.refuses:
            raise self.refuses("no process can be started")
        self.started.append((attempt.experiment, attempt.number, node))
        return order.mark

    def poll(self, experiments):
        return {each.id: self.seen.get(each.id, "alive") for each in experiments}

    def cancel(self, experiment, *, is_urgent):
        self.ended.append((experiment.id, is_urgent))

    def close(self):
        pass


class Bench:
    def __init__(self, lab, engine: Engine, clock: Clock):
        self.lab, self.engine, self.clock = lab, engine, clock
        self.coordinator = self.build()

    def build(self, *others: Engine) -> Coordinator:
        def write_order(token, mark, node) -> Order:
            return Order(url="", token=token, mark=mark, node=node, root="")

        return Coordinator(self.lab, [self.engine, *others], write_order, self.clock)

    def add(self, n: int, **given) -> None:
        known = len(self.lab.store.read_experiments())
        points = [Point(values={}, config={}, digest=f"d{known + k}") for k in range(n)]
        self.lab.store.add("/grid.yaml", points, [], **given)

    def turn(self, seconds: float = 1.0) -> None:
        self.clock.now_s += seconds
        self.coordinator.turn()

    def state(self, id: str) -> str:
        return self.lab.store.read_experiments(id=id)[0].state

    def end(self, id: str, outcome: str) -> None:
        settle(self.lab, self.lab.store.read_experiments(id=id)[0].newest, End(outcome=outcome))


@pytest.fixture
def bench(tmp_path):
    clock, term = Clock(), Term(ttl_s=TTL_S, grace_s=GRACE_S)
    with open_lab(tmp_path, create=True, term=term) as lab:
        lab.leases = Leases(term, clock)
        for name in ("a", "b"):
            lab.store.meet_node(Node(name=name, boot="boot", versions={}, devices=[]))
        yield Bench(lab, Engine(a=2), clock)


def test_as_many_start_as_there_are_devices_and_the_next_when_one_ends(bench):
    bench.add(3)
    bench.turn()
    assert bench.engine.started == [("e1", 1, "a"), ("e2", 1, "a")]
    bench.turn()
    assert len(bench.engine.started) == 2
    bench.end("e1", "user_error")
    bench.turn()
    assert bench.engine.started[2:] == [("e3", 1, "a")]
    assert [bench.state(id) for id in ("e1", "e2", "e3")] == ["failed", "leased", "leased"]


def test_what_one_engine_has_just_started_counts_for_its_owner_at_the_next(bench):
    bench.engine.places, other = {"a": 1}, Engine(b=1)
    other.name = "other"
    bench.coordinator = bench.build(other)
    bench.add(2, owner="ada")
    bench.add(1, owner="bob")
    bench.turn()
    assert (bench.engine.started, other.started) == ([("e1", 1, "a")], [("e3", 1, "b")])


def test_a_machine_that_is_leaving_gets_nothing_more_and_one_that_is_back_does(bench):
    bench.lab.machines["a"] = Heard(at_s=0.0, is_leaving=True)
    bench.add(1)
    bench.turn()
    assert bench.engine.started == []
    bench.lab.machines["a"] = Heard(at_s=0.0)
    bench.turn()
    assert bench.engine.started == [("e1", 1, "a")]


def test_what_is_gone_waits_and_starts_again_elsewhere(bench):
    bench.engine.places = {"a": 1, "b": 1}
    bench.add(1)
    bench.turn()
    ((_, _, first),) = bench.engine.started
    bench.engine.seen["e1"] = "gone"
    bench.turn()
    assert bench.state("e1") == "backoff"
    bench.engine.seen.clear()
    bench.turn(0.5)
    assert bench.state("e1") == "backoff", "it waits a while"
    bench.turn(10.0)
    assert bench.engine.started[1][1:] == (2, {"a": "b", "b": "a"}[first])


def test_a_wait_goes_on_under_the_next_server_where_it_stood_and_no_wall_clock_makes_it_longer(bench, monkeypatch):
    bench.add(1)
    bench.turn()
    bench.engine.seen["e1"] = "gone"
    bench.turn()
    bench.engine.seen.clear()
    stored_s = bench.lab.store.read_experiments(id="e1")[0].ended_s
    for later_s, state in ((0.5, "backoff"), (-1e6, "backoff"), (60.0, "leased")):
        monkeypatch.setattr("fulltilt.lab.coordinator.time.time", lambda later_s=later_s: stored_s + later_s)
        bench.coordinator = bench.build()
        bench.turn(0.1)
        assert bench.state("e1") == state
    assert len(bench.engine.started) == 2


def test_an_engine_that_cannot_be_asked_ends_nothing_until_the_lease_has_run_out(bench):
    bench.add(1)
    bench.turn()
    bench.engine.seen["e1"] = "unknown"
    for _ in range(9):
        bench.turn(11.0)
        assert bench.state("e1") == "leased"
    bench.turn(5.0)
    assert bench.state("e1") == "backoff"
    assert "whole term" in bench.lab.store.read_attempts("e1")[0]["reason"]


def test_what_waits_in_the_engines_own_queue_keeps_its_lease_and_can_be_called_back_at_once(bench):
    bench.add(1)
    bench.turn()
    bench.engine.seen["e1"] = "waiting"
    for _ in range(30):
        bench.turn(11.0)
    assert bench.state("e1") == "leased"
    operations.act(bench.lab, "cancel", "e1")
    bench.turn()
    assert bench.engine.ended == [("e1", True)]


def test_devices_that_others_have_taken_are_left_to_them(bench):
    bench.engine.places, bench.engine.used = {"a": 4}, {"a": 3}
    bench.add(3)
    bench.turn()
    assert len(bench.engine.started) == 1
    bench.engine.used, bench.engine.seen = {"a": 3}, {"e1": "waiting"}  # others were faster
    bench.turn()
    assert len(bench.engine.started) == 1
    bench.engine.used, bench.engine.seen = {"a": 2}, {"e1": "alive"}
    bench.turn()
    assert len(bench.engine.started) == 3, "one of two is ours"


def test_a_device_that_others_compute_on_is_left_alone_and_told_once_where_it_lasts(bench, caplog):
    bench.engine.busy = {"a:0": "used by process 42"}
    bench.lab.machines["a"] = Heard(at_s=0.0, busy={"a:1": "it does not answer"})  # as a machine of a cluster says it
    bench.add(3)
    for _ in range(3):
        bench.turn(BUSY_S / 2)
    assert bench.engine.started == []
    bench.turn(BUSY_S)
    left = "is left alone until it is free"
    assert caplog.messages == [f"a:0 of a {left}: used by process 42", f"a:1 of a {left}: it does not answer"]
    bench.lab.machines["a"], bench.engine.busy = Heard(at_s=0.0), {}
    bench.turn()
    assert len(bench.engine.started) == 2
    bench.engine.busy = {"a:0": "used by process 43"}  # our own
    for _ in range(3):
        bench.turn(BUSY_S)
    assert len(caplog.messages) == 2
    assert (bench.state("e1"), bench.state("e3")) == ("leased", "queued")
    assert {room.node: room.n_devices for room in bench.coordinator.read_rooms()} == {"a": 2}


def test_a_machine_that_a_new_server_has_not_heard_yet_takes_nothing_until_it_says_what_is_busy(bench):
    bench.engine.says_itself = True
    bench.add(2)
    bench.turn()
    assert bench.engine.started == []
    assert {room.node: room.n_devices for room in bench.coordinator.read_rooms()} == {"a": 2}
    bench.lab.machines["a"] = Heard(at_s=0.0, busy={"a:0": "used by process 42"})
    bench.turn()
    assert bench.engine.started == [("e1", 1, "a")]
    assert bench.lab.store.read_experiments(id="e1")[0].devices == ["a:1"]


def test_a_machine_that_is_away_takes_nothing_and_counts_for_what_can_ever_run(bench):
    bench.engine.places, bench.engine.away = {"a": 1, "b": 2}, ("b",)
    bench.lab.store.mark_node("a", n_bad=2, last_bad="e9")
    bench.add(2)
    bench.turn()
    assert [node for *_, node in bench.engine.started] == ["a"], "there is no other now"
    assert {room.node: room.n_devices for room in bench.coordinator.read_rooms()} == {"a": 1, "b": 2}


def test_an_engine_that_nobody_answers_for_is_nobodys_fault(bench):
    bench.add(2)
    bench.engine.refuses = AwayError
    for _ in range(2 * MOST_LOST):
        bench.turn()
    assert [each.state for each in bench.lab.store.read_experiments()] == ["queued", "queued"]
    assert [node.n_bad for node in bench.lab.store.read_nodes()] == [0, 0]
    bench.engine.refuses = None
    bench.turn()
    assert bench.state("e1") == "leased"


def test_a_loop_that_stood_still_gives_everybody_a_whole_term(bench):
    bench.add(1)
    bench.turn()
    bench.turn(10 * TTL_S)
    assert bench.state("e1") == "leased"


def test_what_is_lost_too_often_is_held_until_somebody_lets_it_go_on(bench):
    bench.add(1)
    bench.engine.refuses = RefusedError
    for _ in range(MOST_LOST + 1):
        bench.turn(400.0)
        bench.turn(400.0)
    assert bench.state("e1") == "held"
    bench.engine.refuses = None
    operations.act(bench.lab, "resume", "e1")
    bench.turn()
    assert bench.state("e1") == "leased"
    assert bench.lab.store.read_experiments(id="e1")[0].n_lost == 0


def test_a_machine_that_loses_two_is_left_out_unless_there_is_no_other(bench):
    bench.lab.store.mark_node("a", n_bad=2, last_bad="e9")
    bench.add(3)
    bench.turn()
    assert [node for *_, node in bench.engine.started] == ["a", "a"], "there is no other"
    for id in ("e1", "e2"):
        bench.end(id, "user_error")  # not the machine's fault
    bench.lab.store.mark_node("a", n_bad=2, last_bad="e9")
    bench.engine.places = {"a": 2, "b": 1}
    bench.add(2)
    bench.turn()
    assert [node for *_, node in bench.engine.started[2:]] == ["b"]
    operations.release_node(bench.lab, "a")
    bench.turn()
    assert [node for *_, node in bench.engine.started[3:]] == ["a", "a"]


def test_who_is_silent_and_does_not_end_when_told_to_is_ended_by_the_engine(bench):
    bench.add(1)
    bench.turn()
    operations.act(bench.lab, "cancel", "e1")
    bench.turn()
    assert bench.engine.ended == [], "its runner tells it first"
    bench.turn(GRACE_S + 1)
    assert bench.engine.ended == [], "it was heard a short while ago"
    bench.turn(STALE_S / 2)
    bench.turn(STALE_S / 2)
    assert bench.engine.ended[-1] == ("e1", True)
    bench.engine.seen["e1"] = "gone"
    bench.turn()
    assert bench.state("e1") == "cancelled"
    bench.turn()
    assert bench.coordinator._asked_s == {}, "what is over is not remembered"


def test_who_is_heard_hands_in_what_it_saved_though_that_takes_long(bench):
    bench.add(1)
    bench.turn()
    operations.act(bench.lab, "pause", "e1")
    newest, step_s = bench.lab.store.read_experiments(id="e1")[0].newest, 20.0
    for _ in range(int(HAND_IN_TERMS * TTL_S / step_s)):
        bench.turn(step_s)
        bench.lab.leases.renew(newest)
    assert bench.engine.ended == []
    for _ in range(2):
        bench.turn(step_s)
        bench.lab.leases.renew(newest)
    assert bench.engine.ended[-1] == ("e1", True), "not for ever"


def test_a_new_server_goes_on_with_what_the_one_before_started(bench):
    bench.add(2)
    bench.turn()
    bench.lab.store.advance("start", bench.lab.store.read_experiments(id="e2")[0].newest, pid=1)
    bench.coordinator = bench.build()
    bench.engine.seen["e2"] = "gone"
    bench.turn()
    assert (bench.state("e1"), bench.state("e2")) == ("leased", "backoff")
    bench.engine.is_lasting = False  # its attempts end with the server: that is nobody's fault
    bench.coordinator = bench.build()
    bench.engine.seen["e1"] = "gone"
    bench.coordinator.is_draining = True
    bench.turn()
    assert (bench.state("e1"), bench.lab.store.read_experiments(id="e1")[0].outcome) == ("queued", "preempted")


def test_what_began_and_ended_while_no_server_was_there_is_nobodys_fault(bench):
    bench.add(2)
    bench.turn()
    bench.coordinator = bench.build()
    bench.engine.seen = {"e1": "gone", "e2": "gone"}
    bench.coordinator.is_draining = True
    bench.turn()
    assert [each.state for each in bench.lab.store.read_experiments()] == ["queued", "queued"]
    assert [node.n_bad for node in bench.lab.store.read_nodes()] == [0, 0]


def test_what_another_engine_runs_is_left_alone(bench):
    bench.add(1)
    bench.turn()
    bench.engine.name = "another"
    bench.coordinator = bench.build()
    bench.turn()
    bench.coordinator.end_all(is_urgent=False)
    assert (bench.state("e1"), bench.engine.ended) == ("leased", [])


def test_a_result_whose_files_find_no_room_waits_for_it(bench, monkeypatch):
    bench.add(1)
    bench.turn()
    (found,) = bench.lab.store.read_experiments()
    bench.lab.store.add_artefacts(found.newest, [Artefact(name="weights.pt", digest="0" * 64, n_bytes=1)])

    def find_no_room(digest, target):
        raise StorageError("no space left") from OSError(errno.ENOSPC, "")

    monkeypatch.setattr(bench.lab.depot, "link", find_no_room)
    with pytest.raises(StorageError):
        bench.end("e1", "succeeded")
    with pytest.raises(StorageError):
        bench.turn()
    assert bench.state("e1") == "finalizing"
    monkeypatch.setattr(bench.lab.depot, "link", lambda digest, target: None)
    bench.turn()
    assert bench.state("e1") == "succeeded"


def test_a_result_whose_files_cannot_be_read_now_waits_alone_and_one_that_is_missing_is_spoilt(
    bench, monkeypatch, caplog
):
    bench.add(3)
    bench.turn()
    for each in bench.lab.store.read_experiments()[:2]:
        file = Artefact(name="weights.pt", digest=each.id[1] * 64, n_bytes=1)
        bench.lab.store.add_artefacts(each.newest, [file])

    def open_beneath(folder, *parts):
        if parts[-1] == "1" * 64:
            raise OSError(errno.EMFILE, "Too many open files")
        raise FileNotFoundError

    monkeypatch.setattr("fulltilt.lab.depot.open_beneath", open_beneath)
    with pytest.raises(StorageError, match="cannot be read"):
        bench.end("e1", "succeeded")  # its runner asks again
    bench.end("e2", "succeeded")
    for _ in range(2):
        bench.turn()
    assert [bench.state(id) for id in ("e1", "e2", "e3")] == ["finalizing", "failed", "leased"]
    assert ["cannot be put in place yet" in message for message in caplog.messages] == [True]
    monkeypatch.setattr(bench.lab.depot, "link", lambda digest, target: None)
    bench.turn()
    assert bench.state("e1") == "succeeded"


def test_while_the_disk_is_full_nothing_starts_and_what_ends_is_settled(bench, monkeypatch):
    bench.add(2)
    bench.engine.places = {"a": 1}
    bench.turn()
    monkeypatch.setattr(bench.lab.store, "has_room", lambda: False)
    bench.end("e1", "user_error")
    bench.turn()
    assert (bench.state("e1"), bench.state("e2")) == ("failed", "queued")
    monkeypatch.undo()
    bench.turn()
    assert bench.state("e2") == "leased"


class KilledError(BaseException):
    """The server is gone at this very moment."""


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_server_that_ends_at_either_side_of_any_arrow_loses_nothing_and_takes_one_result(bench, monkeypatch, side):
    """The first attempt of each is lost, the next one succeeds, with a file; runners ask until they are answered."""
    store, n_left = bench.lab.store, 0

    def kill_at_arrow(call):
        def step(*words, **named):
            nonlocal n_left
            n_left -= 1
            if n_left == 0 and side == "before":
                raise KilledError
            found = call(*words, **named)
            if n_left == 0:
                raise KilledError
            return found

        return step

    for name in ("advance", "lease_all"):
        monkeypatch.setattr(store, name, kill_at_arrow(getattr(store, name)))
    monkeypatch.setattr(bench.lab.depot, "link", lambda digest, target: None)
    n_kills = 0
    while n_left <= 0:  # the last one is not killed
        bench.add(1)
        id, n_left = f"e{n_kills + 1}", n_kills + 1
        for _ in range(20):
            try:
                (found,) = store.read_experiments(id=id)
                has_begun = (id, found.attempt, found.node) in bench.engine.started
                bench.engine.seen[id] = "alive" if has_begun else "gone"
                bench.turn(10.0)
                if has_begun and found.state in LIVE:
                    if found.state == "leased":
                        store.advance("start", found.newest, pid=1)
                    store.add_artefacts(found.newest, [Artefact(name="weights.pt", digest="0" * 64, n_bytes=1)])
                    bench.end(id, "lost" if found.attempt == 1 else "succeeded")
            except KilledError:
                bench.coordinator, n_kills = bench.build(), n_kills + 1
        arrows = [event.arrow for event in store.read_events(experiment=id)]
        assert (bench.state(id), arrows.count("finish"), arrows.count("commit")) == ("succeeded", 1, 1)
    assert n_kills == len(["lease", "start", "back_off", "wake", "lease", "start", "finish", "commit"])


def test_every_change_of_state_is_told_to_the_log_once_and_so_is_what_an_engine_refuses(bench, caplog):
    caplog.set_level("INFO", logger="fulltilt.lab")
    bench.add(1)
    bench.engine.refuses = RefusedError
    bench.turn()
    for _ in range(2):
        bench.coordinator._tell_changes()
    told = [(record.event, record.levelname, record.fields) for record in caplog.records]
    assert told[0] == ("engine_refused", "WARNING", {"experiment": "e1", "attempt": 1, "engine": "engine"})
    changes = [(event, fields["attempt"], fields["arrow"], fields["state"]) for event, _, fields in told[1:]]
    assert changes == [
        ("state", 0, "submit", "queued"),
        ("state", 1, "lease", "leased"),
        ("state", 1, "back_off", "backoff"),
    ]
