"""What a search says about how far its own figures can be trusted."""

import dataclasses

import pytest
from tests.simulated_target import Answer, Clock, SimulatedTarget
from tests.unit.tuner.tuner_cases import MACHINE, OPTIONS, USER, make_question, make_search, search_to_the_end

from fulltilt.errors import NoPlanError, RunFolderError, UsageError
from fulltilt.levers import Facts
from fulltilt.records.run_folder import RunFolder, append_line
from fulltilt.report.summary import describe_search
from fulltilt.stats import Turns
from fulltilt.tuner import tune
from fulltilt.tuner.answer.conclude import conclude
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search import strategies as search
from fulltilt.tuner.search.budget import compute_budget_s, compute_search_s
from fulltilt.tuner.search.journal import JOURNAL_FILE, Journal
from fulltilt.tuner.search.progress import SearchNoted
from fulltilt.tuner.search.proof import Proof
from fulltilt.tuner.search.search import merge_facts, run_proof, run_strategy
from fulltilt.tuner.search.session import Ask, Session
from fulltilt.tuner.trials.rows import build_turns_row
from fulltilt.tuner.tuning import _open_folder

SPACE = Space(axes={"batch_size": (16, 64)}, base=USER, user_plan=USER, facts=Facts(device_type="cpu"), memory_gib=6.4)
QUICK = dataclasses.replace(OPTIONS, strategy="quick")


def search_all(answer, space=SPACE, options=OPTIONS, *, in_turns=None, way="usual", **session_options):
    session = Session(SimulatedTarget(answer, in_turns=in_turns, way=way), Journal(), **session_options)
    return search_to_the_end(session, space, options)


def run(*given, **more):
    made, proof = search_all(*given, **more)
    return made.session, conclude(made, proof, (), "")


def say_why_not(made, proof):
    """The error of a search in which no plan ran."""
    with pytest.raises(NoPlanError) as ended:
        conclude(made, proof, (), "")
    return ended.value


def find_notes(result, words):
    return [note for note in result.notes if words in note]


def larger_is_faster(plan):
    return 10.0 * plan["batch_size"]


def answer_larger_is_faster(plan):
    return Answer(samples_per_s=larger_is_faster(plan))


def run_in_time(seconds, budget_s, options=OPTIONS):
    """Trials that take ``seconds`` each, on a clock of their own; the larger batch is the faster one."""
    clock = Clock()
    return run(clock.time(larger_is_faster, lambda plan: seconds), options=options, budget_s=budget_s, clock=clock)


