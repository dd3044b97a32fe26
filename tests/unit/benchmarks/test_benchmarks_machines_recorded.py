"""Recording a grid and answering a search from the recording; the machine recorded is a simulated one."""

from __future__ import annotations

import dataclasses
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks import _record_grid
from benchmarks._machines import SimulatedMachine
from benchmarks._machines_recorded import (
    VERSION,
    GridRecording,
    RecordedMachine,
    find_part,
    read_recordings,
)
from benchmarks._machines_score import find_recorded_truths, run_search
from benchmarks._record_grid import list_parts, run_recording
from benchmarks.search_replay import score_recording

from fulltilt.hardware import read_machine
from fulltilt.records import IN_TURNS, PROBES, WHOLE_RUN
from fulltilt.tuner.search import strategies as search
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.session import Session

N_REPEATS, N_GROUPS = 3, 4


def build_small_space(machine):
    space = machine.space(336)
    sizes = tuple(sorted({1, space.user_plan["batch_size"], 64, 8192}))
    return dataclasses.replace(space, axes={**space.axes, "batch_size": sizes, "num_workers": (0, 2, 4)})


@pytest.fixture(scope="module")
def recorded():
    """A transformer on a card that batch 8,192 does not fit, nor 64 in fp32."""
    machine = SimulatedMachine(8)
    space = build_small_space(machine)
    rows = run_recording(Session(machine, Journal()), space, n_repeats=N_REPEATS, n_groups=N_GROUPS)
    return GridRecording(
        version=VERSION, name="simulated", device="cuda", command="…", date="2026-01-31", workload={"name": "vit"},
        machine=read_machine(), versions={}, axes=dict(space.axes), base=space.base, user_plan=space.user_plan,
        effective_batch_size=None, facts=space.facts, memory_gib=machine.memory_gib, n_repeats=N_REPEATS, seconds=1.0,
        rows=tuple(rows),
    )  # fmt: skip


def test_every_plan_that_fits_was_run_as_often_as_asked_and_the_others_have_a_row(recorded):
    grid = recorded.build_space().grid()
    runs = {plan: [row for row in recorded.rows if row.plan == plan and row.kind == WHOLE_RUN] for plan in grid}
    assert {len(rows) for rows in runs.values() if rows[0].status == "ok"} == {N_REPEATS}
    assert {rows[0].status for rows in runs.values()} == {"ok", "out_of_memory", "skipped"}
    assert all(len(rows) == 1 for rows in runs.values() if rows[0].status != "ok")
    repeats = [row.plan for row in recorded.rows if row.why.startswith("round")]
    half = len(repeats) // 2
    assert repeats[:half] == repeats[half:][::-1], "rounds turn around"


def test_every_part_was_run_once(recorded):
    space = recorded.build_space()
    for kind in PROBES:
        rows = [row for row in recorded.rows if row.kind == kind]
        assert len({row.plan for row in rows}) == len(rows)
    wanted = {(wish.kind, wish.plan) for wish in list_parts(space)}
    found = {(row.kind, row.plan) for row in recorded.rows if row.kind in PROBES}
    assert found <= wanted
    assert {(kind, plan["batch_size"], plan["precision"]) for kind, plan in wanted - found} == {
        ("device", 8192, "fp32")
    }


def test_what_did_not_fit_is_out_of_memory_also_where_it_was_not_run(recorded):
    machine = RecordedMachine(recorded)
    row = machine(recorded.user_plan.replace(batch_size=8192, precision="fp32"), id="t1", why="w", kind="device")
    assert (row.status, row.kind) == ("out_of_memory", "device")
    assert "smaller batch" in row.reason
    skipped = next(row.plan for row in recorded.rows if row.status == "skipped")
    row = machine(skipped, id="t1", why="w")
    assert row.status == "out_of_memory"
    assert row.null_reasons["samples_per_s"] == "the trial ended with out_of_memory"
    off_grid = recorded.user_plan.replace(batch_size=7)
    assert machine(off_grid, id="t1", why="w").status == "error"
    (failed,) = machine.run_group({"t1": recorded.user_plan, "t2": off_grid}, why="w")
    assert (failed.id, failed.plan, failed.status) == ("t2", off_grid, "error")
    holes = dataclasses.replace(recorded, rows=tuple(row for row in recorded.rows if row.plan != recorded.user_plan))
    with pytest.raises(KeyError, match="holds no run of"):
        RecordedMachine(holes)(recorded.user_plan, id="t1", why="w")
    with pytest.raises(KeyError, match="no loader probe"):
        machine(recorded.user_plan.replace(batch_size=7), id="t1", why="w", kind="loader")


def test_a_recording_comes_back_from_its_file_as_it_was(recorded, tmp_path):
    path = tmp_path / "grid-simulated-cuda.json"
    path.write_text(recorded.to_text(), encoding="utf-8")
    assert read_recordings(tmp_path) == [recorded]
    assert len(path.read_text(encoding="utf-8").splitlines()) > len(recorded.rows)


def test_answers_are_the_recorded_rows_in_an_order_of_the_seed(recorded):
    plan = recorded.user_plan
    rates = [row.samples_per_s for row in recorded.rows if row.plan == plan and row.kind == WHOLE_RUN]
    orders = set()
    for seed in range(12):
        machine = RecordedMachine(recorded, seed)
        answers = [machine(plan, id=f"t{i}", why="again") for i in range(N_REPEATS + 1)]
        assert sorted(row.samples_per_s for row in answers[:N_REPEATS]) == sorted(rates)
        assert answers[N_REPEATS].samples_per_s == answers[0].samples_per_s
        assert (answers[1].id, answers[1].why, answers[1].kind) == ("t1", "again", WHOLE_RUN)
        orders.add(tuple(row.samples_per_s for row in answers))
    assert len(orders) > 1


