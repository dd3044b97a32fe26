"""The language model through the whole engine: it learns, resumes bit for bit, and its figures reach the files."""

import csv
from pathlib import Path

import pytest

from fulltilt.config import config_from_values, load_config
from fulltilt.data import prepare_text
from fulltilt.engine import build_workload
from fulltilt.engine.loop.train import train
from fulltilt.listeners import MetricsTracker
from fulltilt.records import StepsDone

CONFIG = Path(__file__).parents[3] / "configs" / "elmo_depth-2_seed-42.yaml"
TEXT = "the cat sat on the mat , and 3 dogs saw it .\nwhy would a dog not sit ?\n" * 60


class Losses:
    def __init__(self):
        self.by_step: dict[int, float] = {}

    def __call__(self, event):
        if isinstance(event, StepsDone):
            self.by_step[event.step] = event.loss


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    prepare_text([tmp_path / "t.txt"], tmp_path / "tokens")
    return tmp_path


def build_config(folder: Path, *, task: str = "language_model(training_metrics=true, error_analysis=true)", **run):
    return config_from_values(
        {
            "task": task,
            "model": "bilm(depth=2, embedding=12, hidden=16, projection=8, dropout=0.1)",
            "data": {"dataset": "text(seq_len=8)", "path": str(folder / "tokens"), "batch_size": 16},
            "optim": {"optimizer": "adam", "lr": 2e-2},
            "run": {"epochs": 3, "device": "cpu", "log_every_n_steps": 1, **run},
        },
        base_dir=str(folder),
    )


@pytest.mark.parametrize("task", ["language_model(softmax=chunked)", "language_model(softmax=sampled, n_sampled=12)"])
def test_a_run_that_was_left_goes_on_bit_for_bit(folder, task):
    config, whole, parts = build_config(folder, task=task), Losses(), Losses()
    expected = train(config, out_dir=folder / "whole", listeners=[whole], epochs=1)
    train(config, out_dir=folder / "parts", listeners=[parts], epochs=1, max_steps=4)
    assert max(parts.by_step) == 4 < max(whole.by_step)
    resumed = train(config, out_dir=folder / "parts", listeners=[parts], epochs=1, resume=True)
    assert parts.by_step == whole.by_step
    assert resumed.metrics == expected.metrics


def test_it_learns_and_its_files_say_so(folder):
    tracker = MetricsTracker(folder / "metrics")
    result = train(build_config(folder, checkpoint_every=None), out_dir=folder / "run", listeners=[tracker])
    with (folder / "metrics" / "training_metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["split"] for row in rows] == ["train", "val"] * 3
    losses = [float(row["total_loss"]) for row in rows if row["split"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    assert all(0 <= float(row["accuracy"]) <= float(row["top5_accuracy"]) <= 1 for row in rows)
    with (folder / "metrics" / "error_analysis.csv").open() as stream:
        errors = list(csv.DictReader(stream))
    shares = [float(row["share_pct"]) for row in errors if row["epoch"] == "2"]
    assert sum(shares) == pytest.approx(100, rel=1e-4)
    assert {row["category"] for row in errors} >= {"line_end", "punctuation", "number"}
    assert result.metrics["perplexity"] < 20
    with (folder / "metrics" / "efficiency_summary.csv").open() as stream:
        efficiency = {row["metric"]: row for row in csv.DictReader(stream)}
    assert float(efficiency["forward_time"]["mean"]) > 0, "measured by the loop, a step an interval"
    step_ms = 1e3 * 16 / float(efficiency["throughput"]["mean"])
    assert float(efficiency["forward_time"]["mean"]) < 3 * step_ms


def test_the_guides_configuration_builds_the_guides_model(folder):
    config = load_config(CONFIG, [f"data.path={folder / 'tokens'}"])
    assert (config.data.batch_size, config.data.num_workers, config.data.prefetch_factor) == (32, 6, 4)
    assert config.data.pin_memory
    assert config.data.persistent_workers
    assert config.run.seed == 42
    workload = build_workload(config)
    encoder = workload.model().encoder
    assert encoder.embedding.embedding_dim == 256
    for stack in (encoder.forwards, encoder.backwards):
        (lstm,) = stack.layers
        assert (lstm.num_layers, lstm.hidden_size, lstm.proj_size) == (2, 512, 128)
    assert workload.training_metrics
