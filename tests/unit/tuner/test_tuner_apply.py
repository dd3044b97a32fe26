"""The recommended plan in the user's own file."""

from __future__ import annotations

import dataclasses
import types

import pytest

from fulltilt.config import load_config, plan_of
from fulltilt.tuner.apply import apply_result, plan_changes
from fulltilt.tuner.recommend import LearningRate

TEXT = "model: small_cnn  # mine\ndata: {dataset: digits, batch_size: 32}\noptim: {lr: 0.1}  # tuned by hand\n"


def make_result(plan, rate):
    trial = types.SimpleNamespace(plan=plan, samples_per_s=1234.0)
    return types.SimpleNamespace(
        picks=types.SimpleNamespace(recommended=types.SimpleNamespace(trial=trial)), learning_rate=rate
    )


@pytest.fixture
def config(tmp_path):
    (tmp_path / "a.yaml").write_text(TEXT)
    return load_config(tmp_path / "a.yaml")


def test_only_what_differs_is_written_and_comments_stay(config, tmp_path):
    plan = plan_of(config).replace(batch_size=128, compile=True)
    result = make_result(plan, LearningRate(rule="sqrt", start=0.1, to=0.2))
    assert plan_changes(result, config) == {"data.batch_size": 128, "speed.compile": True, "optim.lr": 0.2}
    diff = apply_result(result, tmp_path / "a.yaml")
    written = (tmp_path / "a.yaml").read_text()
    assert "+" in diff
    assert "# mine" in written
    assert "# tuned by hand" in written
    assert plan_of(load_config(tmp_path / "a.yaml")) == plan
    assert load_config(tmp_path / "a.yaml").optim.lr == 0.2


def test_a_file_that_holds_the_pick_already_is_left_alone(config, tmp_path):
    result = make_result(plan_of(config), LearningRate(rule="none", start=0.1, to=0.1))
    assert apply_result(result, tmp_path / "a.yaml") == ""
    assert (tmp_path / "a.yaml").read_text() == TEXT


def test_a_rate_that_is_not_known_is_not_written(config):
    rate = LearningRate(rule="sqrt", start=None, to=None)
    plan = plan_of(config).replace(num_workers=2)
    assert plan_changes(make_result(plan, rate), config) == {"data.num_workers": 2}
    known = dataclasses.replace(rate, start=0.1, to=0.1)
    assert "optim.lr" not in plan_changes(make_result(plan, known), config)
