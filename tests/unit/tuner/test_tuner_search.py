"""Strategies on a simulated target: what they run, in which order, and when they stop."""

import dataclasses
import itertools

import pytest
from tests.simulated_target import Answer, Clock, SimulatedTarget
from tests.unit.tuner.tuner_cases import USER as BASE

from fulltilt.levers import Facts, default_plan, find_obstacles
from fulltilt.records import PROBES
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.picks.recommend import merge_repeats, pick
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search import strategies as search
from fulltilt.tuner.search.confirm import confirm
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.progress import TrialDone, TrialStarted
from fulltilt.tuner.search.search import run_finals
from fulltilt.tuner.search.session import END_TO_END, REPEAT, Ask, Session

SIZES = (16, 32, 64, 128, 256)
A, B, C = (BASE.replace(batch_size=size) for size in (32, 64, 128))


def build_space(base=BASE, **axes):
    return Space(axes=axes, base=base, user_plan=base, facts=Facts(device_type="cpu", n_cores_usable=4))


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
        session.run(strategy, may_use_reserve=True)
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
    assert (row.kind, row.status, row.reason) == (END_TO_END, "skipped", reason)
    assert row.null_reasons["samples_per_s"] == "not run"
    assert not target.asked


@pytest.mark.parametrize(
    ("rates", "spread_pct", "asked"),
    [
        pytest.param([[1.0] * 3] * 2, 5.0, [A, B, B, A, A, B], id="interleaved, in reverse every other round"),
        pytest.param([[32.0] * 3, [64.0] * 3], 1.0, [A, B, B, A], id="the gap is clear"),
        pytest.param([[100.0] * 3, [110.0] * 3], 20.0, [A, B, B, A, A, B], id="blocks differ more than the gap"),
        pytest.param([[100.0] * 3, [102.0] * 3, [50.0] * 3], 6.0, [A, B, C, C, B, A, A, B], id="a slower one leaves"),
        pytest.param([[100.0] * 3, [101.0] * 3, [900.0]], 8.0, [A, B, C, C, B, A, A, B], id="one that fails leaves"),
        pytest.param([[100.0] * 3, [98.5] * 3], 0.1, [A, B, B, A], id="a tie that costs nothing"),
    ],
)
def test_finalists_are_measured_again_in_rounds_until_they_are_told_apart(rates, spread_pct, asked):
    finalists = {plan: itertools.chain(rate, [None]) for plan, rate in zip((A, B, C), rates, strict=False)}

    def answer(plan):
        rate = next(finalists[plan])
        return Answer(samples_per_s=rate, spread_pct=spread_pct, status="ok" if rate else "out_of_memory")

    session, target, _ = run(confirm([*finalists]), answer)
    assert target.asked == asked
    assert {row.kind for row in session.rows} == {REPEAT}


def test_a_round_that_was_broken_off_is_begun_anew_and_repeats_of_another_comparison_are_no_answer(tmp_path):
    def confirm_at(rate, plans=(A, B)):
        target = SimulatedTarget(lambda plan: Answer(samples_per_s=rate, spread_pct=0.1))
        session = run_in_folder(tmp_path, confirm(plans), target)
        rows = [(row.plan, row.round, row.samples_per_s) for row in session.rows]
        return target.asked, rows, session.journal.notes

    asked, rows, notes = confirm_at(100.0)
    assert notes == []
    assert (asked, [row[1] for row in rows]) == ([A, B, B, A], [1, 1, 2, 2])
    file = tmp_path / "trials.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    for expected in ([B, A], []):  # begun anew, and then recorded whole
        asked, rows, notes = confirm_at(101.0)
        assert notes == ["t3: of a round that was broken off, set aside: a round counts only whole"]
        assert asked == expected
        assert rows == [(A, 1, 100.0), (B, 1, 100.0), (B, 3, 101.0), (A, 3, 101.0)]
    asked, rows, _ = confirm_at(50.0, [B, C])
    assert {(plan, rate) for plan, _, rate in rows if plan != A} == {(B, 100.0), (B, 101.0), (B, 50.0), (C, 50.0)}
    assert set(asked) == {B, C}


def test_the_budget_ends_a_search_and_keeps_time_for_the_finalists():
    clock = Clock()
    session, target, is_complete = run(
        search.exhaustive(SPACE), take(clock, 10.0), budget_s=100.0, reserve_trials=4, clock=clock
    )
    assert not is_complete
    assert session.is_budget_spent
    assert len(target.asked) == 7  # 30 s, and not the 40 s of four trials, are kept back
    assert not session.run(confirm([A, B]), may_use_reserve=True)
    assert clock() == 90.0  # one round of two; 10 s are left, and half a round would compare nothing


def test_probes_leave_time_for_the_first_whole_run():
    clock = Clock()
    session, target, is_complete = run(
        ask_sizes(kind="device"), take(clock, 10.0), budget_s=40.0, reserve_trials=0, clock=clock
    )
    assert (len(target.asked), is_complete) == (3, False)
    session.run(search.run_nearest(SPACE))
    assert [row.kind for row in session.rows] == [END_TO_END]
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