def search_in_folder(folder, clock, budget_s, *, prepared_s=0.0):
    """A command that takes up the rows of the folder, each trial of 10 s; it lay there for a while."""
    clock.now_s += 1000.0
    target = SimulatedTarget(clock.time(larger_is_faster, lambda plan: 10.0))
    with RunFolder(folder, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as held:
        start_s = clock() - prepared_s
        session = Session(target, Journal(held), budget_s=budget_s, clock=clock, start_s=start_s)
        made, proof = search_to_the_end(session, SPACE)
        return session, conclude(made, proof, (), ""), target


def test_finalists_and_the_users_plan_take_turns_and_are_counted():
    session, result = run(answer_larger_is_faster)
    assert [row.plan["batch_size"] for row in session.rows] == [32, 16, 64], "the user's own plan first"
    assert {row.plan["batch_size"] for row in session.turns} == {64, 32}
    assert [row.group for row in session.turns] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert (result.notes, result.baseline.samples_per_s) == ((), 320.0)
    assert result.repeats == tuple(session.turns)
    summary = result.search
    counted = (summary.n_trials, summary.grid_size, summary.n_end_to_end, summary.n_repeats, summary.n_off_grid)
    assert counted == (3, 2, 3, 8, 1), "the user's own plan is a row too, and not of this grid"
    assert (summary.n_groups, summary.stalled_pct, summary.takes_turns) == (4, 0.0, True)
    chosen = result.picks.recommended
    assert (chosen.trial.plan["batch_size"], chosen.proven, chosen.gain.n_groups) == (64, True, 4)
    assert result.savings.verdict == "faster"
    assert describe_search({"search": dataclasses.asdict(summary)}).startswith("exhaustive: ")


def test_of_plans_that_are_alike_the_settings_as_they_were_stay_and_the_learning_rate_is_that_of_the_other():
    _, result = run(lambda plan: Answer(samples_per_s=100.0))
    assert result.picks.recommended.trial.plan == USER
    assert result.picks.unproven.trial.plan["batch_size"] in (16, 64)
    assert result.savings.verdict == "equal"
    assert result.picks.unproven.trial.id == result.savings.recommended_id
    assert result.levers == ()


def test_a_folder_of_another_search_is_refused_in_the_words_of_the_command_line(tmp_path):
    def open_folder(options, batch_size):
        parts = make_question(options, task="some:thing", data={"batch_size": batch_size}).list_fingerprint_parts()
        return RunFolder(tmp_path, fingerprint_parts=parts, command="tune", results=["trials.jsonl"])

    quick = dataclasses.replace(OPTIONS, batch_sizes=None, strategy="quick", memory_limit_bytes=2**20)
    with open_folder(OPTIONS, 64) as folder:
        append_line(folder.path / "trials.jsonl", "{}")
    open_folder(dataclasses.replace(OPTIONS, strategy="model_first", budget_s=3.0), 64).close()
    with pytest.raises(RunFolderError) as refused:
        open_folder(quick, 32)
    said = "--batch-sizes 16 64 → not given, --memory-limit not given → 1 MiB = 1,048,576 bytes, --quick"
    assert f"changed: {said}" in str(refused.value)
    assert "data.batch_size 64 → 32" in str(refused.value)


def test_a_finalist_that_fails_in_turns_gives_way_to_one_that_does_not():
    failed = Answer(status="out_of_memory", reason="no room")
    session, result = run(
        answer_larger_is_faster,
        in_turns=lambda plan: failed if plan["batch_size"] == 64 else answer_larger_is_faster(plan),
    )
    assert result.picks.recommended.trial.plan == USER
    rows = {row.plan["batch_size"]: row for row in result.trials}
    assert (rows[64].status, rows[64].kind, rows[64].reason) == ("out_of_memory", "repeat", "no room")
    assert result.search.n_out_of_memory == 1
    assert [row.status for row in session.rows] == ["ok"] * 3


def test_a_recommendation_without_turns_or_another_plan_says_so():
    session, result = run_in_time(10.0, 15.0)
    assert [row.plan["batch_size"] for row in session.rows] == [32]
    assert find_notes(result, "t1 is the only plan that ran to its end")
    assert (result.search.n_groups, result.search.stalled_pct) == (0, None)
    assert result.null_reasons["search.stalled_pct"] == "no plans took turns"
    _, result = run(lambda plan: Answer(status="error") if plan == USER else answer_larger_is_faster(plan))
    assert "nothing says what it gains" in result.picks.recommended.rule
    assert result.savings is None
    assert "ended with error" in result.null_reasons["savings"]


def test_settings_off_the_list_stay_only_with_the_reason():
    rates = {16: 100.0, 32: 900.0, 64: 300.0}
    _, result = run(lambda plan: Answer(samples_per_s=rates[plan["batch_size"]]))
    assert result.picks.recommended.trial.plan == USER
    said = "the settings as they were stay, with batch_size 32, which is not among 16, 64: none of these proved faster"
    assert find_notes(result, said)
    assert not find_notes(run(answer_larger_is_faster)[1], "not among")
    # where they cannot apply a row says why, and others run
    own, facts = USER.replace(batch_size=512), Facts(device_type="cpu", n_samples=100)
    space = dataclasses.replace(SPACE, user_plan=own, base=own, facts=facts)
    session, result = run(answer_larger_is_faster, space)
    assert result.baseline.status == "skipped"
    assert "batch_size=512" in result.baseline.reason
    assert {row.plan["batch_size"] for row in session.rows if row.status == "ok"} == {16, 64}


def test_a_budget_gone_before_the_first_run_blames_the_budget_and_no_lever():
    space = dataclasses.replace(SPACE, skipped=((USER.replace(pin_memory=True), "pin_memory=True: only for a GPU"),))
    said = str(say_why_not(*search_all(answer_larger_is_faster, space, budget_s=5.0, start_s=0.0, clock=lambda: 5.0)))
    assert "the budget was gone before the first run" in said
    assert ("larger --budget" in said, "pin_memory" in said) == (True, False)


def test_a_quick_search_is_model_first_and_ends_with_the_pick_and_the_users_plan_in_turns():
    session, result = run(answer_larger_is_faster, options=QUICK)
    assert {row.kind for row in session.probes} >= {"device", "loader"}
    assert {row.plan["batch_size"] for row in session.turns} >= {64, 32}
    assert result.search.strategy == "model_first"
    assert result.picks.recommended.proven
    session, _ = run_in_time(3.0, 60.0, QUICK)
    assert len(session.turns) >= 8, "time is kept for the last stage"
    assert session.elapsed_s <= 60.0


@pytest.mark.parametrize(("budget_s", "search_s"), [(20.0, 18.0), (80.0, 72.0), (200.0, 192.0)])
def test_a_part_of_the_budget_is_kept_for_the_roofs_and_counts_in_what_is_advised(budget_s, search_s):
    assert compute_search_s(budget_s) == search_s
    assert compute_budget_s(search_s) == pytest.approx(budget_s)


@pytest.mark.parametrize(
    ("budget_s", "expected"),
    [
        (80.0, [([32, 16, 64], 2), ([], 2), ([], 0)]),
        (25.0, [([32, 16], 0), ([64], 0), ([], 1), ([], 1), ([], 1), ([], 1), ([], 0)]),
    ],
)
def test_the_same_command_with_the_same_budget_goes_on_where_it_was_ended(tmp_path, budget_s, expected):
    clock, n_found = Clock(), 0
    for number, (sizes, n_groups) in enumerate(expected, start=1):
        session, result, target = search_in_folder(tmp_path, clock, budget_s)
        summary, n_new = result.search, len(sizes) + 2 * n_groups
        assert [plan["batch_size"] for plan in target.asked] == sizes
        assert [{plan["batch_size"] for plan in group} for group in target.groups] == [{64, 32}] * n_groups
        assert session.elapsed_s <= budget_s
        assert (summary.seconds, summary.earlier_s) == (10.0 * n_new, 10.0 * n_found)
        if result.savings is not None:  # rows found in the folder cost this command nothing; they did cost time
            assert result.savings.search_s == summary.seconds + summary.earlier_s
        assert (summary.n_resumed, summary.n_end_to_end + summary.n_repeats) == (n_found, n_found + n_new)
        assert summary.stopped_by_budget == (number < len(expected) - 1)
        n_found += n_new
    assert result.picks.recommended.proven


@pytest.mark.parametrize("strategy", search.STRATEGIES)
def test_the_users_own_plan_is_the_first_whole_run_of_every_search_that_may_end_early(strategy):
    options = dataclasses.replace(OPTIONS, strategy=strategy)
    first = run_in_time(10.0, 1000.0, options)[0].rows[0]
    assert (first.plan, first.kind, first.id) == (USER, "end_to_end", "t1")
    picked = run_in_time(10.0, 15.0, options)[1].picks.recommended.trial
    assert picked.plan == USER, "a budget that holds one run ends there"


def test_a_search_that_the_budget_ended_says_how_much_is_untried():
    """The user's own plan, which is no point of this grid, is not counted as one that was run."""
    for budget_s, n_untried in ((12.0, 2), (35.0, 1)):
        said = f"the budget ended the search: {n_untried} plans of the grid were not run"
        [note] = find_notes(run_in_time(10.0, budget_s)[1], said)
        assert "the same command goes on from these rows" in note


@pytest.mark.parametrize("has_interval", [True, False])
def test_a_reason_stands_beside_a_missing_interval_of_the_epoch_and_only_there(has_interval):
    target = SimulatedTarget(answer_larger_is_faster)
    notes = ["batch_size=32: try 64", "num_workers=0: read in the training process"]
    space = dataclasses.replace(SPACE, facts=Facts(device_type="cpu", n_samples=1280))
    made = make_search(Session(target, Journal()), space, workload={"name": "digits", "notes": notes})
    run_strategy(made)
    if has_interval:
        proof = run_proof(made.session, space)
    else:
        made.session.rows[:] = [dataclasses.replace(row, samples_per_s_ci95=None) for row in made.session.rows]
        proof = Proof(space, (), [USER.replace(batch_size=64)], limit_s=0.0)
    result = conclude(made, proof, (), "")
    assert result.epoch_seconds.estimate == pytest.approx(2.0 if has_interval else 4.0)
    assert (result.epoch_seconds.ci95 is not None) == has_interval
    assert ("epoch_seconds.ci95" in result.null_reasons) == (not has_interval)
    assert notes[1] in result.notes
    assert notes[0] not in result.notes, "the search has varied it"


def test_ranks_share_the_machines_memory_once():
    two = dataclasses.replace(OPTIONS, rank_devices=("cpu", "cpu"))
    for found_gib, left_gib in ((3, 3), (50, 10)):  # 20 GiB are free
        facts = merge_facts(Facts(device_type="cpu", free_ram_bytes=found_gib * 2**30), MACHINE, two)
        assert facts.free_ram_bytes == left_gib * 2**30


def test_a_command_whose_budget_holds_no_further_run_says_so_with_the_budget_that_would(tmp_path):
    clock = Clock()

    def search(budget_s):  # 2 s go into reading the facts
        session, result, _ = search_in_folder(tmp_path, clock, budget_s, prepared_s=2.0)
        [note] = find_notes(result, "the budget ended the search: ")
        return session.n_run, note.partition("; ")[2]

    advice = "the next run takes about 10.0 s and {} s of the budget were left; give at least --budget 15s"
    # The first whole run begins while any time is left.
    assert search(11.0) == (1, "the same command would come no further: " + advice.format("0.0"))
    assert search(11.0) == (0, "nothing further was begun: " + advice.format("9.0"))
    assert search(compute_search_s(15.0))[0] == 1
    n_run, said = search(40.0)
    assert n_run > 0
    assert said == "the same command goes on from these rows"


def test_a_run_that_the_budget_broke_off_is_promised_to_nobody_and_those_that_failed_before_are_counted():
    clock = Clock()

    def take(seconds, **ended):
        clock.now_s += seconds
        return Answer(seconds=seconds, **ended)

    def answer(plan):
        return take(5.0, samples_per_s=1.0) if plan == USER else take(25.0, status="timeout")

    session, result = run(answer, budget_s=20.0, clock=clock)
    assert session.cut is not None
    [said] = find_notes(result, "the budget ended the search")
    assert "the run that was ended takes more than 25.0 s and 15.0 s of the budget were left" in said
    assert "goes on" not in said
    failed = {"status": "error", "reason": "OSError: disk sector unreadable"}
    ended = str(say_why_not(*search_all(lambda plan: take(10.0, **failed), budget_s=15.0, clock=clock)))
    said = "1 plan of 2 was tried before the budget ended, and it failed: error, t1: OSError: disk sector unreadable"
    assert said in ended
    assert "--budget" in ended


DEFAULT_TIME = dataclasses.replace(OPTIONS, budget_s=180.0, is_budget_default=True)
MANY = dataclasses.replace(SPACE, axes={"batch_size": (16, 64), "num_workers": tuple(range(20))})
BATCHES = (2, 4, 8, 16, 32, 64)
WIDE = dataclasses.replace(SPACE, axes={"batch_size": BATCHES})


@pytest.mark.parametrize("strategy", search.STRATEGIES)
@pytest.mark.parametrize("budget_s", [None, 1000.0])
def test_a_search_stops_after_two_plans_that_fail_alike_where_one_is_the_users_own(strategy, budget_s):
    """A data set that raises was met by about twelve plans before the search said so."""
    made, proof = search_all(
        lambda plan: Answer(
            status="error",
            reason="DataError: sample {0} cut by step {0}, target is {0}; copy it again (log: {0}.log)".format(
                plan["batch_size"]
            ),
        ),
        WIDE, dataclasses.replace(OPTIONS, strategy=strategy), budget_s=budget_s,
    )  # fmt: skip
    assert len(made.session.rows) == len({row.plan for row in made.session.common_error}) == 2
    assert made.session.rows[0].plan == USER
    ended = say_why_not(made, proof)
    assert "2 different plans failed with the same error and none ran" in str(ended)
    assert ("DataError: sample 32 cut" in str(ended), ended.remedy) == (True, "copy it again")


def test_where_the_users_own_plan_fails_a_plain_one_tells_whether_a_lever_is_at_fault():
    """A lever of the user's that cannot run must not end the search: others are tried, without it and with it."""
    own = USER.replace(compile=True, num_workers=2)
    space = dataclasses.replace(
        WIDE, base=own, user_plan=own, axes={"batch_size": (16, 32), "compile": (False, True), "num_workers": (0, 2)}
    )
    failed = Answer(status="error", reason="RuntimeError: no compiler")
    session, result = run(lambda plan: failed if plan["compile"] else answer_larger_is_faster(plan), space)
    assert [row.plan for row in session.rows[:2]] == [own, USER]
    assert (session.rows[1].why, session.common_error) == (
        "the settings as they were failed: with plain ones, as far as the search may",
        (),
    )
    assert {row.plan["compile"] for row in session.rows} == {False, True}
    assert not result.picks.recommended.trial.plan["compile"]


@pytest.mark.parametrize("status", ["error", "out_of_memory", "timeout"])
def test_other_failures_do_not_stop_a_search(status):
    """Each plan with words of its own, too little memory, a deadline: the next plan may run."""

    def answer(plan):
        if plan["batch_size"] == 2:
            return Answer(samples_per_s=1.0)
        return Answer(status=status, reason=f"no {plan['batch_size']}" if status == "error" else "no")

    space = dataclasses.replace(WIDE, axes={"batch_size": BATCHES[::-1]})
    made, _ = search_all(answer, space, dataclasses.replace(OPTIONS, strategy="coordinate_descent"))
    assert any(row.status == "ok" for row in made.session.rows)


def test_the_settings_as_they_were_let_a_search_go_on():
    """Three plans of a grid may share a fault that the user's own does not have."""
    failed = Answer(status="error", reason="ValueError: too few samples for the norm")
    session, result = run(lambda plan: failed if plan["batch_size"] < 16 else answer_larger_is_faster(plan), WIDE)
    assert {row.plan["batch_size"] for row in session.rows} == set(BATCHES)
    assert result.picks.recommended.trial.plan["batch_size"] == 64


def test_what_disturbed_the_turns_is_in_the_summary_and_told_once():
    """The screen says it from 5 % of stalls on, and a note said it in other words from more than 5 % on."""
    _, result = run(
        answer_larger_is_faster, in_turns=lambda plan: Answer(samples_per_s=1.0, stalled_pct=20.0), way="whole"
    )
    assert (result.search.stalled_pct, result.search.takes_turns) == (pytest.approx(20.0), False)
    assert not find_notes(result, "busy")
    assert not find_notes(result, "same time")


@pytest.mark.parametrize("way", ["usual", "passive", "pinned", "whole"])
def test_how_plans_took_turns_is_told_of_the_rows(way):
    _, result = run(answer_larger_is_faster, way=way)
    assert (result.search.takes_turns, result.search.waits_passively) == (way != "whole", way in ("passive", "pinned"))


def test_a_search_that_goes_on_measures_as_its_earlier_groups_were(tmp_path, monkeypatch):
    def hold(folder, **_):
        turns = Turns(samples_per_s=1.0, stalled_pct=0.0, way="passive")
        row = build_turns_row(USER, turns, id="t1", why="", seconds=1.0)
        journal = Journal()
        journal.append(dataclasses.replace(row, group=1))
        return journal

    def note(target, plan):
        seen.append(target.runner)
        raise KeyboardInterrupt

    seen = []
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.tuner.search.search.Journal", hold)
    monkeypatch.setattr("fulltilt.tuner.trials.target.ProcessTarget.read_facts", note)
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "a.yaml", device="cpu", out=tmp_path / "out")
    assert seen[0].waits_passively


