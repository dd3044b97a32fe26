"""``MetricsTracker``: the guide's files, their figures, and what is left of them after a crash."""

from __future__ import annotations

import csv
import math
import os
import random
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from listener_events import ENDED, epoch_done, evaluated, started, steps_done, tell

from fulltilt.errors import StorageError, UsageError
from fulltilt.listeners import MetricsTracker, list_headlines
from fulltilt.listeners.metrics_tracker import OWNER, Spread
from fulltilt.records import CheckpointStarted, EpochDone, Evaluated, RunStarted, StepsDone

GUIDE_EFFICIENCY = ["metric", "mean", "std", "total_samples", "total_batches"]
GUIDE_TRAINING = [
    *["total_epochs", "best_loss", "final_loss", "best_accuracy", "final_accuracy", "best_perplexity"],
    *["final_perplexity", "avg_epoch_time", "total_training_time"],
]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def build_tracker(folder: Path, **options) -> MetricsTracker:
    return MetricsTracker(folder, read_memory=lambda device: 64 << 20, **options)


def start(folder: Path, **changes) -> RunStarted:
    return started(out_dir=str(folder / "run"), plan={"batch_size": 32}, **changes)


def steps(step: int, seconds: float, *, n_samples: int = 320, forward: float | None = None) -> StepsDone:
    figures = {"seconds": seconds, "n_samples": n_samples, "samples_per_s": n_samples / seconds}
    return steps_done(step, **figures, phases_ms={} if forward is None else {"forward": forward})


def epoch(number: int, loss: float, seconds: float = 10.0) -> EpochDone:
    metrics = {"accuracy": 0.1 * number, "perplexity": math.exp(loss)}
    return epoch_done(epoch=number, step=20 * (number + 1), loss=loss, metrics=metrics, seconds=seconds)


def evaluate(number: int, loss: float, **more: float) -> Evaluated:
    metrics = {"loss": loss, "accuracy": 0.2 * number, "top5": 0.5, "forward_loss": loss + 1, "backward_loss": loss - 1}
    metrics |= {"perplexity": math.exp(loss), **more}
    return evaluated(epoch=number, step=20 * (number + 1), metrics=metrics)


def test_summaries_have_the_guides_columns_and_figures_of_all_batches(tmp_path):
    events = [start(tmp_path), steps(10, 2.0, forward=4.0), steps(20, 1.0, n_samples=300, forward=6.0), epoch(0, 3.0)]
    events += [evaluate(0, 2.5), steps(30, 4.0), epoch(1, 2.0, seconds=20.0), evaluate(1, 2.75), ENDED]
    tell(build_tracker(tmp_path / "m"), *events)
    rows = {row["metric"]: row for row in read(tmp_path / "m" / "efficiency_summary.csv")}
    assert list(rows["throughput"])[:5] == GUIDE_EFFICIENCY
    assert list(rows) == ["throughput", "memory_per_sample", "forward_time"]
    assert {(row["total_samples"], row["total_batches"]) for row in rows.values()} == {("940", "30")}
    rates, seconds = [160, 300, 80], [2, 1, 4]
    mean = 940 / 7
    std = math.sqrt(sum(s * (r - mean) ** 2 for r, s in zip(rates, seconds, strict=True)) / 7)
    assert float(rows["throughput"]["mean"]) == pytest.approx(mean)
    assert float(rows["throughput"]["std"]) == pytest.approx(std)
    assert float(rows["memory_per_sample"]["mean"]) == 2.0
    assert (float(rows["forward_time"]["mean"]), float(rows["forward_time"]["std"])) == (5.0, 1.0)
    assert [rows[name]["unit"] for name in rows] == ["samples/s", "MiB", "ms"]
    (summary,) = read(tmp_path / "m" / "training_summary.csv")
    assert list(summary)[:9] == GUIDE_TRAINING
    assert summary["total_epochs"] == "2"
    assert (float(summary["best_loss"]), float(summary["final_loss"])) == (2.5, 2.75)
    assert (float(summary["best_accuracy"]), summary["split"]) == (0.2, "val")
    assert float(summary["best_perplexity"]) == math.exp(2.5)
    assert (float(summary["avg_epoch_time"]), float(summary["total_training_time"])) == (15.0, 30.0)


