"""The recommended plan in the user's own file."""

from __future__ import annotations

import dataclasses
import types

import pytest

from fulltilt.config import load_config, plan_of
from fulltilt.levers import compute_plan_digest
from fulltilt.records import PhasesMs
from fulltilt.tuner.apply import apply_result, plan_changes
from fulltilt.tuner.recommend import LearningRate

TEXT = "model: small_cnn  # mine\ndata: {dataset: digits, batch_size: 32}\noptim: {lr: 0.1}  # tuned by hand\n"


def make_result(plan, rate, *, ci95=None, runs=(), **measured):
    trial = types.SimpleNamespace(
        plan=plan,
        samples_per_s=1234.0,
        samples_per_s_ci95=ci95,
        **{"observed": {}, "phases_ms": None, "n_devices": 1, **measured},
    )
    pick = types.SimpleNamespace(trial=trial, runs_samples_per_s=runs)
    return types.SimpleNamespace(
        picks=types.SimpleNamespace(recommended=pick),
        learning_rate=rate,
        machine=types.SimpleNamespace(hostname_hash="00ab12"),
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


def test_what_was_measured_travels_with_the_settings(config, tmp_path):
    plan = plan_of(config).replace(batch_size=128)
    phases = PhasesMs(data_wait=1.5, h2d=None, forward=1, backward=1, optimizer=1, other=0, step=6.0)
    rate = LearningRate(rule="none", start=0.1, to=0.1)
    result = make_result(
        plan, rate, ci95=(1200.123, 1300.0), runs=(1190.0, 1250.0), observed={"threads": 2}, phases_ms=phases
    )
    assert "promise" in apply_result(result, tmp_path / "a.yaml")
    applied = load_config(tmp_path / "a.yaml")
    promise = applied.run.promise
    assert promise.samples_per_s == [1190.0, 1300.0]  # the row's interval, widened to its runs side by side
    assert (promise.machine, promise.threads, promise.data_wait_pct) == ("00ab12", 2, 25.0)
    assert promise.plan == compute_plan_digest(plan) == compute_plan_digest(plan_of(applied))
    assert apply_result(result, tmp_path / "a.yaml") == ""


def test_a_promise_of_an_earlier_search_gives_way(config, tmp_path):
    rate = LearningRate(rule="none", start=0.1, to=0.1)
    for low in (100.0, 200.0):
        runs = (low + 1, 299.0)
        apply_result(make_result(plan_of(config), rate, ci95=(low, 300.0), runs=runs), tmp_path / "a.yaml")
    assert load_config(tmp_path / "a.yaml").run.promise.samples_per_s == [200.0, 300.0]
    assert (tmp_path / "a.yaml").read_text().count("promise") == 1


def test_one_run_is_no_promise(config, tmp_path):
    """A search cut short by its budget promised what a single contended trial had seen."""
    rate = LearningRate(rule="none", start=0.1, to=0.1)
    result = make_result(plan_of(config).replace(num_workers=2), rate, ci95=(100.0, 300.0))
    assert "num_workers" in apply_result(result, tmp_path / "a.yaml")
    assert load_config(tmp_path / "a.yaml").run.promise is None


def test_a_promise_outlives_a_lever_that_is_added_later(config):
    plan = plan_of(config).replace(batch_size=128)
    older = {name: value for name, value in plan.items() if name != "compile"}
    assert compute_plan_digest(older) == compute_plan_digest(plan)
    assert compute_plan_digest(plan.replace(compile=True)) != compute_plan_digest(plan)


@pytest.mark.parametrize(("measured", "written"), [(1, None), (2, 2)])
def test_a_file_gets_a_promise_of_as_many_processes_as_it_trains_in(tmp_path, measured, written):
    """What was measured on one device says nothing of several."""
    (tmp_path / "a.yaml").write_text(TEXT + "run: {device: cpu, n_ranks: 2}\n")
    config = load_config(tmp_path / "a.yaml")
    rate = LearningRate(rule="none", start=0.1, to=0.1)
    plan, rates = plan_of(config).replace(num_workers=2), {"ci95": (100.0, 300.0), "runs": (150.0, 200.0)}
    result = make_result(plan, rate, n_devices=measured, **rates)
    assert "num_workers" in apply_result(result, tmp_path / "a.yaml")
    promise = load_config(tmp_path / "a.yaml").run.promise
    assert (promise.n_ranks if promise is not None else None) == written
