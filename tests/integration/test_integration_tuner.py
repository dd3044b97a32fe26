"""``tune`` as a user calls it: real trials of a small real workload on the CPU."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jsonschema
import psutil
import pytest

import fulltilt
from fulltilt.errors import NoPlanError, RunFolderError, UsageError
from fulltilt.levers import default_plan
from fulltilt.records import IN_TURNS, Trial, TrialRequest, dumps, loads
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner import PickMade, SearchNoted, SearchStarted, TrialDone, TuneResult, TurnsDone, read_schema
from fulltilt.tuner.answer.result import write_result
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.search.proof import N_RACE, Proof

WORKLOADS = '''
import torch
from torch import nn
import fulltilt


class Net(nn.Module):
    """Wide in the middle, so that memory grows with the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 2048), nn.Linear(2048, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class BrokenNet(Net):
    def forward(self, x):
        raise ValueError("this model cannot do forward")


def dataset():
    x = torch.randn(40_000, 16, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def nan_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * float("nan")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def missing_dataset():
    raise fulltilt.errors.DataError("no file /data/x.h5; make it with fulltilt data make")


def build(**parts):
    return fulltilt.Workload(**({"model": Net, "dataset": dataset, "loss": nn.CrossEntropyLoss()} | parts))


workload = build(optimizer=sgd, name="wide")
broken, diverging, without_data = build(model=BrokenNet), build(loss=nan_loss), build(dataset=missing_dataset)
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    return enter_project(tmp_path, monkeypatch)


def enter_project(folder, patch):
    """Make the folder with the user's module the working folder."""
    (folder / "my_workloads.py").write_text(WORKLOADS)
    patch.chdir(folder)
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setattr("fulltilt.tuner.trials.target.ROOFS_MEASURE_S", 0.1)
    patch.setattr(Proof, "_compute_n_limit", take_few)
    return folder


def take_few(proof, share, least):
    """Plans that are as good as equal take turns no longer than others."""
    return least


NO_LEVERS = {"benchmark.test_mixed_precision": False, "benchmark.levers": {}}
PATIENT = {"deadline": 800.0, "budget": "1h"}  # what is only slow, on a machine that is busy, is no timeout


def tune(name="workload", **options):
    given = {"num_workers": [0], "steps": 4, "device": "cpu", "settings": {"benchmark.test_mixed_precision": False}}
    return fulltilt.tune(f"my_workloads:{name}", **(given | PATIENT | options))


def read_rows(folder: Path) -> list[Trial]:
    return [loads(Trial, line) for line in (folder / "trials.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """One exhaustive search under a memory limit, with batches that do not fit and one that the data cannot fill."""
    events = []

    def write_held(result, path):
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder(path, fingerprint_parts={}, command="tune", results=[])
        return write_result(result, path)

    with pytest.MonkeyPatch.context() as patch:
        folder = enter_project(tmp_path_factory.mktemp("searched"), patch)
        patch.setattr("fulltilt.tuner.tuning.write_result", write_held)
        yield tune(**GRID, on_event=events.append), folder, events


GRID = {
    "batch_sizes": [16, 64, 32_768, 40_000, 100_000],
    "settings": {"benchmark.test_mixed_precision": False, "data.batch_size": 2},  # slower beside any other work
    "memory_limit": "700MiB",
    "exhaustive": True,
    "out": "out",
}


def test_the_document_of_a_search_is_valid_and_comes_back(searched):
    result, folder, _ = searched
    assert {"tune.json", "trials.csv", "report.html"} <= {path.name for path in (folder / "out").iterdir()}
    document = json.loads((folder / "out" / "tune.json").read_text())
    jsonschema.validate(document, read_schema())
    assert TuneResult.read(document) == result
    assert result.search.grid_size == 5
    assert len(result.trials) == 6  # and the settings as they were, which lie off the grid
    assert result.workload["n_samples"] == 40_000
    assert (result.workload["data"], result.workload["device_name"]) == ("TensorDataset, 40000 samples", "cpu")
    assert (result.learning_rate.start, result.learning_rate.rule) == (0.1, "sqrt")
    assert result.baseline.plan["batch_size"] == 2


def test_batches_that_do_not_fit_or_that_the_data_cannot_fill_are_rows_and_still_there_is_a_pick(searched):
    result, folder, _ = searched
    ends = {row.plan["batch_size"]: row for row in result.trials}
    statuses = [ends[size].status for size in GRID["batch_sizes"]]
    assert statuses == ["ok", "ok", "out_of_memory", "skipped", "skipped"]
    assert ends[40_000].reason == "larger than batch 32768, which ran out of memory"
    assert "larger than the dataset (40000 samples)" in ends[100_000].reason
    assert not (folder / "out" / "logs" / f"{ends[100_000].id}.log").exists()
    assert result.picks.recommended.trial.plan["batch_size"] in (16, 64)
    assert result.search.n_out_of_memory == 1


def test_the_fastest_took_turns_with_the_settings_as_they_were_and_progress_names_every_row_and_pick(searched):
    result, _, events = searched
    picks, groups = result.picks, {row.group for row in result.repeats}
    assert result.search.n_groups == len(groups) >= 4
    assert {row.kind for row in result.repeats} == {IN_TURNS}
    for row in result.repeats:
        assert (row.status, row.n_steps) == ("ok", 0)
        assert row.samples_per_s > 0
        assert 0 <= row.stalled_pct <= 100
    best = picks.best
    beside = {group: {row.plan for row in result.repeats if row.group == group} for group in groups}
    ran_beside = list(beside.values()) if len(beside[1]) == 2 else [beside[n] for n in groups if n > N_RACE]
    assert best.gain.n_groups == sum({best.trial.plan, result.user_plan} <= plans for plans in ran_beside)
    assert picks.recommended.trial.plan == (best.trial.plan if best.gain.verdict == "faster" else result.user_plan)
    assert best.trial.observed["batch_size"] == best.trial.plan["batch_size"]
    done = [event.trial.id for event in events if isinstance(event, TrialDone)]
    done += [row.id for event in events if isinstance(event, TurnsDone) for row in event.rows]
    assert {row.id for row in (*result.trials, *result.repeats)} <= set(done)
    assert sum(isinstance(event, SearchStarted) for event in events) == 1
    assert [e.name for e in events if isinstance(e, PickMade)] == ["throughput", "efficiency", "memory", "recommended"]


@pytest.mark.usefixtures("lent_server")
def test_the_same_search_again_runs_no_trial_and_comes_with_the_error_where_its_result_cannot_be_written(
    searched, monkeypatch
):
    def fail(result, path):
        raise fulltilt.errors.StorageError(f"no space left for {path}/tune.json")

    result, folder, _ = searched
    before = (folder / "out" / "trials.jsonl").read_text()
    events = []
    monkeypatch.setattr("fulltilt.tuner.tuning.write_result", fail)
    with pytest.raises(fulltilt.errors.ResultUnwrittenError, match="no space left for") as ended:
        tune(**GRID, on_event=events.append)
    assert (folder / "out" / "trials.jsonl").read_text() == before
    assert all(event.is_resumed for event in events if isinstance(event, TrialDone | TurnsDone))
    assert ended.value.result.picks == result.picks


@pytest.mark.slow
@pytest.mark.usefixtures("lent_server")
def test_rows_of_other_code_are_left_aside_with_what_changed(project):
    """The user's optimizer is another one now, and the rows of the old one say nothing of it."""
    options = {"batch_sizes": [64], "exhaustive": True, "out": "out", "settings": NO_LEVERS | {"data.batch_size": 64}}
    first, module, events = tune(**options), project / "my_workloads.py", []
    module.write_text(module.read_text().replace("SGD(parameters, lr=0.1)", "AdamW(parameters)"))
    again = tune(**options, on_event=events.append)
    assert (first.workload["optimizer"], again.workload["optimizer"]) == ("SGD", "AdamW")
    assert again.search.n_resumed == 0
    names = "trials-1.jsonl, tune-1.json, trials-1.csv, report-1.html"
    said = f"set aside as {names} (changed: code of the workload.my_workloads "
    assert sum(said in note for note in again.notes) == 1
    assert sum(isinstance(event, SearchNoted) and said in event.message for event in events) == 1
    assert len(read_rows(project / "out")) == again.search.n_end_to_end
    assert len((project / "out" / "trials-1.jsonl").read_text().splitlines()) == first.search.n_end_to_end


@pytest.mark.slow
def test_a_search_for_several_devices_measures_whole_runs_on_all_of_them(project):
    settings = NO_LEVERS | {"data.batch_size": 64, "run.n_ranks": 2}
    result = tune(batch_sizes=[64], num_workers=[0], exhaustive=True, out="out", settings=settings)
    assert any("measured in 2 processes (cpu, cpu)" in note for note in result.notes)
    assert {row.n_devices for row in result.trials} == {2}
    assert result.picks.recommended.trial.plan["batch_size"] == 64


@pytest.mark.usefixtures("lent_server")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", r"\.py:\d+ in forward: ValueError: this model cannot do forward"),
        pytest.param("diverging", "NonFiniteLossError", marks=pytest.mark.slow),
    ],
)
def test_a_workload_that_cannot_train_is_no_plan_with_the_reason(project, name, words):
    with pytest.raises(NoPlanError, match=words):
        tune(name, batch_sizes=[16], quick=True, budget="10m", out="out")
    assert {row.status for row in read_rows(project / "out") if row.kind == "end_to_end"} == {"error"}


@pytest.mark.usefixtures("lent_server")
@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("workload", {"batch_sizes": [0]}, UsageError, "--batch-sizes 0 cannot be tried"),
        ("without_data", {}, UsageError, "no file /data/x"),
        ("workload", {"memory_limit": "50MiB"}, NoPlanError, "give a larger --memory-limit"),  # below torch's own
    ],
)
def test_what_cannot_be_built_is_the_users_own_error(project, name, options, error, words):
    with pytest.raises(error, match=words):
        tune(name, out="out", **options)
    assert (project / "out").exists() == (error is NoPlanError), "a refusal leaves nothing behind"


