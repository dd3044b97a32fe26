"""Strategies on a simulated target: what they run, in which order, and when they stop."""

from __future__ import annotations

import dataclasses

from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import Facts, default_plan, find_obstacles
from fulltilt.records import PROBES
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.picks.recommend import find_confirmed, merge_repeats, pick
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search import strategies as search
from fulltilt.tuner.search.confirm import confirm
from fulltilt.tuner.search.finals import run_finals
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.progress import TrialDone, TrialStarted
from fulltilt.tuner.search.session import END_TO_END, REPEAT, Ask, Session, Skip

BASE = default_plan({"batch_size": 32})
SIZES = (16, 32, 64, 128, 256)


def build_space(**axes):
    return Space(axes=axes, base=BASE, user_plan=BASE, facts=Facts(device_type="cpu", n_cores_usable=4))


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


def test_exhaustive_has_a_row_for_every_plan_of_the_grid():
    session, _, _ = run(search.exhaustive(SPACE))
    assert [row.plan for row in session.rows] == SPACE.grid()


def test_exhaustive_stops_a_batch_direction_at_its_out_of_memory():
    session, target, _ = run(search.exhaustive(SPACE))
    fp32 = [row for row in session.rows if row.plan["precision"] == "fp32" and row.plan["num_workers"] == 0]
    assert [row.status for row in fp32] == ["ok", "ok", "ok", "out_of_memory", "skipped"]
    assert fp32[-1].reason == "larger than batch 128, which ran out of memory"
    assert fp32[-1].plan not in target.asked


def test_exhaustive_goes_on_after_an_error():
    answers = iter([Answer(status="error"), Answer(status="timeout"), *[Answer(samples_per_s=1.0)] * 3])
    session, _, _ = run(search.exhaustive(build_space(batch_size=SIZES)), lambda plan: next(answers))
    assert [row.status for row in session.rows] == ["error", "timeout", "ok", "ok", "ok"]


def test_coordinate_descent_finds_the_best_plan_with_fewer_trials_than_the_grid():
    session, target, is_complete = run(search.coordinate_descent(SPACE))
    best = max((row for row in session.rows if row.status == "ok"), key=lambda row: row.samples_per_s)
    everything, _, _ = run(search.exhaustive(SPACE))
    truth = max((row for row in everything.rows if row.status == "ok"), key=lambda row: row.samples_per_s)
    assert best.plan == truth.plan
    assert is_complete
    assert len(target.asked) < len(everything.rows) / 2
    assert len(target.asked) == len(set(target.asked))


def test_coordinate_descent_starts_at_the_users_plan_and_says_why_for_each_trial():
    session, _, _ = run(search.coordinate_descent(SPACE))
    assert session.rows[0].plan == BASE
    assert session.rows[0].why == "the user's plan, or the nearest one in the space"
    assert all(row.why for row in session.rows)
    assert any("round 1: num_workers 2" in row.why for row in session.rows)


def test_coordinate_descent_does_not_run_batches_above_an_out_of_memory():
    session, _, _ = run(search.coordinate_descent(SPACE))
    first = [row for row in session.rows if row.plan.replace(batch_size=1) == BASE.replace(batch_size=1)]
    assert {row.plan["batch_size"]: row.status for row in first}[256] == "skipped"


def test_coordinate_descent_finds_the_larger_batch_that_a_later_lever_makes_room_for():
    session, _, _ = run(search.coordinate_descent(SPACE))
    best = max((row for row in session.rows if row.status == "ok"), key=lambda row: row.samples_per_s)
    assert best.plan["batch_size"] == 128
    assert best.plan["precision"] == "bf16"


def test_coordinate_descent_survives_a_start_that_does_not_run():
    def answer(plan):
        return Answer(status="error") if plan["batch_size"] == 32 else answer_like_a_machine(plan)

    session, _, _ = run(search.coordinate_descent(SPACE), answer)
    assert any(row.status == "ok" for row in session.rows)