def test_a_repeat_is_expected_to_take_what_its_plan_took_before():
    clock = Clock()
    answer = clock.time(lambda plan: 1.0, lambda plan: 30.0 if plan == C else 1.0)
    wishes = (Ask(plan=plan, why="", kind=kind) for plan, kind in ((A, END_TO_END), (C, END_TO_END), (C, REPEAT)))
    _, target, is_complete = run(wishes, answer, budget_s=50.0, reserve_trials=0, clock=clock)
    assert (len(target.asked), is_complete) == (2, False)
    # a plan asked twice is run once, and a repeat is run again
    session, target, _ = run(Ask(plan=BASE, why="", kind=kind) for kind in (END_TO_END, END_TO_END, REPEAT))
    assert len(target.asked) == 2
    assert [row.id for row in session.rows] == ["t1", "t2"]


def test_the_best_row_of_another_strategy_in_the_folder_is_a_finalist(tmp_path):
    fast = BASE.replace(batch_size=64, num_workers=4)
    target = SimulatedTarget(lambda plan: Answer(samples_per_s=900.0 if plan == fast else 100.0))
    for plans in ([A, fast], [A, B]):
        with open_folder(tmp_path) as folder:
            session = Session(target, Journal(folder))
            session.run(Ask(plan=plan, why="") for plan in plans)
            session.adopt_rest((END_TO_END,))
            run_finals(session, SPACE, n_finalists=2)
            session.adopt_rest()
    assert {plan["batch_size"] for plan in (A, B, fast)} == {row.plan["batch_size"] for row in session.rows}
    table, _ = merge_repeats(session.rows)
    picked = pick(table, user_plan=BASE, memory_limit_gib=None, runs=session.rows).recommended.trial
    assert (picked.plan, picked.kind) == (fast, REPEAT)


def run_told(strategy, answer, **options):
    """What was told when trials ended, all that was told, and the target."""
    events = []
    _, target, _ = run(strategy, answer, on_event=events.append, **options)
    return [event for event in events if isinstance(event, TrialDone)], events, target


def test_the_time_left_is_what_trials_of_each_kind_take():
    """A mean of all kinds said 20 s where 2 s of estimates were left, and 20 s where 100 s of whole runs were."""
    runs = [(END_TO_END, 20.0), ("memory", 1.0), ("device", 5.0), ("memory", 1.0)]
    plans = [BASE.replace(batch_size=size) for size in range(1, 5)]
    done, events, _ = run_told(
        (Ask(plan=plan, why="", kind=kind) for plan, (kind, _) in zip(plans, runs, strict=True)),
        lambda plan: Answer(samples_per_s=1.0, seconds=runs[plans.index(plan)][1]),
        planned={"memory": 2, "device": 2, END_TO_END: 2},
    )
    assert [event.seconds_left for event in done] == [5 * 20, 1 + 2 * 20 + 20, 1 + 5 + 20, 5 + 20]
    assert [event.n_done for event in events if isinstance(event, TrialStarted)] == [0, 1, 2, 3]


def test_planned_trials_are_an_upper_bound_here_and_no_more_than_a_small_grid_holds():
    for name, strategy in search.STRATEGIES.items():
        session, _, _ = run(strategy(SPACE))
        planned = search.count_planned(SPACE, name, is_limited=False)
        for kind in (*PROBES, END_TO_END):
            n_rows = sum(row.kind == kind for row in (*session.rows, *session.probes))
            assert n_rows <= planned.get(kind, 0), (name, kind)
    planned = search.count_planned(build_space(batch_size=SIZES), "model_first", is_limited=False)
    assert planned == {"memory": 5, "device": 5, "loader": 4, END_TO_END: 5, REPEAT: 9}


def test_the_users_plan_runs_in_the_rounds_of_the_finalists_and_once_in_each():
    for finalists, kind, asked in (([B, C], "baseline", [B, C, A, A, C, B]), ([A], REPEAT, [A, A])):
        session, target, _ = run(confirm(finalists, baseline=Ask(plan=A, why="own", kind=kind)), answer_by_size)
        assert target.asked == asked
        assert [row.kind for row in session.rows if row.plan == A] == [kind] * 2


def test_the_count_of_planned_trials_follows_the_search_and_is_no_more_than_the_budget_holds():
    wishes = [(BASE, END_TO_END), (BASE, "device"), (BASE.replace(batch_size=16), END_TO_END), (BASE, REPEAT)]
    asked = (Ask(plan=plan, why="", kind=kind) for plan, kind in wishes)
    done, _, _ = run_told(asked, answer_by_size, planned={"device": 9, "loader": 9, END_TO_END: 4, REPEAT: 6})
    assert [event.n_planned for event in done] == [28, 28, 2 + 4 - 1 + 6, 3 + 6]
    clock = Clock()
    given = {"budget_s": 10.0, "clock": clock, "planned": {END_TO_END: 40}, "reserve_trials": 0}
    done, _, target = run_told(ask_sizes(), take(clock, 3.0), **given)
    assert [event.n_planned for event in done] == [3, 3, 3]
    assert [event.seconds_left for event in done] == [7.0, 4.0, 1.0]
    assert len(target.asked) == 3
