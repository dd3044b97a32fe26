"""What every Target promises, held by the simulated one and by the one that runs processes."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import default_plan
from fulltilt.records import IN_TURNS, Trial, TrialRequest, WorkloadSource, dumps, loads
from fulltilt.tuner.trials.process import Zygote
from fulltilt.tuner.trials.rows import NULLABLE
from fulltilt.tuner.trials.target import ProcessTarget

BODIES = tuple(str(Path(__file__).parents[1] / name) for name in ("faults", "chaos"))
PLANS = {
    "ok": default_plan({"batch_size": 64, "accumulate": 2}),
    "out_of_memory": default_plan({"batch_size": 512}),
    "error": default_plan({"batch_size": 7}),
}
OTHER = PLANS["ok"].replace(accumulate=1)


@pytest.fixture(scope="module")
def process_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    source = WorkloadSource(config={"act": "end_by_batch_size"}, base_dir=".", import_paths=BODIES)
    zygote = Zygote(folder / "zygote.log", body="trial_bodies:do", preload=("json",))
    usual = TrialRequest(source=source, device="cpu", n_steps=4, deadline_s=300)
    target = ProcessTarget(usual, folder, zygote=zygote)
    yield target
    target.close()


@pytest.fixture(params=["simulated", "process"])
def target(request):
    if request.param == "process":
        return request.getfixturevalue("process_target")
    ends = {
        64: Answer(samples_per_s=1000.0, stalled_pct=2.0),
        512: Answer(status="out_of_memory"),
        7: Answer(status="error"),
    }
    return SimulatedTarget(lambda plan: ends[plan["batch_size"]])


@pytest.mark.parametrize("status", PLANS)
def test_a_trial_ends_with_its_own_plan_and_figures_or_says_why_not_and_survives_its_json(target, status):
    trial = target(PLANS[status], id="t5", why="because")
    assert (trial.status, trial.id, trial.why, trial.plan) == (status, "t5", "because", PLANS[status])
    assert (trial.reason is None) == (status == "ok")
    assert (trial.samples_per_s is not None) == (status == "ok")
    assert trial.effective_batch_size == PLANS[status].effective_batch_size
    assert loads(Trial, dumps(trial)) == trial
    missing = [name for name in NULLABLE if getattr(trial, name) is None]
    assert missing
    assert all(trial.null_reasons[name] for name in missing)
    if trial.phases_ms is not None:
        assert trial.null_reasons["phases_ms.h2d"]


def test_plans_of_a_group_have_a_row_each_with_their_speed_and_why_there_is_nothing_else(target):
    plans = {"t6": PLANS["ok"], "t7": OTHER}
    rows = target.run_group(plans, why="because")
    assert {row.id: row.plan for row in rows} == plans
    for row in rows:
        assert (row.status, row.reason, row.why, row.kind) == ("ok", None, "because", IN_TURNS)
        assert (row.samples_per_s, row.stalled_pct) == (pytest.approx(1000.0), pytest.approx(2.0))
        assert row.turns == "usual"
        assert row.seconds > 0
        missing = {name for name in NULLABLE if getattr(row, name) is None}
        assert missing == {*NULLABLE} - {"samples_per_s"}
        assert all(row.null_reasons[name] for name in missing)
        assert loads(Trial, dumps(row)) == row


@pytest.mark.parametrize("status", ["error", "out_of_memory"])
def test_of_a_group_in_which_one_fails_there_is_its_row_alone_and_the_next_group_is_whole(target, status):
    (row,) = target.run_group({"t8": PLANS["ok"], "t9": PLANS[status]}, why="because")
    assert (row.id, row.plan, row.status, row.kind) == ("t9", PLANS[status], status, IN_TURNS)
    assert row.reason
    assert row.samples_per_s is None
    assert all(row.null_reasons[name] for name in NULLABLE)
    assert loads(Trial, dumps(row)) == row
    rows = target.run_group({"t10": PLANS["ok"], "t11": OTHER}, why="then")
    assert [row.status for row in rows] == ["ok", "ok"]


def test_a_failed_trial_does_not_change_the_next_one(target):
    target(PLANS["error"], id="t1", why="first")
    assert target(PLANS["ok"], id="t2", why="then").status == "ok"


def test_each_trial_comes_from_a_server_with_its_plans_environment_which_is_started_once(tmp_path):
    config = {"act": "tell_variables", "names": ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"]}
    source = WorkloadSource(config=config, base_dir=str(tmp_path), import_paths=BODIES)
    zygote = Zygote(tmp_path / "zygote.log", body="trial_bodies:do", preload=("json",))
    target = ProcessTarget(TrialRequest(source=source, device="cpu", deadline_s=300), tmp_path, zygote=zygote)
    values = (None, "passive", None, "passive", "active", "passive", None)
    with contextlib.closing(target):
        for number, value in enumerate(values):
            assert target(default_plan({"wait_policy": value}), id=f"t{number}", why="").status == "ok"
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    spins = {None: None, "passive": "0", "active": "infinity"}
    assert [variables for _, variables in told] == [[value, spins[value]] for value in values]
    servers = [server for server, _ in told]
    assert len(set(servers)) == 3, "what fits is taken again"
    assert not [server for server in servers if Path(f"/proc/{server}").exists()]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no thread waits for another")
def test_a_real_trial_waits_and_stays_on_its_cores_as_the_plan_says(tmp_path):
    """What is in force is read back in the trial, which is an error where it is not the plan's."""
    config = {"model": "small_cnn(width=4)", "data": {"dataset": "digits", "transform": "normalize"}}
    usual = TrialRequest(source=WorkloadSource(config=config, base_dir="."), device="cpu", n_steps=2, deadline_s=300)
    plan = default_plan({"batch_size": 32, "threads": 2, "wait_policy": "passive", "thread_affinity": True})
    with contextlib.closing(ProcessTarget(usual, tmp_path)) as target:
        trial = target(plan, id="t1", why="", kind="device")
    assert (trial.status, trial.reason) == ("ok", None)
    assert (tmp_path / "zygote-passive-0.log").exists()
    assert not (tmp_path / "zygote.log").exists(), "the other server was never needed"


def test_on_a_busy_machine_plans_that_cannot_pin_their_threads_take_turns_with_those_that_can(tmp_path):
    config = {"model": "small_cnn(width=4)", "data": {"dataset": "digits", "transform": "normalize"}}
    usual = TrialRequest(source=WorkloadSource(config=config, base_dir="."), device="cpu", n_steps=2, deadline_s=300)
    plans = {f"t{n}": default_plan({"batch_size": 32, "threads": n}) for n in (1, 2)}
    with contextlib.closing(ProcessTarget(usual, tmp_path)) as target:
        target.runner.waits_passively = True
        rows = target.run_group(plans, why="")
    assert [(row.plan, row.status, row.turns) for row in rows] == [(plan, "ok", "pinned") for plan in plans.values()]
