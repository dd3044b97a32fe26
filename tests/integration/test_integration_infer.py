"""``fulltilt infer check`` as a user runs it: real trainings, real processes, real signals, on the CPU."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "configs" / "targets.yaml"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # two tests at once must not fight for cores
CHECK = [sys.executable, "-m", "fulltilt", "infer", "check"]
# Far away from what any machine does: a test is no judge of the machine it runs on.
EASY = ["targets.batch_latency_ms={p90: 600000}", "targets.response_s={p95: 6000, max: 6000}"]
LOAD = ["targets.requests_per_s=30", "targets.samples_per_request=4"]
SMALL = [*EASY, *LOAD, "targets.samples_per_hour=100", "run.epochs=1"]
PATIENCE_S = 300

OWN = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import fulltilt

class Model(nn.Linear):
    def forward(self, x):
        print("a word of the user's own")
        return super().forward(x)

class Broken(Model):
    def forward(self, x):
        raise ValueError("no head\\nand more")

class Slow(Model):
    def forward(self, x):
        Path("measuring.pid").write_text(str(os.getpid()))
        time.sleep(3600)

def build(model):
    data = lambda: TensorDataset(torch.rand(64, 8), torch.rand(64, 2))
    return fulltilt.Workload(model=lambda: model(8, 2), dataset=data, loss=nn.MSELoss(), name="mine")

workload, broken, slow = build(Model), build(Broken), build(Slow)
"""