@pytest.mark.parametrize("asked", [None, "3GiB"])
def test_a_limit_that_is_what_happens_to_be_free_is_told_from_one_that_was_asked_for(tmp_path, monkeypatch, asked):
    def end(folder, *, passing_limit_bytes):
        told.append(passing_limit_bytes)
        raise KeyboardInterrupt

    told = []
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.tuner.search.search.Journal", end)
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "a.yaml", device="cpu", out=tmp_path / "out", memory_limit=asked)
    assert bool(told[0]) == (asked is None)


def test_results_that_are_set_aside_are_told_even_where_the_search_ends_without_its_own(tmp_path, monkeypatch):
    def end(folder, **_):
        append_line(folder.path / JOURNAL_FILE, "{}")
        raise KeyboardInterrupt

    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.tuner.search.search.Journal", end)
    events = []
    for n_bytes in (2, 3):
        stamp = {"n_bytes": n_bytes}
        monkeypatch.setattr("fulltilt.tuner.question.question.stamp_data", lambda config, stamp=stamp: stamp)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "a.yaml", device="cpu", out=tmp_path / "out", on_event=events.append)
    said = "earlier results are set aside as trials-1.jsonl (changed: files of the data.n_bytes 2 → 3)"
    assert events == [SearchNoted(message=said)]


