"""Strategies on a simulated target: what they run, in which order, and when they stop."""

import dataclasses
import itertools
import math

import pytest
from tests.simulated_target import Answer, Clock, SimulatedTarget
from tests.unit.tuner.tuner_cases import USER as BASE
from tests.unit.tuner.tuner_cases import build_space

from fulltilt.levers import default_plan, find_obstacles
from fulltilt.records import IN_TURNS, PROBES, WHOLE_RUN
from fulltilt.records.run_folder import RunFolder
from fulltilt.stats.alternation import LOOKS
from fulltilt.tuner.search import strategies as search
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.progress import TrialCut, TrialDone, TrialStarted, TurnsDone
from fulltilt.tuner.search.search import run_proof
from fulltilt.tuner.search.session import PROOF_MARGIN, RESERVE_SHARE, Ask, Session, TakeTurns

SIZES = (16, 32, 64, 128, 256)
A, B, C = (BASE.replace(batch_size=size) for size in (32, 64, 128))


def answer_like_a_machine(plan):
    """Throughput that saturates in the batch and peaks at two workers; batch 256 does not fit, 128 not in fp32."""
    limit = 256 if plan["precision"] == "bf16" else 128
    if plan["batch_size"] >= limit:
        return Answer(status="out_of_memory")
    rate = 1000 * plan["batch_size"] / (plan["batch_size"] + 40)
    rate *= {0: 0.5, 1: 0.8, 2: 1.0, 4: 0.9}[plan["num_workers"]]
    return Answer(samples_per_s=rate * (1.6 if plan["precision"] == "bf16" else 1.0))


SPACE = build_space(batch_size=SIZES, num_workers=(0, 1, 2, 4), precision=("fp32", "bf16"))


def run(strategy, answer=answer_like_a_machine, **options):
    target = SimulatedTarget(answer)
    session = Session(target, Journal(), **options)
    is_complete = session.run(strategy)
    return session, target, is_complete


def open_folder(path):
    return RunFolder(path, fingerprint_parts={}, command="tune", results=["trials.jsonl"])


def run_in_folder(folder, strategy, target, **options):
    """A search that takes up the rows of the folder; its session, and notes of the journal."""
    with open_folder(folder) as held:
        session = Session(target, Journal(held), **options)
        session.run(strategy, reserve_after_n=math.inf)
        session.adopt_rest()
        return session


def answer_by_size(plan):
    return Answer(samples_per_s=plan["batch_size"], seconds=10.0)


def take(clock, seconds):
    return clock.time(lambda plan: 1.0, lambda plan: seconds)


def find_fastest(session):
    return max((row for row in session.rows if row.status == "ok"), key=lambda row: row.samples_per_s)


def ask_sizes(**asked):
    return (Ask(plan=BASE.replace(batch_size=size), why="", **asked) for size in SIZES)


def test_exhaustive_has_a_row_for_every_plan_and_runs_none_above_one_that_ran_out_of_memory():
    """It goes on after an error."""
    session, target, _ = run(search.exhaustive(SPACE), survive_a_bad_start)
    assert [row.plan for row in session.rows] == SPACE.grid()
    fp32 = [row for row in session.rows if row.plan["precision"] == "fp32" and row.plan["num_workers"] == 0]
    assert [row.status for row in fp32] == ["ok", "error", "ok", "out_of_memory", "skipped"]
    assert fp32[-1].reason == "larger than batch 128, which ran out of memory"
    assert fp32[-1].plan not in target.asked


def survive_a_bad_start(plan):
    return Answer(status="error") if plan == BASE else answer_like_a_machine(plan)


@pytest.mark.parametrize("answer", [answer_like_a_machine, survive_a_bad_start])
def test_coordinate_descent_finds_the_best_plan_with_fewer_trials_than_the_grid(answer):
    session, target, is_complete = run(search.coordinate_descent(SPACE), answer)
    everything, _, _ = run(search.exhaustive(SPACE), answer)
    best = find_fastest(session).plan
    assert best == find_fastest(everything).plan
    assert (best["batch_size"], best["precision"]) == (128, "bf16"), "what a later lever makes room for"
    assert is_complete
    assert len(target.asked) == len(set(target.asked)) < len(everything.rows) / 2
    assert (session.rows[0].plan, session.rows[0].why) == (BASE, "the user's plan, or the nearest one in the space")
    assert all(row.why for row in session.rows)
    assert any("round 1: num_workers 2" in row.why for row in session.rows)
    first = [row for row in session.rows if row.plan.replace(batch_size=1) == BASE.replace(batch_size=1)]
    assert {row.plan["batch_size"]: row.status for row in first}[256] == "skipped", "above an out of memory"