@pytest.mark.slow
def test_a_workload_of_a_script_is_tuned_from_the_script_itself(project):
    """Its functions live in __main__ and travel by value."""
    tail = """
if __name__ == "__main__":
    result = fulltilt.tune(workload, batch_sizes=[16], num_workers=[0], steps=4, device="cpu", out="out", quick=True,
                           budget="10m", settings={"data.batch_size": 16})
    print(result.picks.recommended.trial.plan["batch_size"], result.workload["name"])
"""
    (project / "script.py").write_text(WORKLOADS + tail)
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["16", "wide"]


SEARCH = """
import fulltilt
from fulltilt.tuner.search.proof import Proof
Proof._compute_n_limit = lambda proof, share, least: least
result = fulltilt.tune("my_workloads:workload", batch_sizes=[8, 16, 32], num_workers=[0], steps=4,
    device="cpu", exhaustive=True, out="out", settings={"benchmark.test_mixed_precision": False})
print(result.search.n_resumed)
"""


@pytest.fixture
def scratch():
    """A folder for temporary files with a name so short that the zygote uses it: sockets are made there."""
    with tempfile.TemporaryDirectory(prefix="tune-", dir="/tmp") as folder:
        yield Path(folder)


def start_search(scratch):
    """With a folder of its own for temporary files, so that what it leaves there can be told."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", SEARCH], env=os.environ | {"TMPDIR": str(scratch)}, **output)


def end_search(project, scratch, n_rows, number):
    """Send a signal when so many rows are there; returns what was said when all its processes were gone."""
    search, journal = start_search(scratch), project / "out" / "trials.jsonl"
    wait_until(lambda: journal.exists() and journal.read_text().count("\n") >= n_rows)
    family = psutil.Process(search.pid).children(recursive=True)
    search.send_signal(number)
    _, errors = search.communicate()
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))
    assert not list(scratch.glob("fulltilt-*"))
    return errors


def wait_until(condition):
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_search_killed_half_way_leaves_no_process_and_repeats_no_trial(project, scratch):
    end_search(project, scratch, 2, signal.SIGKILL)
    kept = read_rows(project / "out")
    again = start_search(scratch)
    output, errors = again.communicate()
    assert (again.returncode, output) == (0, f"{len(kept)}\n"), errors
    rows = read_rows(project / "out")
    assert rows[: len(kept)] == kept
    assert [row.plan["batch_size"] for row in rows if row.kind == "end_to_end"] == [32, 8, 16]


def test_an_interrupted_search_ends_its_children_and_keeps_its_rows(project, scratch):
    assert "KeyboardInterrupt" in end_search(project, scratch, 1, signal.SIGINT)
    assert read_rows(project / "out")


def test_a_trial_runs_by_hand_from_its_request(project):
    source, plan = resolve_target("my_workloads:workload").source, default_plan({"batch_size": 16})
    request = TrialRequest(id="t1", source=source, plan=plan, device="cpu", n_steps=4, max_measure_s=1.0)
    command = [sys.executable, "-m", "fulltilt.tuner.trials.trial"]
    ended = subprocess.run(command, input=dumps(request), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    *progress, last = (json.loads(line) for line in ended.stdout.splitlines())
    assert last["measurement"]["samples_per_s"] > 0
    assert all("progress" in answer for answer in progress)