@pytest.mark.parametrize(
    ("run_s", "budget_s", "said"),
    [
        (6.0, 180.0, []),
        (
            60.0,
            1500.0,
            ["a run takes 1 min 00 s: the search takes at most 25 min 00 s, not 3 min 00 s; --budget sets it"],
        ),
    ],
)
def test_without_a_budget_a_search_keeps_to_three_minutes_or_to_24_more_runs(run_s, budget_s, said):
    clock, told = Clock(), []

    def rate(plan):
        return plan["batch_size"] / (2 + plan["num_workers"])

    session, result = run(
        clock.time(rate, lambda plan: run_s), MANY, DEFAULT_TIME,
        in_turns=clock.time(rate, lambda plan: run_s / 3), clock=clock, on_event=told.append,
    )  # fmt: skip
    assert clock() <= compute_search_s(budget_s) == session.budget_s
    assert session.is_budget_spent, "the grid would have taken longer"
    assert result.picks.recommended.proven, "time is kept for the turns"
    assert [event.message for event in told if isinstance(event, SearchNoted)] == said


def test_a_search_that_probed_for_too_long_compares_the_first_plan_that_it_runs(monkeypatch):
    clock, plans = Clock(), [USER.replace(batch_size=batch_size) for batch_size in range(2, 32)]

    def probe_and_run(space):
        for plan in plans[:20]:
            yield Ask(plan=plan, kind="loader", why="")
        for plan in plans[20:]:
            yield Ask(plan=plan, why="")

    def rate(plan):
        return 10.0 if plan == USER else 1000.0

    monkeypatch.setitem(search.STRATEGIES, OPTIONS.strategy, probe_and_run)
    seconds = clock.time(rate, lambda plan: 2.0)
    session, result = run(seconds, in_turns=clock.time(rate, lambda plan: 0.5), budget_s=60.0, clock=clock)
    assert result.picks.recommended.proven
    assert result.picks.recommended.trial.plan == plans[20]
    assert session.is_budget_spent, "nine plans were not run"