def test_coordinate_descent_runs_no_lever_without_the_one_it_needs():
    """With no workers there is nothing to prefetch: such plans ran, and ended as errors."""

    def answer(plan):
        return Answer(samples_per_s=100.0 + 10 * plan["num_workers"] + (plan["prefetch_factor"] or 0))

    space = build_space(prefetch_factor=(None, 4), persistent_workers=(False, True), num_workers=(0, 2))
    session, target, _ = run(search.coordinate_descent(space), answer)
    assert not [plan for plan in target.asked if find_obstacles(plan, space.facts)]
    reasons = {row.reason for row in session.rows if row.status == "skipped"}
    assert any("prefetch_factor=4: there are no data workers to prefetch" in reason for reason in reasons)
    best = max((row for row in session.rows if row.status == "ok"), key=lambda row: row.samples_per_s)
    assert (best.plan["num_workers"], best.plan["prefetch_factor"]) == (2, 4)


def test_coordinate_descent_keeps_the_effective_batch():
    base = default_plan({"batch_size": 64, "accumulate": 4})
    space = Space(
        axes={"batch_size": (64, 128, 256)}, base=base, user_plan=base, facts=Facts(device_type="cpu"),
        effective_batch_size=256,
    )  # fmt: skip
    session, _, _ = run(search.coordinate_descent(space), lambda plan: Answer(samples_per_s=plan["batch_size"]))
    assert {row.plan.effective_batch_size for row in session.rows} == {256}


def test_a_search_ends_on_noise_that_never_settles():
    rates = iter(range(1, 10_000))
    _, target, is_complete = run(
        search.coordinate_descent(build_space(batch_size=SIZES, num_workers=(0, 1, 2, 4))),
        lambda plan: Answer(samples_per_s=float(next(rates))),
    )
    assert is_complete
    assert len(target.asked) <= 20


def test_impossible_values_are_rows():
    space = Space(
        axes={}, base=BASE, user_plan=BASE, facts=Facts(device_type="cpu"),
        skipped=((BASE.replace(pin_memory=True), "pin_memory=True: no accelerator"),),
    )  # fmt: skip
    session, target, _ = run(search.skip_impossible(space))
    assert [(row.status, row.reason) for row in session.rows] == [("skipped", "pin_memory=True: no accelerator")]
    assert not target.asked


def test_finalists_are_measured_again_interleaved_and_in_reverse():
    a, b = BASE, BASE.replace(batch_size=64)
    session, target, _ = run(confirm([a, b]), lambda plan: Answer(samples_per_s=1.0, spread_pct=5.0))
    assert target.asked == [a, b, b, a, a, b]
    assert {row.kind for row in session.rows} == {REPEAT}


def test_rounds_end_when_the_gap_is_clear():
    a, b = BASE, BASE.replace(batch_size=64)
    _, target, _ = run(confirm([a, b]), lambda plan: Answer(samples_per_s=float(plan["batch_size"])))
    assert target.asked == [a, b, b, a]


def test_rounds_go_on_while_blocks_of_a_run_differ_more_than_the_gap():
    a, b = BASE, BASE.replace(batch_size=64)
    rate = {a: 100.0, b: 110.0}
    _, target, _ = run(confirm([a, b]), lambda plan: Answer(samples_per_s=rate[plan], spread_pct=20.0))
    assert len(target.asked) == 6


def test_a_plan_that_is_clearly_slower_leaves_after_two_rounds():
    a, b, c = BASE, BASE.replace(batch_size=64), BASE.replace(batch_size=128)
    rate = {a: 100.0, b: 102.0, c: 50.0}
    _, target, _ = run(confirm([a, b, c]), lambda plan: Answer(samples_per_s=rate[plan], spread_pct=6.0))
    assert target.asked == [a, b, c, c, b, a, a, b]


def test_a_finalist_that_fails_when_run_again_ends_no_rounds():
    a, b = BASE, BASE.replace(batch_size=64)
    c = BASE.replace(batch_size=128)
    seen = []

    def answer(plan):
        seen.append(plan)
        if plan == c and seen.count(c) > 1:
            return Answer(status="out_of_memory")
        return Answer(samples_per_s={a: 100.0, b: 101.0, c: 900.0}[plan], spread_pct=8.0)

    run(confirm([a, b, c]), answer)
    assert seen == [a, b, c, c, b, a, a, b]


