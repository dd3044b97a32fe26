"""``MetricsTracker``: the guide's files, their figures, and what is left of them after a crash."""

from __future__ import annotations

import csv
import math
import os
import random
import statistics
from pathlib import Path

import pytest
from listener_events import ENDED, epoch_done, evaluated, started, steps_done, tell

from fulltilt.errors import StorageError, UsageError
from fulltilt.listeners import MetricsTracker
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
    return epoch_done(epoch=number + 1, step=20 * (number + 1), loss=loss, metrics=metrics, seconds=seconds)


def evaluate(number: int, loss: float, **more: float) -> Evaluated:
    metrics = {"loss": loss, "accuracy": 0.2 * number, "top5": 0.5, "forward_loss": loss + 1, "backward_loss": loss - 1}
    metrics |= {"perplexity": math.exp(loss), **more}
    return evaluated(epoch=number + 1, step=20 * (number + 1), metrics=metrics)


def track(folder: Path, *events, **changes) -> None:
    tell(build_tracker(folder / "m"), start(folder, **changes), *events)


def read_efficiency(folder: Path) -> dict[str, dict[str, str]]:
    return {row["metric"]: row for row in read(folder / "m" / "efficiency_summary.csv")}


def test_summaries_have_the_guides_columns_and_figures_of_all_batches(tmp_path):
    events = [steps(10, 2.0, forward=4.0), steps(20, 1.0, n_samples=300, forward=6.0), epoch(0, 3.0), evaluate(0, 2.5)]
    track(tmp_path, *events, steps(30, 4.0), epoch(1, 2.0, seconds=20.0), evaluate(1, 2.75), ENDED)
    rows = read_efficiency(tmp_path)
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
    expected = {"best_loss": 2.5, "final_loss": 2.75, "best_accuracy": 0.2, "best_perplexity": math.exp(2.5)}
    expected |= {"avg_epoch_time": 15.0, "total_training_time": 30.0}
    assert {name: float(summary[name]) for name in expected} == expected
    assert summary["split"] == "val"


def test_without_validation_the_summary_is_of_training_and_what_nobody_measured_is_empty_and_says_why(tmp_path):
    track(tmp_path, steps(10, 2.0), epoch(0, 3.0), epoch(1, 3.5))
    row = read_efficiency(tmp_path)["forward_time"]
    assert (row["mean"], row["std"]) == ("", "")
    assert "did not time" in row["note"]
    (summary,) = read(tmp_path / "m" / "training_summary.csv")
    assert (summary["split"], summary["best_loss"], summary["final_loss"]) == ("train", "3.0", "3.5")


def test_every_pass_has_a_row_and_every_group_of_words_its_error(tmp_path):
    rare = {"share/rare": 0.25, "miss/rare": 0.2, "error_pct/rare": 80.0}
    track(tmp_path, epoch(0, 3.0), evaluate(0, 2.5, **rare))
    train, val = read(tmp_path / "m" / "training_metrics.csv")
    found = [train[name] for name in ("split", "total_loss", "epoch_time", "top5_accuracy")]
    found += [val[name] for name in ("split", "forward_loss", "backward_loss", "top5_accuracy")]
    assert found == ["train", "3.0", "10.0", "", "val", "3.5", "1.5", "0.5"]
    (error,) = read(tmp_path / "m" / "error_analysis.csv")
    assert train["epoch"] == val["epoch"] == "1"
    assert error == {"epoch": "1", "step": "20", "category": "rare", "share_pct": "25.0", "error_pct": "80.0"}


def test_a_resumed_run_counts_every_step_once(tmp_path):
    whole, parts = tmp_path / "a", tmp_path / "b"
    events = [steps(10, 2.0), steps(20, 1.0), epoch(0, 3.0), evaluate(0, 2.5), steps(30, 3.0), steps(40, 1.5)]
    track(whole, *events, epoch(1, 2.0))
    lost = events[4], epoch(1, 99.0)  # the checkpoint is older
    track(parts, *events[:4], CheckpointStarted(epoch=1, step=20), *lost)
    track(parts, *events[4:], epoch(1, 2.0), first_step=20)
    for name in ("efficiency_summary.csv", "training_summary.csv"):
        mine, wanted = ([read_numbers(row) for row in read(folder / "m" / name)] for folder in (parts, whole))
        assert mine == [pytest.approx(row) for row in wanted]
    assert [row["step"] for row in read(parts / "m" / "efficiency_metrics.csv")] == ["10", "20", "30", "40"]


def read_numbers(row: dict[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value[:1].isdigit()}


def test_what_was_held_is_stored_before_a_checkpoint(tmp_path):
    """What another reader of the file sees is what a killed process leaves."""
    tracker = build_tracker(tmp_path / "m", clock=lambda: 0.0)
    tell(tracker, start(tmp_path), steps(10, 1.0), steps(20, 1.0), CheckpointStarted(epoch=0, step=20), steps(30, 1.0))
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


def test_rows_that_cannot_be_written_leave_the_other_files(tmp_path):
    (tmp_path / "m" / "efficiency_metrics.csv").mkdir(parents=True)
    tracker = build_tracker(tmp_path / "m")
    with pytest.raises(StorageError, match=r"efficiency_metrics\.csv"):
        tell(tracker, start(tmp_path), steps(10, 2.0))
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


def test_memory_is_read_from_this_process_on_the_device_that_trains(tmp_path):
    tell(MetricsTracker(tmp_path / "m"), start(tmp_path), steps(10, 1.0), epoch(0, 1.0))
    row = read_efficiency(tmp_path)["memory_per_sample"]
    assert 10 / 32 < float(row["mean"]) < 100_000 / 32
    assert "resident set" in row["note"]
    asked = []
    tracker = MetricsTracker(tmp_path / "gpu", read_memory=asked.append)
    tell(tracker, start(tmp_path, device="cuda:1", pid=os.getpid()), steps(10, 2.0))
    assert asked == ["cuda:1"]


@pytest.mark.parametrize("where", [{"n_ranks": 2}, {"pid": os.getppid()}])
def test_the_memory_of_a_process_that_does_not_train_is_not_told(tmp_path, where):
    """With ranks or max_restarts the listeners live in a process beside the training."""
    track(tmp_path, steps(10, 2.0), epoch(0, 3.0), **where)
    row = read_efficiency(tmp_path)["memory_per_sample"]
    assert row["mean"] == ""
    assert "processes of its own" in row["note"]
    assert read(tmp_path / "m" / "training_metrics.csv")[0]["memory_gib"] == ""


def test_a_spread_is_that_of_a_textbook_and_never_the_root_of_a_negative():
    """Bug: by rounding the sum of squares came out below zero, and its root ended the training."""
    values, many = [math.sin(i) + 1000.0 for i in range(300)], Spread()
    for value in values:
        many.add(value, 1.0)
    assert many.std == pytest.approx(statistics.pstdev(values), rel=1e-6)
    rng = random.Random(0)
    for _ in range(2000):
        spread = Spread()
        value = rng.uniform(1.0, 1000.0)
        for _ in range(3):
            spread.add(value, rng.uniform(0.01, 5.0))
            assert spread.std == pytest.approx(0.0, abs=1e-4)
            assert spread.mean == pytest.approx(value)
