"""The language model through the whole engine: it learns, resumes bit for bit, and its figures reach the files."""

import csv
from pathlib import Path

import pytest
from step_cases import build_language_config
from training_cases import Recorder

from fulltilt.config import load_config
from fulltilt.engine import build_workload
from fulltilt.engine.loop.train import train
from fulltilt.listeners import MetricsTracker
from fulltilt.records import StepsDone

CONFIG = Path(__file__).parents[3] / "configs" / "elmo_depth-2_seed-42.yaml"


@pytest.mark.parametrize("task", ["language_model(softmax=chunked)", "language_model(softmax=sampled, n_sampled=12)"])
def test_a_run_that_was_left_goes_on_bit_for_bit(tmp_path, task):
    config, whole, parts = build_language_config(tmp_path, task=task, run__epochs=1), Recorder(), Recorder()
    train(config, out_dir=tmp_path / "whole", listeners=[whole])
    train(config, out_dir=tmp_path / "parts", listeners=[parts], max_steps=4)
    assert len(parts.of(StepsDone)) == 4 < len(whole.of(StepsDone))
    train(config, out_dir=tmp_path / "parts", listeners=[parts], resume=True)
    assert parts.list_figures() == whole.list_figures()


def test_it_learns_and_its_files_say_so(tmp_path):
    tracker, config = MetricsTracker(tmp_path / "metrics"), build_language_config(tmp_path, run__checkpoint_every=None)
    result = train(config, out_dir=tmp_path / "run", listeners=[tracker])
    rows, errors, efficiency = (
        list(csv.DictReader((tmp_path / "metrics" / f"{name}.csv").read_text().splitlines()))
        for name in ("training_metrics", "error_analysis", "efficiency_summary")
    )
    assert [row["split"] for row in rows] == ["train", "val"] * 3
    losses = [float(row["total_loss"]) for row in rows if row["split"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    assert all(0 <= float(row["accuracy"]) <= float(row["top5_accuracy"]) <= 1 for row in rows)
    shares = [float(row["share_pct"]) for row in errors if row["epoch"] == "3"]
    assert sum(shares) == pytest.approx(100, rel=1e-4)
    assert {row["category"] for row in errors} >= {"line_end", "punctuation", "number"}
    assert result.metrics["perplexity"] < 20
    means = {row["metric"]: float(row["mean"]) for row in efficiency}
    assert 0 < means["forward_time"] < 3 * 1e3 * 16 / means["throughput"], "measured by the loop, a step an interval"


def test_the_guides_configuration_builds_the_guides_model(tmp_path):
    config = load_config(CONFIG, [f"data.path={build_language_config(tmp_path).data.path}"])
    data = config.data
    assert (data.batch_size, data.num_workers, data.prefetch_factor, config.run.seed) == (32, 6, 4, 42)
    assert (data.pin_memory, data.persistent_workers) == (True, True)
    workload = build_workload(config)
    encoder = workload.model().encoder
    assert encoder.embedding.embedding_dim == 256
    for stack in (encoder.forwards, encoder.backwards):
        (lstm,) = stack.layers
        assert (lstm.num_layers, lstm.hidden_size, lstm.proj_size) == (2, 512, 128)
    assert workload.training_metrics