def test_plans_that_take_turns_are_answered_from_their_recorded_runs(recorded):
    """As a share of what the user's own plan did in the same group."""
    machine, own = RecordedMachine(recorded), recorded.user_plan
    plan = next(p for p in machine.find_rates() if p != own)
    found = [row for row in recorded.rows if row.kind == IN_TURNS]
    shares = {row.samples_per_s / find_own(found, row.group, own) for row in found if row.plan == plan}
    assert len(shares) == N_GROUPS
    groups = [machine.run_group({"t1": own, "t2": plan}, why="w") for _ in range(60)]
    assert {round(b.samples_per_s / a.samples_per_s, 9) for a, b in groups} == {round(share, 9) for share in shares}
    assert {(row.kind, row.status) for rows in groups for row in rows} == {(IN_TURNS, "ok")}
    assert machine.find_rates()[plan] / machine.find_rates()[own] == pytest.approx(statistics.median(shares))
    too_large = next(row.plan for row in recorded.rows if row.status == "out_of_memory" and row.kind == WHOLE_RUN)
    (failed,) = machine.run_group({"t1": plan, "t2": too_large}, why="w")
    assert (failed.id, failed.status, failed.kind) == ("t2", "out_of_memory", IN_TURNS)


def find_own(rows, group, own):
    return next(row.samples_per_s for row in rows if row.group == group and row.plan == own)


def test_recordings_without_turns_have_the_median_of_whole_runs_as_their_truth(recorded):
    rows = tuple(
        dataclasses.replace(row, kind="repeat") if row.why.startswith("round") else row
        for row in recorded.rows
        if row.kind != IN_TURNS
    )
    machine, own = RecordedMachine(dataclasses.replace(recorded, rows=rows)), recorded.user_plan
    rates = [row.samples_per_s for row in rows if row.plan == own and row.kind not in PROBES]
    assert len(rates) == N_REPEATS
    assert machine.find_rates()[own] == statistics.median(rates)


def test_a_recording_that_was_stopped_goes_on_from_its_rows(recorded):
    machine = SimulatedMachine(8)
    journal = Journal()
    run_recording(Session(machine, journal), build_small_space(machine), n_repeats=1, n_groups=0)
    n_first = len(journal.trials)
    for row in journal.trials:
        journal._recorded[row.plan, row.kind].append(row)
    rows = run_recording(Session(machine, journal), build_small_space(machine), n_repeats=N_REPEATS, n_groups=N_GROUPS)
    assert len(rows) == len(recorded.rows)
    assert [row.id for row in rows[:n_first]] == [row.id for row in recorded.rows[:n_first]]


def test_a_part_answers_for_every_plan_that_shares_it(recorded):
    machine, plan = RecordedMachine(recorded), recorded.user_plan.replace(num_workers=4)

    def ask(kind, **changes):
        return machine(plan.replace(**changes), id="t1", why="w", kind=kind)

    assert ask("device", pin_memory=True).samples_per_s == ask("device", num_workers=0).samples_per_s
    assert ask("device").plan["num_workers"] == 4
    rates = {ask("loader", precision=precision).samples_per_s for precision in recorded.axes["precision"]}
    assert len(rates) == 1
    assert ask("loader").receive_ms is not None
    plan = plan.replace(batch_size=128, compile=True, threads=3)
    parts = [find_part(plan, kind) for kind in ("device", "loader")]
    found = [(part["batch_size"], part["threads"], part["compile"], part["num_workers"]) for part in parts]
    assert found == [(128, 3, True, 0), (128, 3, False, 4)], "a part keeps what both feel"


def test_truths_are_medians_and_a_search_is_scored_against_them(recorded):
    truths = find_recorded_truths(recorded, seed=0)
    assert truths.samples_per_s == RecordedMachine(recorded).find_rates()
    score = run_search(truths, "coordinate_descent_2")
    assert score.recommended in truths.samples_per_s
    assert score.regret_pct < 100
    with ThreadPoolExecutor() as pool:
        assert score_recording(recorded, "coordinate_descent_2", n_orders=2, pool=pool)[0] == score


def test_every_strategy_of_the_product_can_be_answered_from_a_recording(recorded):
    """A recording that lacked a part would show here: nothing is asked that was not recorded."""
    for name, strategy in search.STRATEGIES.items():
        session = Session(RecordedMachine(recorded), Journal())
        session.run(strategy(recorded.build_space()))
        assert any(row.status == "ok" for row in session.rows), name
        assert not any("off the recorded grid" in (row.reason or "") for row in session.rows), name


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.yaml", "--out", "x.json"], 2, "missing.yaml"),
        (["configs/digits.yaml", "speed", "--out", "x.json"], 2, "key=value"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(arguments, code, said, capsys, tmp_path, monkeypatch):
    root = Path(_record_grid.__file__).parents[1]
    arguments = [
        str(root / a) if a.startswith("configs") else str(tmp_path / a) if a == "x.json" else a for a in arguments
    ]
    monkeypatch.chdir(tmp_path)
    try:
        ended = _record_grid.main(arguments)
    except SystemExit as stopped:
        ended = stopped.code
    assert ended == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