def test_coordinate_descent_runs_no_lever_without_the_one_it_needs_and_keeps_the_effective_batch():
    """With no workers there is nothing to prefetch."""
    space = build_space(prefetch_factor=(None, 4), persistent_workers=(False, True), num_workers=(0, 2))
    session, target, _ = run(
        search.coordinate_descent(space),
        lambda plan: Answer(samples_per_s=100.0 + 10 * plan["num_workers"] + (plan["prefetch_factor"] or 0)),
    )
    assert not [plan for plan in target.asked if find_obstacles(plan, space.facts)]
    reasons = {row.reason for row in session.rows if row.status == "skipped"}
    assert any("prefetch_factor=4: there are no data workers to prefetch" in reason for reason in reasons)
    best = find_fastest(session).plan
    assert (best["num_workers"], best["prefetch_factor"]) == (2, 4)
    space = build_space(default_plan({"batch_size": 64, "accumulate": 4}), batch_size=(64, 128, 256))
    space = dataclasses.replace(space, effective_batch_size=256)
    session, _, _ = run(search.coordinate_descent(space), answer_by_size)
    assert {row.plan.effective_batch_size for row in session.rows} == {256}


def test_a_search_ends_on_noise_that_never_settles():
    rates, space = itertools.count(1.0), build_space(batch_size=SIZES, num_workers=(0, 1, 2, 4))
    _, target, is_complete = run(search.coordinate_descent(space), lambda plan: Answer(samples_per_s=next(rates)))
    assert is_complete
    assert len(target.asked) <= 20


def test_impossible_values_are_rows_that_never_reach_the_target():
    reason = "pin_memory=True: no GPU"
    space = dataclasses.replace(build_space(), skipped=((BASE.replace(pin_memory=True, batch_size=10), reason),))
    session, target, _ = run(search.skip_impossible(space), n_devices=4)
    [row] = session.rows
    assert (row.n_devices, row.batch_size_per_device) == (4, 3), "as many as the others"
    assert (row.kind, row.status, row.reason) == (WHOLE_RUN, "skipped", reason)
    assert row.null_reasons["samples_per_s"] == "not run"
    assert not target.asked


def take_turns(*groups):
    return (TakeTurns(plans=plans, why="") for plans in groups)


def test_plans_in_turns_have_rows_of_one_group_and_a_group_that_fails_has_that_of_the_failed_plan():
    failed = Answer(status="error", reason="no luck")
    session, target, _ = run(take_turns((A, B), (B, C), (A, B)), lambda plan: failed if plan == C else Answer())
    assert target.groups == [(A, B), (B, C), (A, B)]
    assert [(row.id, row.group, row.plan) for row in session.turns] == [
        ("t1", 1, A), ("t2", 1, B), ("t4", 2, C), ("t5", 3, A), ("t6", 3, B),
    ]  # fmt: skip
    assert {row.kind for row in session.turns} == {IN_TURNS}
    assert (session.rows, session.n_run) == ([], 5)


def test_a_group_that_was_recorded_is_not_run_again_and_what_nobody_asked_for_is_kept(tmp_path):
    target = SimulatedTarget(lambda plan: Answer(samples_per_s=1.0))
    first = run_in_folder(tmp_path, take_turns((A, B), (A, C), (A, B)), target)
    assert len(target.groups) == 3
    again = run_in_folder(tmp_path, take_turns((B, A), (A, B), (A, B)), target)
    assert target.groups[3:] == [(A, B)]
    assert {row.id for row in first.turns} < {row.id for row in again.turns}
    assert [row.group for row in again.turns] == [1, 1, 3, 3, 4, 4, 2, 2]
    assert (again.n_run, again.n_resumed) == (2, 6)


