"""The configurations that come with the project load, build and learn from one batch."""

import re
from pathlib import Path

import pytest
import torch
from task_cases import take_steps, write_cifar10

from fulltilt.config import load_config, plan_of
from fulltilt.data import make_sensor_hdf5
from fulltilt.engine import build_workload

CONFIGS = Path(__file__).parents[3] / "configs"


def learn(workload, batch_size, n_steps):
    """Losses of steps on one batch, and the largest metric value after them."""
    torch.manual_seed(0)
    model, batch = workload.model(), workload.dataset().get_batch(list(range(batch_size)))
    inputs, targets = workload.prepare(batch, torch.Generator().manual_seed(0)) if workload.prepare else batch
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    optimizer = workload.optimizer(model.parameters())
    losses = take_steps(optimizer, lambda: workload.loss(model(*inputs), targets), n_steps)
    values = [metric(model(*inputs), targets) for metric in workload.metrics.values()]
    assert all(v.shape == (batch_size,) for v in values)
    return losses, max(v.max().item() for v in values)


def test_every_configuration_is_tested_here_or_there():
    """a new file without a test fails here"""
    there = {
        "stl10_config": "unit/engine/test_engine_phases.py",
        "elmo_depth-2_seed-42": "unit/engine/test_engine_language.py",
        "targets": "integration/test_integration_infer.py",
        **dict.fromkeys(("text_classifier", "sentence_encoder", "gpt"), "unit/tasks/test_tasks_text.py"),
        **dict.fromkeys(("distributed_experiment", "parallel_grid"), "unit/tasks/test_tasks_guide_configs.py"),
    }
    here = {"digits", "cifar10", "checking_gpu_optimization", "default"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == here | there.keys()
    for name, file in there.items():
        assert re.search(rf'\b{name}(\.yaml)?"', (Path(__file__).parents[2] / file).read_text()), name


def test_digits_learn():
    workload = build_workload(load_config(CONFIGS / "digits.yaml"))
    losses, accuracy = learn(workload, batch_size=64, n_steps=12)
    assert losses[-1] < 0.7 * losses[0]
    assert accuracy == 1.0
    assert len(workload.validation()) > 300


def test_cifar10_learns_with_its_transforms(tmp_path):
    write_cifar10(tmp_path, n_samples=8)
    config = load_config(CONFIGS / "cifar10.yaml", [f"data.path={tmp_path}", "optim.lr=0.02"])
    workload = build_workload(config)
    assert sum(p.numel() for p in workload.model().parameters()) == 691_674
    losses, _ = learn(workload, batch_size=8, n_steps=6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["checking_gpu_optimization", "default"])
def test_the_sensor_model_learns(name, tmp_path):
    path = make_sensor_hdf5(tmp_path / "events.h5", 40, n_sensors=60)
    workload = build_workload(load_config(CONFIGS / f"{name}.yaml", [f"data.path={path}", "optim.lr=0.01"]))
    geometry = workload.model().geometry_S3
    assert geometry.shape == (60, 3)
    assert geometry.abs().max() > 0
    losses, _ = learn(workload, batch_size=16, n_steps=30)
    assert losses[0] == pytest.approx(1.0, abs=0.2)  # noise of unit variance, predicted as zero
    assert losses[-1] < 0.97 * losses[0]


def test_the_guides_settings_reach_their_keys_and_benchmark_and_training_train_the_same():
    searched = load_config(CONFIGS / "checking_gpu_optimization.yaml")
    benchmark = searched.benchmark
    assert (benchmark.batch_sizes, benchmark.num_workers_options) == ([2**i for i in range(14)], [0, 2, 4, 8, 12, 16])
    assert (benchmark.steps_per_test, benchmark.test_mixed_precision, benchmark.test_pin_memory) == (10, True, True)
    trained = load_config(CONFIGS / "default.yaml")
    assert (searched.task, searched.model, searched.data) == (trained.task, trained.model, trained.data)
    assert plan_of(searched) == plan_of(trained)
    assert searched.optim.lr == trained.optim.lr
    assert (trained.speed.precision, trained.speed.accumulate, trained.optim.lr) == ("auto", 1, 1e-4)
    assert "use_amp" in trained.provenance["speed.precision"]
