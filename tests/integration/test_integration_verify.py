"""``tune --verify`` on real data: both plans trained by the command line, resumed, and broken off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fulltilt.errors import TrainingError
from fulltilt.records import decode, encode
from fulltilt.tuner.answer.quality import Verification
from fulltilt.tuner.answer.verify import run_verification

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"
WORDS = [str(DIGITS), "model=small_cnn(width=4)", "optim.lr=0.01", "--device", "cpu"]


SETTINGS = {"data.batch_size": 128}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two tests at once must not fight for cores


def verify(folder, words, settings, *, epochs=1, **options):
    return run_verification(words, settings, folder=folder / "verify", seed=7, n_pairs=2, epochs=epochs, **options)


@pytest.mark.slow
def test_both_plans_are_trained_in_turn_and_a_second_call_trains_nothing(tmp_path):
    told = []
    made = verify(tmp_path, WORDS, SETTINGS, epochs=2, on_run=lambda *said: told.append(said))
    assert [(arm, seed) for arm, seed, _, _ in told] == [
        ("as it was", 7), ("recommended", 7), ("recommended", 8), ("as it was", 8),
    ]  # fmt: skip
    assert (made.metric, made.n_pairs, made.settings) == ("accuracy", 2, SETTINGS)
    assert "accuracy on the validation set of 359 samples after 2 epochs " in made.text
    assert all(len(run.curve) == 2 and 0.3 < run.quality <= 1 for run in made.runs)
    assert made.time_before_s > 0
    assert made.quality_before != made.quality_after  # the batch is in force: half the steps
    assert decode(Verification, encode(made)) == made
    assert verify(tmp_path, WORDS, SETTINGS, epochs=2) == made  # read back, training times included


@pytest.mark.slow
def test_a_recommended_plan_that_diverges_learns_worse_and_is_not_trained_again(tmp_path):
    words = [*WORDS, "optim.optimizer=sgd"]
    settings = {"optim.lr": 1e30}  # stands for any setting that lets the loss run away
    made = verify(tmp_path, words, settings)
    assert made.verdict == "learns worse"
    assert "2 of 2 trainings with the recommended settings diverged" in made.text
    assert [run.quality for run in made.runs if run.arm == "recommended"] == [None, None]
    logs = {path: path.stat().st_mtime_ns for path in (tmp_path / "verify").glob("*.log")}
    assert verify(tmp_path, words, settings) == made
    assert {path: path.stat().st_mtime_ns for path in logs} == logs


def test_a_training_that_fails_is_told_with_its_last_words(tmp_path):
    words = [*WORDS, "data.batch_size=5000"]
    with pytest.raises(TrainingError, match=r"exit code 2: .*batch_size 5000 is larger than.*\(log: .*seed7\.log\)"):
        verify(tmp_path, words, {"data.num_workers": 1})


@pytest.mark.slow
def test_a_training_that_was_broken_off_or_failed_is_trained_by_the_next_call(tmp_path, monkeypatch):
    """It had written why it ended where its result belongs, and the next call took that for the result."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_model.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom torch import nn\n"
        "def build():\n    exec(Path('end').read_text())\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    (tmp_path / "a.yaml").write_text("model: their_model:build\ndata: {dataset: digits}\noptim: {lr: 0.01}\n")
    words = ["a.yaml", "--device", "cpu"]
    for end, code in (("os.kill(os.getpid(), signal.SIGTERM)", 143), ("raise ValueError('no room')", 1)):
        (tmp_path / "end").write_text(end)
        with pytest.raises(TrainingError, match=f"ended with exit code {code}"):
            verify(tmp_path, words, SETTINGS)
        (result,) = (tmp_path / "verify").glob("*.json")
        assert json.loads(result.read_text())["rc"] == code
    (tmp_path / "end").write_text("")
    made = verify(tmp_path, words, SETTINGS)
    assert [len(run.curve) for run in made.runs] == [1, 1, 1, 1]
    assert json.loads(result.read_text())["reason"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_search_that_is_ended_leaves_no_training_behind(tmp_path, number):
    code = (
        "import sys; from pathlib import Path; from fulltilt.tuner.answer.verify import run_verification\n"
        f"run_verification({WORDS!r}, {SETTINGS!r}, folder=Path({str(tmp_path)!r}), seed=1, epochs=500)"
    )
    search = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=os.environ)
    wait_until(lambda: list(tmp_path.glob("*/events.jsonl")) or search.poll() is not None)
    children = psutil.Process(search.pid).children(recursive=True)
    assert children
    search.send_signal(number)
    search.wait(300)
    wait_until(lambda: not any(map(is_alive, children)))


def wait_until(condition, limit_s: float = 300.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Dead and not yet reaped by whoever inherited it counts as gone."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