def test_repeats_of_another_comparison_are_no_answer(tmp_path):
    """A search that was started again with another finalist once judged today's runs against yesterday's."""

    def confirm_in_folder(plans, target):
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
            session = Session(target, Journal(folder))
            session.run(confirm(plans))
            session.adopt_rest()
            return session

    a, b, c = BASE, BASE.replace(batch_size=64), BASE.replace(batch_size=128)
    yesterday = SimulatedTarget(lambda plan: Answer(samples_per_s=200.0 + plan["batch_size"], spread_pct=0.1))
    confirm_in_folder([a, b], yesterday)
    again = SimulatedTarget(lambda plan: Answer(samples_per_s=200.0))
    confirm_in_folder([a, b], again)
    assert again.asked == []
    today = SimulatedTarget(lambda plan: Answer(samples_per_s=100.0 + plan["batch_size"], spread_pct=0.1))
    session = confirm_in_folder([b, c], today)
    assert set(today.asked) == {b, c}
    table, _ = merge_repeats(session.rows)
    assert {row.plan: row.samples_per_s for row in find_confirmed(table)} == {b: 164.0, c: 228.0}


def test_a_round_that_was_broken_off_is_begun_anew(tmp_path):
    """A search was killed in its last round; the run that was left, made minutes later, decided the pick alone."""
    a, b = BASE, BASE.replace(batch_size=64)

    def confirm_in_folder(rate):
        target = SimulatedTarget(lambda plan: Answer(samples_per_s=rate, spread_pct=0.1))
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
            journal = Journal(folder)
            session = Session(target, journal)
            session.run(confirm([a, b]))
            session.adopt_rest()
        return target.asked, [(row.plan, row.round, row.samples_per_s) for row in session.rows], journal.notes

    asked, rows, notes = confirm_in_folder(100.0)
    assert notes == []
    assert (asked, [row[1] for row in rows]) == ([a, b, b, a], [1, 1, 2, 2])
    file = tmp_path / "trials.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    for expected in ([b, a], []):  # begun anew, and then recorded whole
        asked, rows, notes = confirm_in_folder(101.0)
        assert notes == ["t3: of a round that was broken off, set aside: a round counts only whole"]
        assert asked == expected
        assert rows == [(a, 1, 100.0), (b, 1, 100.0), (b, 3, 101.0), (a, 3, 101.0)]


def test_a_tie_that_costs_nothing_ends_the_rounds_early():
    a, b = BASE, BASE.replace(batch_size=64)
    rates = {a: 100.0, b: 98.5}
    _, target, _ = run(confirm([a, b]), lambda plan: Answer(samples_per_s=rates[plan], spread_pct=0.1))
    assert len(target.asked) == 4


def test_the_budget_ends_a_search_and_keeps_time_for_the_finalists():
    now = [0.0]

    def answer(plan):
        now[0] += 10.0
        return Answer(samples_per_s=1.0, seconds=10.0)

    session, target, is_complete = run(
        search.exhaustive(SPACE), answer, budget_s=100.0, reserve_trials=4, clock=lambda: now[0]
    )
    assert not is_complete
    assert session.is_budget_spent
    assert len(target.asked) == 7  # 30 s, and not the 40 s of four trials, are kept back
    assert not session.run(confirm([BASE, BASE.replace(batch_size=64)]), may_use_reserve=True)
    assert now[0] == 90.0  # one round of two; 10 s are left, and half a round would compare nothing


def test_probes_leave_time_for_the_first_whole_run():
    """Without one there is nothing to say: a budget once went into probes, and the first whole run came on top."""
    now = [0.0]

    def answer(plan):
        now[0] += 10.0
        return Answer(samples_per_s=1.0, seconds=10.0)

    def strategy():
        for size in SIZES:
            yield Ask(plan=BASE.replace(batch_size=size), why="", kind="device")
        yield Ask(plan=BASE, why="")

    session, target, is_complete = run(strategy(), answer, budget_s=40.0, reserve_trials=0, clock=lambda: now[0])
    assert (len(target.asked), is_complete) == (3, False)
    session.run(search.run_nearest(SPACE))
    assert [row.kind for row in session.rows] == [END_TO_END]
    assert now[0] == 40.0