def run_check(*words, cwd, expect=0):
    done = subprocess.run([*CHECK, *map(str, words)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The guide's targets on a classifier that is trained for it; then once more with one that is out of reach."""
    folder = tmp_path_factory.mktemp("check")
    first = run_check(TARGETS, *SMALL, "--json", "first.json", cwd=folder)
    out = folder / "runs" / "infer" / "targets"
    stamp = (out / "training" / "checkpoint.pt").stat().st_mtime_ns
    words = [TARGETS, *SMALL, "targets.memory_gib=0.001", "--verbose", "--json", "-"]
    second = run_check(*words, cwd=folder, expect=3)
    assert (out / "training" / "checkpoint.pt").stat().st_mtime_ns == stamp
    return out, first, json.loads((folder / "first.json").read_text()), second, json.loads(second.stdout)


def test_all_targets_are_met_and_the_first_line_says_so_on_one_screen(checked):
    out, first, document, *_ = checked
    lines = first.stdout.splitlines()
    assert lines[0] == "All 5 targets are met under 30 requests/s."
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert document["met"] is True
    assert any(" ms  █" in line for line in lines), "the distribution"
    page = (out / "latency.html").read_text()
    assert "response_s: 100 % within" in page
    assert "batch_latency_ms: 100 % within" in page


def test_json_is_the_contract(checked):
    _, _, document, *_ = checked
    assert list(document)[:3] == ["version", "targets", "met"]
    assert document["version"] == 1
    names = ["batch_latency_ms_p90", "memory_gib", "samples_per_hour", "response_s_p95", "response_s_max"]
    assert [target["name"] for target in document["targets"]] == names
    for target in document["targets"]:
        low, high = target["ci95"]
        assert low <= target["measured"] <= high
        assert (target["met"], target["verdict"]) == (True, "met")
    load = {"requests_per_s": 30, "samples_per_request": 4, "n_requests": 100, "seed": 42}
    assert document["load"].items() >= {**load, "scenario": "server"}.items()
    assert sum(n for *_, n in document["histogram"]) == 100
    assert 0.05 < document["targets"][1]["measured"] < 2, "GiB of a process with torch and a small model"
    assert 0.05 < document["memory_mean_gib"] <= document["memory_gib"]
    assert document["weights"]["metrics"]["accuracy"] > 0.5
    assert document["weights"]["step"] == 23
    assert document["levers"]["threads"] == 1
    assert document["inputs"] == "validation set"
    assert document["machine"]["n_cores_usable"] >= 1
    times = document["times"]
    assert times["response_s"]["p50"]["measured"] * 1000 >= times["batch_latency_ms"]["p50"]["measured"] > 0
    assert None in times["response_s"]["p99"]["ci95"], "of a hundred"
    assert document["null_reasons"] == {"times": "too few requests for a bound"}


def test_a_target_out_of_reach_is_missed_with_its_figure(checked):
    *_, second, document = checked
    missed = [target for target in document["targets"] if not target["met"]]
    assert [(target["name"], target["verdict"]) for target in missed] == [("memory_gib", "missed")]
    assert missed[0]["measured"] > 0.05
    result = next(line for line in second.stderr.splitlines() if "is missed" in line)
    assert result.startswith(f"1 of 5 targets is missed: memory_gib is {missed[0]['measured']:.3g} (limit 0.001)")
    assert document["met"] is False


def test_the_training_is_done_once_and_what_takes_long_is_said(checked):
    _, first, _, second, _ = checked
    assert "epoch 1/1" in first.stderr
    assert "trained just now" in first.stdout
    assert "epoch 1/1" not in second.stderr
    assert "trained earlier" in second.stderr
    assert "then 100 requests at 30/s in 3.3 s" in first.stderr, "said beforehand"


def test_history_has_a_line_a_check_and_the_table_the_figure_before(checked):
    out, first, document, second, _ = checked
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [line["met"] for line in history] == [True, False]
    assert history[0]["targets"] == document["targets"]
    row = next(line for line in second.stderr.splitlines() if line.startswith("memory_gib"))
    assert row.split()[-1] == f"{document['targets'][1]['measured']:.3g}"
    assert first.stdout.count("–") == 5  # nothing before it


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path


@pytest.mark.slow
def test_a_workload_of_the_users_own_is_measured_as_it_is_built(own):
    words = ["mine:workload", "targets.response_s={p50: 600}", "targets.requests_per_s=50", "data.batch_size=4"]
    document = json.loads(run_check(*words, "--json", "-", cwd=own).stdout)
    assert [target["name"] for target in document["targets"]] == ["response_s_p50"]
    assert document["weights"] is None
    assert document["n_parameters"] == 18
    assert document["load"]["samples_per_request"] == 4
    assert not list(own.rglob("checkpoint.pt"))
    assert "a word of the user's own" in (own / "runs" / "infer" / "mine_workload" / "measuring.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "samples", "said"), [("single", 1, "one stream, each"), ("multi", 8, "several")])
def test_a_stream_of_requests_needs_no_rate(own, scenario, samples, said):
    words = ["mine:workload", "targets.response_s={p90: 600}", f"targets.scenario={scenario}", "--json", "out.json"]
    done = run_check(*words, cwd=own)
    assert said in done.stdout
    load = json.loads((own / "out.json").read_text())["load"]
    assert (load["scenario"], load["requests_per_s"], load["samples_per_request"]) == (scenario, None, samples)


@pytest.mark.slow
def test_without_a_target_about_the_load_batches_run_back_to_back_and_threads_wait_as_the_plan_says(own):
    words = ["targets.memory_gib=99", "speed.threads=2", "speed.wait_policy=passive"]
    done = run_check("mine:workload", *words, "--out", "out", "--json", "out.json", cwd=own)
    assert done.stdout.splitlines()[0] == "The target is met."
    assert "load: none" in done.stdout
    document = json.loads((own / "out.json").read_text())
    assert document["times"] == {}
    if len(os.sched_getaffinity(0)) > 1:  # on one core no thread waits for another
        assert document["notes"] == [], "where threads do not wait as the plan says there is one"


def test_a_model_that_raises_is_told_in_a_line_with_its_log(own):
    done = run_check("mine:broken", "targets.memory_gib=9", "--out", "out", "--json", "out.json", cwd=own, expect=1)
    said = (
        "the model failed while it was measured (mine.py:16 in forward: ValueError: no head) (log: out/measuring.log)"
    )
    assert done.stderr.splitlines()[-1] == f"fulltilt infer: {said}"
    assert json.loads((own / "out.json").read_text())["error"] == said
    assert "raise ValueError" in (own / "out" / "measuring.log").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine:workload"], "no target is stated"),
        (["mine:workload", "targets.memory_gib=1", "--weights", "nowhere"], "nowhere holds no checkpoint"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_configurations_are_refused_before_anything_starts(own, words, said):
    done = run_check(*words, cwd=own, expect=2)
    assert said in done.stderr
    assert not (own / "runs").exists()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left_when_the_check_is_ended(own, number, code):
    process = subprocess.Popen(
        [*CHECK, "mine:slow", "targets.memory_gib=9"],
        cwd=own,
        env={**ENVIRONMENT, "TMPDIR": str(own)},  # SIGKILL leaves the folder of the measuring process there
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pid = int(_wait(lambda: _read(own / "measuring.pid")))
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == code
    _wait(lambda: not _is_alive(pid))
    if code > 0:
        assert said.splitlines()[-1].endswith(
            "nothing was measured; a training that had begun goes on with the same command"
        )
        assert "Traceback" not in said


def _wait(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


def _read(path):
    return path.read_text() if path.exists() else ""


def _is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
