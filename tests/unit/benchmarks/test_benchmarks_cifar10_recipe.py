"""What ``cifar10_recipe`` trains, and when a seed has reached its goal."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from benchmarks import cifar10_recipe
from benchmarks._runner import Context
from benchmarks.cifar10_recipe import RECIPE, build_config, find_seconds_to_goal

from fulltilt.config import load_config


def build_result(*accuracies):
    evaluations = [
        SimpleNamespace(metrics={"accuracy": accuracy}, training_seconds=10.0 * number)
        for number, accuracy in enumerate(accuracies, 1)
    ]
    return SimpleNamespace(evaluations=evaluations, **vars(evaluations[-1]))


def test_a_gpu_trains_the_recipe_as_it_stands_and_a_cpu_a_small_one(tmp_path):
    plain = load_config(RECIPE)
    for device, is_whole in (("cuda", True), ("cpu", False)):
        config = build_config(Context(device=device, quick=False), tmp_path, seed=3)
        assert (config.run.seed, config.run.device, config.data.path) == (3, device, str(tmp_path))
        assert (config.model == plain.model) is is_whole
        assert (config.run.epochs == plain.run.epochs) is is_whole
        assert config.optim.optimizer == plain.optim.optimizer


def test_the_time_to_the_goal_is_that_of_the_first_evaluation_there():
    assert find_seconds_to_goal(build_result(0.90, 0.9399, 0.94, 0.95)) == 30.0
    assert find_seconds_to_goal(build_result(0.90, 0.9399)) is None


@pytest.mark.parametrize(("device", "met"), [("cuda", False), ("cpu", None)])
def test_only_the_whole_recipe_is_held_against_the_goal(device, met, monkeypatch, tmp_path):
    monkeypatch.setattr(cifar10_recipe, "find_data", lambda name: tmp_path)
    answers = iter([build_result(0.9, 0.93), *[build_result(0.9, 0.92)] * 5])
    monkeypatch.setattr(cifar10_recipe, "train_seed", lambda config: next(answers))
    findings = cifar10_recipe.run(Context(device=device, quick=False))
    assert [arm.metric for arm in findings.arms] == ["test_accuracy_pct", "training_seconds"], "no seed got there"
    assert [target.met for target in findings.targets] == ([met] if device == "cuda" else [])
    assert findings.notes[0] == "0 of 6 seeds reach 94 %"


def test_the_recipe_states_the_accuracy_of_its_result_file():
    """62.1 % of one run stood there, without a result file."""
    head = RECIPE.read_text("utf-8").partition("task:")[0]
    assert "python -m benchmarks cifar10_recipe" in head
    assert head.count("%") == 3, "the goal, what is measured, and what is cited"
    accuracy, _ = json.loads((RECIPE.parents[1] / "benchmarks/results/cifar10_recipe-cpu.json").read_text())["arms"]
    low, high = accuracy["ci95"]
    said = f"{accuracy['median']:.1f} % of the test\n# images ({low:.1f} to {high:.1f}), n = {accuracy['n']} seeds"
    assert said in head