def test_nothing_is_begun_when_the_budget_is_gone():
    session, target, _ = run(search.exhaustive(SPACE), budget_s=20.0, start_s=0.0, clock=lambda: 20.0)
    assert (target.asked, session.rows, session.is_budget_spent) == ([], [], True)


def test_a_trial_that_the_budget_breaks_off_is_no_row_and_runs_again_with_more_of_it(tmp_path):
    """It was a row with status timeout: a finalist whose second run came too late counted as a plan that fails."""
    now = [0.0]

    def answer(plan):
        is_late = now[0] + 10.0 > 25.0
        now[0] = min(now[0] + 10.0, 25.0)
        return Answer(status="timeout", seconds=5.0) if is_late else Answer(samples_per_s=1.0, seconds=1.0)

    def strategy():
        for size in SIZES:
            yield Ask(plan=BASE.replace(batch_size=size), why="")

    def search_in_folder(budget_s):
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
            session = Session(SimulatedTarget(answer), Journal(folder), budget_s=budget_s, clock=lambda: now[0])
            session.run(strategy(), may_use_reserve=True)
            return session

    first = search_in_folder(25.0)
    assert [row.status for row in first.rows] == ["ok", "ok"]
    assert (first.cut.plan["batch_size"], first.is_budget_spent) == (64, True)
    now[0] = -1000.0
    again = search_in_folder(None)
    assert [row.status for row in again.rows] == ["ok"] * 5


def test_a_round_is_begun_only_with_time_for_all_its_plans():
    """A finalist was once measured again alone: the budget ended before the settings as they were had their turn."""
    now = [0.0]

    def answer(plan):
        now[0] += 10.0
        return Answer(samples_per_s=1.0, seconds=10.0)

    session, _, _ = run(search.run_nearest(SPACE), answer, budget_s=25.0, clock=lambda: now[0])
    assert not session.run(confirm([BASE, BASE.replace(batch_size=64)]), may_use_reserve=True)
    assert len(session.rows) == 1


def test_a_repeat_is_expected_to_take_what_its_plan_took_before():
    now, slow = [0.0], BASE.replace(batch_size=256)

    def answer(plan):
        seconds = 30.0 if plan == slow else 1.0
        now[0] += seconds
        return Answer(samples_per_s=1.0, seconds=seconds)

    def strategy():
        for plan in (BASE, BASE.replace(batch_size=64), slow):
            yield Ask(plan=plan, why="")
        yield Ask(plan=slow, why="", kind=REPEAT)

    _, target, is_complete = run(strategy(), answer, budget_s=50.0, reserve_trials=0, clock=lambda: now[0])
    assert (len(target.asked), is_complete) == (3, False)


def test_the_best_row_of_another_strategy_in_the_folder_is_a_finalist(tmp_path):
    """A second search once picked among its own rows only, and recommended a slower plan than was known."""
    fast = BASE.replace(batch_size=64, num_workers=4)
    target = SimulatedTarget(lambda plan: Answer(samples_per_s=900.0 if plan == fast else 100.0))

    def search_in_folder(plans):
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
            session = Session(target, Journal(folder))
            session.run(Ask(plan=plan, why="") for plan in plans)
            session.adopt_rest((END_TO_END,))
            run_finals(session, SPACE, n_finalists=2)
            session.adopt_rest()
            return session

    search_in_folder([BASE, fast])
    session = search_in_folder([BASE, BASE.replace(batch_size=64)])
    table, _ = merge_repeats(session.rows)
    picks = pick(table, user_plan=BASE, memory_limit_gib=None, runs=session.rows)
    assert picks.recommended.trial.plan == fast
    assert picks.recommended.trial.kind == REPEAT


def test_a_skipped_row_is_of_as_many_devices_as_the_others():
    session = Session(SimulatedTarget(lambda plan: Answer()), Journal(), n_devices=4)
    session.run(Skip(plan=BASE.replace(batch_size=size), why="", reason="it cannot apply") for size in (10,))
    assert (session.rows[0].n_devices, session.rows[0].batch_size_per_device) == (4, 3)