def test_a_forward_time_that_nobody_measured_is_empty_and_says_why(tmp_path):
    tell(build_tracker(tmp_path / "m"), start(tmp_path), steps(10, 2.0), epoch(0, 3.0))
    row = read(tmp_path / "m" / "efficiency_summary.csv")[2]
    assert (row["metric"], row["mean"], row["std"]) == ("forward_time", "", "")
    assert "did not time" in row["note"]


def test_without_validation_the_summary_is_of_training(tmp_path):
    tell(build_tracker(tmp_path / "m"), start(tmp_path), epoch(0, 3.0), epoch(1, 3.5))
    (summary,) = read(tmp_path / "m" / "training_summary.csv")
    assert (summary["split"], summary["best_loss"], summary["final_loss"]) == ("train", "3.0", "3.5")


def test_every_pass_has_a_row_and_every_group_of_words_its_error(tmp_path):
    rare = {"share/rare": 0.25, "miss/rare": 0.2, "error_pct/rare": 80.0}
    tell(build_tracker(tmp_path / "m"), start(tmp_path), epoch(0, 3.0), evaluate(0, 2.5, **rare))
    train, val = read(tmp_path / "m" / "training_metrics.csv")
    found = [train[name] for name in ("split", "total_loss", "epoch_time", "top5_accuracy")]
    found += [val[name] for name in ("split", "forward_loss", "backward_loss", "top5_accuracy")]
    assert found == ["train", "3.0", "10.0", "", "val", "3.5", "1.5", "0.5"]
    (error,) = read(tmp_path / "m" / "error_analysis.csv")
    assert error == {"epoch": "0", "step": "20", "category": "rare", "share_pct": "25.0", "error_pct": "80.0"}


def test_the_spread_over_many_intervals_is_that_of_a_textbook(tmp_path):
    tracker = build_tracker(tmp_path / "m")
    tracker(start(tmp_path))
    values = [math.sin(i) + 1000.0 for i in range(300)]
    for index, value in enumerate(values):
        tracker(steps(index + 1, 1.0, forward=value))
    tracker(epoch(0, 1.0))
    row = read(tmp_path / "m" / "efficiency_summary.csv")[2]
    assert float(row["std"]) == pytest.approx(statistics.pstdev(values), rel=1e-6)


def test_a_resumed_run_counts_every_step_once(tmp_path):
    whole, parts = tmp_path / "a", tmp_path / "b"
    events = [steps(10, 2.0), steps(20, 1.0), epoch(0, 3.0), evaluate(0, 2.5), steps(30, 3.0), steps(40, 1.5)]
    tell(build_tracker(whole), start(whole), *events, epoch(1, 2.0))
    lost = events[4], epoch(1, 99.0)  # the checkpoint is older
    tell(build_tracker(parts), start(parts), *events[:4], CheckpointStarted(epoch=1, step=20), *lost)
    tell(build_tracker(parts), start(parts, first_step=20), *events[4:], epoch(1, 2.0))
    for name in ("efficiency_summary.csv", "training_summary.csv"):
        for mine, wanted in zip(read(parts / name), read(whole / name), strict=True):
            for key, value in wanted.items():
                same = mine[key] == value or float(mine[key]) == pytest.approx(float(value))
                assert same, (name, key)
    assert [row["step"] for row in read(parts / "efficiency_metrics.csv")] == ["10", "20", "30", "40"]


def test_rows_are_appended_never_rewritten(tmp_path):
    now = [0.0]
    tracker = build_tracker(tmp_path / "m", clock=lambda: now[0])
    tracker(start(tmp_path))
    path = tmp_path / "m" / "efficiency_metrics.csv"
    grown = []
    for index in range(50):
        now[0] += 2.0
        before = path.read_bytes() if path.exists() else b""
        inode = path.stat().st_ino if path.exists() else None
        tracker(steps(index + 1, 1.0))
        after = path.read_bytes()
        assert after.startswith(before)
        assert inode in (None, path.stat().st_ino)
        grown.append(len(after) - len(before))
    assert max(grown[1:]) < 100  # a row each, however many there are


CRASH = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from test_listeners_metrics_tracker import *
from pathlib import Path
folder = Path(sys.argv[1])
tracker = MetricsTracker(folder / "m", clock=lambda: 0.0)
tracker(start(folder))
for step in (10, 20):
    tracker(steps(step, 1.0))
