"""Who is next and where, what follows an end, whose time is up: functions of records, on a clock of the test's own."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab_cases import Clock

from fulltilt.lab.records import Attempt, Experiment, Node
from fulltilt.lab.scheduling.ends import judge_end, read_document
from fulltilt.lab.scheduling.leases import Leases, Term
from fulltilt.lab.scheduling.order import Room, find_impossible, plan_starts
from fulltilt.lab.scheduling.retries import MOST_LOST, choose_sequel, is_barred, judge_node


def row(id: str, priority: int = 0, owner: str = "", n: int = 1) -> Experiment:
    given = {"sweep": "s", "state": "queued", "attempt": 0, "point": {}, "overrides": ()}
    return Experiment(id=id, priority=priority, owner=owner, n_devices=n, **given)


def room(node: str, n_free: int, n: int | None = None, *, is_barred: bool = False) -> Room:
    free = [f"{node}{i}" for i in range(n_free)]
    return Room(node=node, free=free, n_devices=n or n_free, is_barred=is_barred)


def plan(rows, rooms, **given) -> list[tuple[str, str, int]]:
    found = plan_starts(rows, rooms, **given)
    return [(start.experiment.id, start.node, len(start.devices)) for start in found]


def test_the_oldest_of_the_most_urgent_start_and_the_others_wait():
    rows = [row("e1"), row("e2", 5), row("e3"), row("e10", 5)]
    assert [id for id, *_ in plan(rows, [room("a", 3)])] == ["e2", "e10", "e1"]
    assert plan(rows, [room("a", 0, 4)]) == plan([], [room("a", 1)]) == plan(rows, []) == []


def test_a_grid_of_one_does_not_shut_out_another():
    rows = [row(f"e{i}", owner="many") for i in range(1, 9)] + [row("e9", owner="one"), row("e10", owner="one")]
    assert [id for id, *_ in plan(rows, [room("a", 4)])] == ["e1", "e9", "e2", "e10"]
    assert [id for id, *_ in plan(rows, [room("a", 2)], in_use={"many": 3, "one": 0})] == ["e9", "e10"]
    assert next(iter(plan([*rows, row("e11", 1, owner="many")], [room("a", 1)], in_use={"many": 9})))[0] == "e11"


def test_several_devices_come_from_one_machine_and_leave_the_fewest_idle():
    rooms = [room("big", 8), room("small", 4), room("tiny", 1)]
    assert plan([row("e1", n=4), row("e2"), row("e3", n=5)], rooms) == [
        ("e1", "small", 4), ("e2", "tiny", 1), ("e3", "big", 5),
    ]  # fmt: skip
    taken = [device for start in plan_starts([row("e1", n=3), row("e2", n=3)], rooms) for device in start.devices]
    assert len(set(taken)) == 6


def test_what_has_to_wait_keeps_a_machine_and_the_others_go_on_elsewhere():
    rooms = [room("a", 3, 4), room("b", 2, 4)]
    rows = [row("e1", n=4), *(row(f"e{i}") for i in range(2, 9))]
    assert plan(rows, rooms) == [("e2", "b", 1), ("e3", "b", 1)], "nothing on a, which e1 gets as soon as it is free"
    assert plan(rows, [room("a", 4), room("b", 2, 4)])[0] == ("e1", "a", 4)
    large = [row("e1", n=4), row("e2", n=4), row("e3")]
    assert plan(large, rooms) == [("e3", "b", 1)], "machines kept for all that wait would stand idle"


def test_a_machine_that_is_barred_or_lost_the_last_attempt_is_left_out_where_there_is_another():
    rooms = [room("a", 1), room("b", 1)]
    assert plan([row("e1")], rooms, avoid={"e1": "a"}) == [("e1", "b", 1)]
    assert plan([row("e1")], rooms[:1], avoid={"e1": "a"}) == [("e1", "a", 1)]
    assert plan([row("e1")], [room("a", 1, is_barred=True), rooms[1]]) == [("e1", "b", 1)]


def test_what_can_never_run_is_told_with_what_there_is():
    assert find_impossible(8, [room("a", 0, 8)]) is None
    assert find_impossible(9, [room("a", 8), room("b", 4)]) == (
        "it takes 9 devices on one machine, and the largest here has 8"
    )


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("xyz"), st.integers(1, 8)), max_size=30),
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=6),
)
def test_no_device_is_given_twice_and_what_leads_is_served_first(wanted, machines):
    rows = [row(f"e{i}", p, owner, n) for i, (p, owner, n) in enumerate(wanted)]
    rooms = [room(f"m{i}-", n, 8, is_barred=barred) for i, (n, barred) in enumerate(machines)]
    starts = plan_starts(rows, rooms)
    taken = [device for start in starts for device in start.devices]
    free = {device for each in rooms if not each.is_barred for device in each.free}
    assert len(taken) == len(set(taken))
    assert set(taken) <= free
    assert all(len(start.devices) == start.experiment.n_devices for start in starts)
    started = {start.experiment.id for start in starts}
    for one in rows:  # among those of one owner and size nobody overtakes
        for other in rows:
            is_alike = (one.owner, one.n_devices) == (other.owner, other.n_devices)
            if is_alike and (-one.priority, int(one.id[1:])) < (-other.priority, int(other.id[1:])):
                assert one.id in started or other.id not in started


@pytest.mark.parametrize(
    ("outcome", "wish", "n_lost", "arrow"),
    [
        ("succeeded", "cancel", 3, "finish"),
        ("succeeded", None, 3, "finish"),
        ("preempted", "cancel", 0, "end"),
        ("lost", "pause", 0, "park"),
        ("preempted", None, 9, "requeue"),
        ("lost", None, 0, "back_off"),
        ("infra_refused", None, MOST_LOST - 1, "back_off"),
        ("lost", None, MOST_LOST, "give_up"),
        ("user_error", None, 0, "fail"),
        ("oom", None, 0, "fail"),
    ],
)
def test_what_follows_an_end(outcome, wish, n_lost, arrow):
    assert choose_sequel(outcome, wish=wish, n_lost=n_lost, draw=0.5).arrow == arrow


def test_who_is_lost_again_waits_longer_and_who_was_preempted_does_not():
    waits = [choose_sequel("lost", wish=None, n_lost=n, draw=0.5).delay_s for n in range(5)]
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert choose_sequel("lost", wish=None, n_lost=2, draw=0.0).n_lost == 3
    assert choose_sequel("preempted", wish=None, n_lost=4, draw=1.0).n_lost == 0


def test_a_machine_that_loses_different_experiments_is_barred_and_one_experiment_that_dies_is_not_its_fault():
    node = Node(name="a", boot="b", versions={}, devices=[])

    def follow(*ends: tuple[str, str]) -> Node:
        found = node
        for experiment, outcome in ends:
            n_bad, last_bad = judge_node(found, outcome, experiment)
            found = Node(name="a", boot="b", versions={}, devices=[], n_bad=n_bad, last_bad=last_bad)
        return found

    assert is_barred(follow(("e1", "lost"), ("e2", "infra_refused")))
    assert not is_barred(follow(("e1", "lost"), ("e1", "lost"), ("e1", "lost")))
    assert not is_barred(follow(("e1", "lost"), ("e2", "user_error"), ("e3", "lost")))


DONE = {"reason": "finished", "metrics": {"loss": 1.0}}
WRONG = {"error": "lr is too high; lower it\nmore", "rc": 1}
LEFT = {"error": "interrupted: saved", "rc": 130}


@pytest.mark.parametrize(
    ("code", "document", "is_stopped", "outcome"),
    [
        (0, DONE, False, "succeeded"),
        (-9, DONE, True, "succeeded"),
        (143, LEFT, True, "preempted"),
        (-9, None, True, "preempted"),
        (1, WRONG, True, "user_error"),
        (1, {"error": "CUDA out of memory; use batch_size 32", "rc": 1}, False, "oom"),
        (130, LEFT, False, "lost"),
        (-9, None, False, "lost"),
        (None, None, False, "lost"),
        (0, None, False, "user_error"),
    ],
)
def test_what_an_end_means(code, document, is_stopped, outcome):
    end = judge_end(code, document, is_stopped=is_stopped)
    assert end.outcome == outcome
    assert end.reason is None or "\n" not in end.reason


def test_a_result_that_was_cut_short_is_none(tmp_path):
    path = tmp_path / "result.json"
    for text in ("", '{"reason": "fin', "[1]"):
        path.write_text(text)
        assert read_document(path) is None
    path.write_text(json.dumps(DONE))
    assert read_document(path) == DONE


def test_a_lease_runs_out_a_whole_term_after_it_was_heard_of_and_never_before():
    clock, one, other = Clock(), *(Attempt(experiment=f"e{i}", number=1) for i in (1, 2))
    leases = Leases(Term(ttl_s=100, grace_s=10), clock)
    for _ in range(10):
        clock.now_s += 10
        leases.renew(one)
        assert leases.turn([one, other]) == []
    clock.now_s += 11  # `other` was first seen at the first turn
    assert leases.turn([one, other]) == [other]
    assert leases.list_stale() == {other}


def test_a_server_that_was_away_has_heard_nobody_and_gives_everybody_a_whole_term():
    clock, one = Clock(), Attempt(experiment="e1", number=1)
    leases = Leases(Term(ttl_s=100, grace_s=10), clock)
    assert leases.turn([one]) == []
    clock.now_s += 1000  # stopped, or suspended
    assert leases.turn([one]) == []
    for _ in range(5):
        clock.now_s += 20
        assert leases.turn([one]) == []
    clock.now_s += 1
    assert leases.turn([one]) == [one]


def test_a_renewal_that_comes_amid_a_turn_or_a_look_of_another_thread_is_not_lost():
    clock, (one, two, three) = Clock(), (Attempt(experiment=f"e{i}", number=1) for i in range(3))
    leases, threads = Leases(Term(ttl_s=100, grace_s=10), clock), []

    def renew(attempt: Attempt) -> None:
        threads.append(threading.Thread(target=leases.renew, args=(attempt,)))
        threads[-1].start()
        threads[-1].join(0.2)  # it is through by now, or waits

    def list_live():
        yield one
        renew(one)
        yield two

    class Moment(float):
        def __rsub__(self, now_s: float) -> float:
            renew(three)
            return float(now_s) - float(self)

    leases.renew(one)
    clock.now_s += 20
    leases.turn(list_live())
    threads[0].join()
    clock.now_s += 20
    assert leases.list_stale() == set(), "one was heard 20 s ago, and not 40"
    clock.now_s = Moment(clock.now_s)
    leases.renew(two)
    assert leases.list_stale() == set(), "and the look goes on where three is added amid it"


def test_a_grace_that_outlasts_the_lease_is_refused():
    with pytest.raises(ValueError, match=r"at most 0\.15 of 100 s"):
        Term(ttl_s=100, grace_s=16)