def test_rows_on_disk_cost_no_budget_and_are_never_left_out(tmp_path):
    """A search resumed after its budget was spent once reported one row of nine."""

    def search_in_folder(strategy, target, **options):
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
            session = Session(target, Journal(folder), **options)
            session.run(strategy)
            session.adopt_rest()
            return session

    def answer(plan):
        return Answer(samples_per_s=float(plan["batch_size"]), seconds=10.0)

    first = search_in_folder(search.exhaustive(SPACE), SimulatedTarget(answer))
    idle = SimulatedTarget(answer)
    again = search_in_folder(search.exhaustive(SPACE), idle, budget_s=1.0)
    assert idle.asked == []
    assert [row.id for row in again.rows] == [row.id for row in first.rows]
    other = search_in_folder(confirm([BASE]), SimulatedTarget(answer), budget_s=1.0)
    assert {row.id for row in first.rows} <= {row.id for row in other.rows}


def test_the_first_trial_runs_whatever_the_budget():
    session, _, _ = run(search.exhaustive(SPACE), budget_s=0.001, clock=lambda: 5.0)
    assert len(session.rows) == 1


def test_a_plan_asked_twice_is_run_once_and_a_repeat_is_run_again():
    def strategy():
        yield Ask(plan=BASE, why="one")
        yield Ask(plan=BASE, why="two")
        yield Ask(plan=BASE, why="three", kind=REPEAT)

    session, target, _ = run(strategy())
    assert len(target.asked) == 2
    assert [row.id for row in session.rows] == ["t1", "t2"]


def test_a_killed_search_repeats_no_finished_trial(tmp_path):
    class KilledError(Exception):
        pass

    def search_once(limit):
        calls = []

        def count(plan):
            if len(calls) == limit:
                raise KilledError
            calls.append(plan)

        target = SimulatedTarget(answer_like_a_machine, on_call=count)
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
            session = Session(target, Journal(folder))
            try:
                session.run(search.exhaustive(SPACE))
                session.run(confirm([BASE, BASE.replace(batch_size=64)]))
            except KilledError:
                pass
        return session, target

    _, first = search_once(7)
    _, second = search_once(20)
    session, third = search_once(10_000)
    whole, target, _ = run(search.exhaustive(SPACE))
    assert [*first.asked, *second.asked, *third.asked][: len(target.asked)] == target.asked
    n_asked = len(first.asked) + len(second.asked) + len(third.asked)
    assert n_asked == len(target.asked) + 4
    assert [row.plan for row in session.rows[: len(whole.rows)]] == [row.plan for row in whole.rows]
    assert len({row.id for row in session.rows}) == len(session.rows)
    assert session.n_resumed > 0


def test_progress_says_what_is_left():
    events = []
    run(
        search.exhaustive(build_space(batch_size=SIZES)),
        lambda plan: Answer(samples_per_s=1.0, seconds=3.0),
        on_event=events.append,
        planned={END_TO_END: 5},
    )
    started = [event for event in events if isinstance(event, TrialStarted)]
    done = [event for event in events if isinstance(event, TrialDone)]
    assert [event.n_done for event in started] == [0, 1, 2, 3, 4]
    assert [event.seconds_left for event in done] == [12.0, 9.0, 6.0, 3.0, 0.0]


def test_the_time_left_is_what_trials_of_each_kind_take():
    """A mean of all kinds said 20 s where 2 s of estimates were left, and 20 s where 100 s of whole runs were."""
    events, answer = [], SimulatedTarget(lambda plan: Answer(samples_per_s=1.0))
    seconds = {"memory": 1.0, "device": 5.0, END_TO_END: 20.0}
    session = Session(
        lambda plan, **said: dataclasses.replace(answer(plan, **said), seconds=seconds[said["kind"]]),
        Journal(),
        on_event=events.append,
        planned={"memory": 2, "device": 2, END_TO_END: 2},
    )

    def strategy():
        for size, kind in enumerate((END_TO_END, "memory", "device", "memory"), start=1):
            yield Ask(plan=BASE.replace(batch_size=size), why="w", kind=kind)

    session.run(strategy())
    done = [event for event in events if isinstance(event, TrialDone)]
    assert [event.seconds_left for event in done] == [5 * 20, 1 + 2 * 20 + 20, 1 + 5 + 20, 5 + 20]