def test_another_question_gets_a_folder_of_its_own_and_the_same_one_goes_on_in_its(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []

    def open_folder(n_steps, out=None):
        question = make_question(dataclasses.replace(OPTIONS, n_steps=n_steps), task="some:thing")
        with _open_folder(question, out, lambda event: said.append(event.message)) as folder:
            append_line(folder.path / JOURNAL_FILE, "{}")
            return str(folder.path), folder.is_resumed

    assert open_folder(4) == ("runs/tune/x", False)
    assert open_folder(5) == ("runs/tune/x-2", False)
    assert open_folder(6) == ("runs/tune/x-3", False)
    assert open_folder(5) == ("runs/tune/x-2", True)
    assert open_folder(4) == ("runs/tune/x", True)
    assert said[0] == "runs/tune/x holds another run (changed: --steps 4 → 5): this one is in runs/tune/x-2"
    assert len(said) == 3
    monkeypatch.setattr("fulltilt.tuner.tuning.check_workload", lambda question: None)
    with pytest.raises(RunFolderError, match="holds the results of another run"):
        open_folder(7, tmp_path / "runs" / "tune" / "x")


def test_settings_that_are_no_mapping_are_refused():
    with pytest.raises(UsageError, match=r"settings \['a'\] is no mapping; give keys and values"):
        tune("nowhere:nothing", settings=["a"])