@pytest.mark.parametrize("budget_s", [50.0, 100.0, 200.0])
def test_the_budget_ends_a_search_and_keeps_time_for_the_turns(budget_s):
    clock = Clock()
    session, target, is_complete = run(search.exhaustive(SPACE), take(clock, 5.0), budget_s=budget_s, clock=clock)
    assert not is_complete
    assert session.is_budget_spent
    first_look_s = 4 * 2 * 5.0  # four groups of two plans
    kept_s = min(PROOF_MARGIN * first_look_s + 5.0, RESERVE_SHARE * budget_s)
    assert clock() == 5.0 * len(target.asked) == 5.0 * ((budget_s - kept_s) // 5.0)
    assert not session.run(take_turns(*[(A, B)] * 20), reserve_after_n=math.inf)
    assert len(target.groups) == (budget_s - 5.0 * len(target.asked)) // 10
    assert clock() == budget_s  # half a group would compare nothing


@pytest.mark.parametrize(
    ("steps_per_s", "whole_s", "budget_s"),
    [
        (30.0, 2.8, 11.2),  # two starts of 2 s and the blocks after them, each no longer than the whole run
        (3.0, 10.0, 29.4),  # in 8 s of the 10; two starts of 2 s and four blocks each of two steps, 5.3 s together
    ],
)
def test_the_first_group_is_expected_to_take_the_starts_of_its_processes_and_its_blocks(steps_per_s, whole_s, budget_s):
    for spare_s in (-0.2, 0.2):
        clock = Clock()
        alone = clock.time(lambda plan: steps_per_s * plan["batch_size"], lambda plan: whole_s)
        target = SimulatedTarget(alone, in_turns=clock.time(lambda plan: 1.0, lambda plan: 1.5))
        session = Session(target, Journal(), budget_s=budget_s + spare_s, clock=clock)
        assert session.run((Ask(plan=plan, why="") for plan in (A, B)), reserve_after_n=math.inf)
        assert session.run(take_turns((A, B)), reserve_after_n=math.inf) == (spare_s > 0)
    n_more = int(session.left_s / 3)  # 3 s are known from the first
    assert session.run(take_turns(*[(A, B)] * n_more), reserve_after_n=math.inf)
    assert not session.run(take_turns((A, B)), reserve_after_n=math.inf)


def test_probes_leave_time_for_the_first_whole_run():
    clock = Clock()
    session, target, is_complete = run(ask_sizes(kind="device"), take(clock, 10.0), budget_s=75.0, clock=clock)
    assert (len(target.asked), is_complete) == (3, False)
    session.run(search.run_nearest(SPACE))
    assert [row.kind for row in session.rows] == [WHOLE_RUN]
    assert clock() == 40.0


@pytest.mark.parametrize(("clock_s", "n_rows"), [(0.0, 1), (20.0, 0)])
def test_the_first_trial_runs_whatever_the_budget_unless_that_is_gone(clock_s, n_rows):
    session, target, _ = run(search.exhaustive(SPACE), budget_s=0.001, start_s=0.0, clock=lambda: clock_s)
    assert (len(session.rows), len(target.asked)) == (n_rows, n_rows)
    assert session.is_budget_spent


def test_a_trial_that_the_budget_breaks_off_is_no_row_and_runs_again_with_more_of_it(tmp_path):
    now = [0.0]

    def answer(plan):
        is_late = now[0] + 10.0 > 25.0
        now[0] = min(now[0] + 10.0, 25.0)
        return Answer(status="timeout", seconds=5.0) if is_late else Answer(samples_per_s=1.0, seconds=1.0)

    def search_in_folder(budget_s):
        target = SimulatedTarget(answer)
        return run_in_folder(tmp_path, ask_sizes(), target, budget_s=budget_s, clock=lambda: now[0])

    first = search_in_folder(25.0)
    assert [row.status for row in first.rows] == ["ok", "ok"]
    assert (first.cut.plan["batch_size"], first.is_budget_spent) == (64, True)
    now[0] = -1000.0
    again = search_in_folder(None)
    assert [row.status for row in again.rows] == ["ok"] * 5


def test_a_group_that_the_budget_breaks_off_has_no_rows_and_runs_again_with_more_of_it(tmp_path):
    clock, events = Clock(), []

    def answer(plan):
        is_late = clock.now_s + 10.0 > 35.0
        clock.now_s = min(clock.now_s + 10.0, 35.0)
        return Answer(status="timeout", seconds=5.0) if is_late else Answer(samples_per_s=1.0, seconds=10.0)

    plans = tuple(BASE.replace(batch_size=size) for size in SIZES)
    given = {"budget_s": 35.0, "clock": clock, "on_event": events.append}
    first = run_in_folder(tmp_path, take_turns(plans), SimulatedTarget(answer), **given)
    assert (first.turns, first.is_budget_spent) == ([], True)
    assert sum(isinstance(event, TrialCut) for event in events) == 1
    clock.now_s = -1000.0
    again = run_in_folder(tmp_path, take_turns(plans), SimulatedTarget(answer))
    assert [(row.status, row.group) for row in again.turns] == [("ok", 1)] * 5


def test_a_group_is_expected_to_take_what_its_plans_took_before():
    clock = Clock()
    answer = clock.time(lambda plan: 1.0, lambda plan: 30.0 if plan == C else 1.0)
    session = Session(SimulatedTarget(answer), Journal(), budget_s=60.0, clock=clock)
    for group, fits in (((A, B), True), ((A, C), True), ((A, C), False), ((A, B), True)):  # 27 s are left, and 31 taken
        assert session.run(take_turns(group), reserve_after_n=math.inf) == fits
    assert session.cut is None


def test_a_plan_that_is_asked_for_twice_runs_once():
    session, target, _ = run(Ask(plan=BASE, why="") for _ in range(2))
    assert (len(target.asked), [row.id for row in session.rows]) == (1, ["t1"])


def test_the_best_row_of_another_strategy_in_the_folder_is_a_finalist(tmp_path):
    fast = BASE.replace(batch_size=64, num_workers=4)
    target = SimulatedTarget(lambda plan: Answer(samples_per_s=900.0 if plan == fast else 100.0))
    for plans in ([A, fast], [A, B]):
        with open_folder(tmp_path) as folder:
            session = Session(target, Journal(folder))
            session.run(Ask(plan=plan, why="") for plan in plans)
            proof = run_proof(session, build_space())
    assert {A, B, fast} == {row.plan for row in session.rows}
    assert proof.best == fast


def run_told(strategy, answer, **options):
    """What was told when trials ended, all that was told, and the target."""
    events = []
    _, target, _ = run(strategy, answer, on_event=events.append, **options)
    return [event for event in events if isinstance(event, TrialDone)], events, target


def test_the_time_left_is_what_trials_of_each_kind_take():
    """A mean of all kinds said 20 s where 2 s of estimates were left, and 20 s where 100 s of whole runs were."""
    runs = [(WHOLE_RUN, 20.0), ("memory", 1.0), ("device", 5.0), ("memory", 1.0)]
    plans = [BASE.replace(batch_size=size) for size in range(1, 5)]
    done, events, _ = run_told(
        (Ask(plan=plan, why="", kind=kind) for plan, (kind, _) in zip(plans, runs, strict=True)),
        lambda plan: Answer(samples_per_s=1.0, seconds=runs[plans.index(plan)][1]),
        planned={"memory": 2, "device": 2, WHOLE_RUN: 2},
    )
    assert [event.seconds_left for event in done] == [5 * 20, 1 + 2 * 20 + 20, 1 + 5 + 20, 5 + 20]
    assert [event.n_done for event in events if isinstance(event, TrialStarted)] == [0, 1, 2, 3]


def test_planned_trials_are_an_upper_bound_here_and_no_more_than_a_small_grid_holds():
    for name, strategy in search.STRATEGIES.items():
        session, _, _ = run(strategy(SPACE))
        planned = search.count_planned(SPACE, name)
        for kind in (*PROBES, WHOLE_RUN):
            n_rows = sum(row.kind == kind for row in (*session.rows, *session.probes))
            assert n_rows <= planned.get(kind, 0), (name, kind)
    planned = search.count_planned(build_space(batch_size=SIZES), "model_first")
    n_turns = LOOKS[0] * 5  # the user's own and four finalists
    assert planned == {"memory": 5, "device": 5, "loader": 4, WHOLE_RUN: 6, IN_TURNS: n_turns}


def test_the_count_of_planned_trials_follows_the_search_and_is_no_more_than_the_budget_holds():
    def ask():
        yield Ask(plan=BASE, why="")
        yield Ask(plan=BASE, why="", kind="device")
        yield Ask(plan=BASE.replace(batch_size=16), why="")
        yield TakeTurns(plans=(A, B), why="")

    planned = {"device": 9, "loader": 9, WHOLE_RUN: 4, IN_TURNS: 6}
    done, events, _ = run_told(ask(), answer_by_size, planned=planned)
    assert [event.n_planned for event in done] == [28, 28, 2 + 4 - 1 + 6]
    [turns] = [event for event in events if isinstance(event, TurnsDone)]
    assert (len(turns.rows), turns.n_done, turns.n_planned, turns.is_resumed) == (2, 5, 5 + 4, False)
    clock = Clock()
    given = {"budget_s": 50.0, "clock": clock, "planned": {WHOLE_RUN: 40}}
    done, _, target = run_told(ask_sizes(), take(clock, 10.0), **given)
    assert [event.n_planned for event in done] == [5, 5, 5]
    assert [event.seconds_left for event in done] == [40.0, 30.0, 20.0]
    assert len(target.asked) == 3