def test_the_budget_bounds_what_is_left():
    events = []
    run(
        search.exhaustive(build_space(batch_size=SIZES)),
        lambda plan: Answer(samples_per_s=1.0, seconds=1.0 + plan["batch_size"] / 64),
        on_event=events.append,
        planned={END_TO_END: 500},
        budget_s=100.0,
    )
    done = [event for event in events if isinstance(event, TrialDone)]
    assert len(done) >= 3
    assert all(event.seconds_left <= 100.0 for event in done)


def test_a_skipped_row_never_reaches_the_target():
    def strategy():
        trial = yield Skip(plan=BASE, reason="because")
        assert trial.kind == END_TO_END

    session, target, _ = run(strategy())
    assert not target.asked
    assert session.rows[0].null_reasons["samples_per_s"] == "not run"


def test_planned_trials_are_an_upper_bound_here():
    for name, strategy in search.STRATEGIES.items():
        session, _, _ = run(strategy(SPACE))
        planned = search.count_planned(SPACE, name, is_limited=False)
        for kind in (*PROBES, END_TO_END):
            n_rows = sum(row.kind == kind for row in (*session.rows, *session.probes))
            assert n_rows <= planned.get(kind, 0), (name, kind)


def test_the_users_plan_runs_in_the_rounds_of_the_finalists():
    a, b, own = BASE.replace(batch_size=64), BASE.replace(batch_size=128), BASE
    baseline = Ask(plan=own, why="own", kind="baseline")
    session, target, _ = run(confirm([a, b], baseline=baseline), lambda plan: Answer(samples_per_s=1.0))
    assert target.asked == [a, b, own, own, b, a]
    assert [row.kind for row in session.rows if row.plan == own] == ["baseline"] * 2


def test_a_users_plan_that_is_a_finalist_is_not_run_twice_a_round():
    baseline = Ask(plan=BASE, why="own", kind=REPEAT)
    _, target, _ = run(confirm([BASE], baseline=baseline), lambda plan: Answer(samples_per_s=1.0))
    assert target.asked == [BASE, BASE]


def test_the_count_of_planned_trials_follows_the_search():
    """``of about 26 trials`` stood there to the end of a search that ran 11, and 18 for a grid of 5."""
    events = []
    planned = {"device": 9, "loader": 9, END_TO_END: 4, REPEAT: 6}

    def strategy():
        yield Ask(plan=BASE, why="own")
        yield Ask(plan=BASE, why="probe", kind="device")
        yield Ask(plan=BASE.replace(batch_size=16), why="whole")
        yield Ask(plan=BASE, why="again", kind=REPEAT)

    run(strategy(), lambda plan: Answer(samples_per_s=1.0), on_event=events.append, planned=planned)
    done = [event for event in events if isinstance(event, TrialDone)]
    assert [event.n_planned for event in done] == [28, 28, 2 + 4 - 1 + 6, 3 + 6]


def test_the_count_of_planned_trials_is_no_more_than_the_budget_holds():
    now, events = [0.0], []

    def answer(plan):
        now[0] += 3.0
        return Answer(samples_per_s=1.0, seconds=3.0)

    target = SimulatedTarget(answer)
    session = Session(
        target, Journal(), budget_s=10.0, clock=lambda: now[0], on_event=events.append, planned={END_TO_END: 40},
        reserve_trials=0,
    )  # fmt: skip
    session.run(search.exhaustive(build_space(batch_size=SIZES)))
    assert len(target.asked) == 3
    assert [event.n_planned for event in events if isinstance(event, TrialDone)] == [3, 3, 3]


def test_a_small_grid_plans_no_more_whole_runs_than_it_holds():
    planned = search.count_planned(build_space(batch_size=SIZES), "model_first", is_limited=False)
    assert planned == {"memory": 5, "device": 5, "loader": 4, END_TO_END: 5, REPEAT: 9}