tracker(CheckpointStarted(epoch=0, step=20))
tracker(steps(30, 1.0))  # held back: less than a second has passed
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_crash_keeps_all_but_the_last_flush(tmp_path):
    command = [sys.executable, "-c", CRASH, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [row["step"] for row in read(tmp_path / "m" / "efficiency_metrics.csv")] == ["10", "20"]


def test_a_folder_belongs_to_one_run(tmp_path):
    build_tracker(tmp_path / "m")(start(tmp_path / "one"))
    with pytest.raises(UsageError, match=r"metrics of the run in .*one/run; give another folder with --metrics"):
        build_tracker(tmp_path / "m")(start(tmp_path / "two"))
    build_tracker(tmp_path / "m")(start(tmp_path / "one"))


def test_of_two_runs_that_start_at_once_one_gets_the_folder(tmp_path, monkeypatch):
    """Both found it without an owner, and both wrote into it."""
    build_tracker(tmp_path / "m")(start(tmp_path / "one"))
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.name != OWNER and is_file(path))  # as it was a moment before
    with pytest.raises(UsageError, match=r"metrics of the run in .*one/run"):
        build_tracker(tmp_path / "m")(start(tmp_path / "two"))


def test_rows_that_cannot_be_written_leave_the_other_files(tmp_path, monkeypatch):
    tracker = build_tracker(tmp_path / "m")
    tracker(start(tmp_path))
    tracker(steps(10, 2.0))

    def fail(rows):
        raise StorageError("no space left")

    monkeypatch.setattr(tracker._efficiency, "append", fail)
    with pytest.raises(StorageError):
        tracker(epoch(0, 3.0))
    assert [row["split"] for row in read(tmp_path / "m" / "training_metrics.csv")] == ["train"]


def test_a_run_that_is_refused_leaves_the_summaries_of_the_other_alone(tmp_path):
    """Its end once wrote them empty."""
    tell(build_tracker(tmp_path / "m"), start(tmp_path / "one"), steps(10, 1.0), epoch(0, 1.0), ENDED)
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").glob("*.csv")}
    second = build_tracker(tmp_path / "m")
    with pytest.raises(UsageError):
        second(start(tmp_path / "two"))
    second(ENDED)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").glob("*.csv")} == before


def test_memory_is_read_from_this_process(tmp_path):
    tell(MetricsTracker(tmp_path / "m"), start(tmp_path), steps(10, 1.0), epoch(0, 1.0))
    row = read(tmp_path / "m" / "efficiency_summary.csv")[1]
    assert 10 / 32 < float(row["mean"]) < 100_000 / 32
    assert "resident set" in row["note"]


def test_parts_of_a_breakdown_are_no_headlines():
    assert list_headlines({"accuracy": 0.5, "error_pct/rare": 90.0}) == [("accuracy", 0.5)]


@pytest.mark.parametrize("where", [{"n_ranks": 2}, {"pid": os.getppid()}])
def test_the_memory_of_a_process_that_does_not_train_is_not_told(tmp_path, where):
    """With ranks or max_restarts the listeners live in a process beside the training."""
    tell(build_tracker(tmp_path / "m"), start(tmp_path, **where), steps(10, 2.0), epoch(0, 3.0))
    row = read(tmp_path / "m" / "efficiency_summary.csv")[1]
    assert (row["metric"], row["mean"]) == ("memory_per_sample", "")
    assert "processes of its own" in row["note"]
    assert read(tmp_path / "m" / "training_metrics.csv")[0]["memory_gib"] == ""


def test_memory_is_asked_of_the_device_that_trains(tmp_path):
    asked = []
    tracker = MetricsTracker(tmp_path / "m", read_memory=asked.append)
    tell(tracker, start(tmp_path, device="cuda:1", pid=os.getpid()), steps(10, 2.0))
    assert asked == ["cuda:1"]


def test_a_spread_of_equal_values_is_zero_and_never_the_root_of_a_negative():
    """Bug: by rounding the sum of squares came out below zero, and its root ended the training."""
    rng = random.Random(0)
    for _ in range(2000):
        spread = Spread()
        value = rng.uniform(1.0, 1000.0)
        for _ in range(3):
            spread.add(value, rng.uniform(0.01, 5.0))
            assert spread.std == pytest.approx(0.0, abs=1e-4)
            assert spread.mean == pytest.approx(value)
