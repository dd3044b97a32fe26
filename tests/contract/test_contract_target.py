"""What every Target promises, held by the simulated one and by the one that runs processes."""

from pathlib import Path

import pytest
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import default_plan
from fulltilt.records import Trial, TrialRequest, WorkloadSource, dumps, loads
from fulltilt.tuner.trials.process import Zygote
from fulltilt.tuner.trials.rows import NULLABLE
from fulltilt.tuner.trials.target import ProcessTarget

BODIES = tuple(str(Path(__file__).parents[1] / name) for name in ("faults", "chaos"))
PLANS = {
    "ok": default_plan({"batch_size": 64, "accumulate": 2}),
    "out_of_memory": default_plan({"batch_size": 512}),
    "error": default_plan({"batch_size": 7}),
}


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
    ends = {64: Answer(samples_per_s=1000.0), 512: Answer(status="out_of_memory"), 7: Answer(status="error")}
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


def test_a_failed_trial_does_not_change_the_next_one(target):
    target(PLANS["error"], id="t1", why="first")
    assert target(PLANS["ok"], id="t2", why="then").status == "ok"
