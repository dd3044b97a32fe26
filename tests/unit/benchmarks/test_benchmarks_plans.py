"""The spaces of ``plan_quality`` and the request of ``trial_startup`` are what the benchmarks say they are."""

from __future__ import annotations

import math

import pytest
from benchmarks import trial_startup
from benchmarks.plan_quality import describe_duel, find_fastest, list_workloads
from benchmarks.trial_startup import Stopwatch, start_fresh_python

from fulltilt.levers import load_catalogue
from fulltilt.records import Trial
from fulltilt.tuner.question.source import resolve_target


def test_there_are_three_workloads_of_moderate_size_and_the_users_own_is_found_by_its_path(tmp_path):
    tasks = {}
    for workload in list_workloads(tmp_path):
        config = resolve_target(workload.target, workload.settings).config
        tasks[workload.name] = config.task.partition("(")[0]
        benchmark = config.benchmark
        sizes = [len(benchmark.batch_sizes), len(benchmark.num_workers_options), *map(len, benchmark.levers.values())]
        assert 8 <= math.prod(sizes) <= 24
        assert set(workload.axes) == {"batch_size", "num_workers", *benchmark.levers}
        assert set(workload.axes) <= load_catalogue().keys()
        assert benchmark.test_mixed_precision is benchmark.test_pin_memory is False
        assert config.run.device == "cpu"
    assert list(tasks.values()) == ["classification", "benchmarks._tabular:workload", "diffusion"]


def test_the_grids_best_is_the_fastest_row_that_ran():
    plan = trial_startup.build_request().plan
    rates = [("a", "ok", 90.0), ("b", "out_of_memory", None), ("c", "ok", 92.0), ("d", "ok", 91.9)]
    trials = [Trial(id=id, plan=plan, status=status, samples_per_s=rate) for id, status, rate in rates]
    assert find_fastest(trials).id == "c"


def test_a_duel_is_described_by_both_rates_and_their_ratio():
    arms = describe_duel("case", [(98.0, 100.0), (99.0, 100.0), (120.0, 100.0)])
    assert [(arm.arm, arm.metric, arm.median) for arm in arms] == [
        ("recommended", "samples_per_s", 99.0),
        ("grid's best", "samples_per_s", 100.0),
        ("recommended", "ratio_to_grid_best", 0.99),
    ]
    assert arms[-1].samples == (0.98, 0.99, 1.2)


def test_a_stage_counts_when_it_is_told_for_the_first_time_and_a_missing_one_is_an_error():
    watch = Stopwatch()
    told = [watch.take({"progress": {"stage": stage}}) for stage in ("configured", "built", "measuring", "measuring")]
    assert told == [False, False, True, False]
    seconds = [watch.read("")[stage] for stage in ("configured", "built", "measuring")]
    assert 0 <= seconds[0] <= seconds[1] <= seconds[2]

    early = Stopwatch()
    early.take({"progress": {"stage": "configured"}})
    early.take({"failure": {"exception_type": "DataError"}})
    with pytest.raises(RuntimeError, match="before it was built: no such file"):
        early.read("no such file\n")


def test_a_killed_trial_leaves_its_temporary_files_where_it_was_told_to(tmp_path, monkeypatch):
    usual, told = tmp_path / "usual", tmp_path / "told"
    usual.mkdir()
    told.mkdir()
    monkeypatch.setenv("TMPDIR", str(usual))
    assert start_fresh_python(trial_startup.build_request(), told)["measuring"] > 0
    assert list(usual.iterdir()) == []
    assert len(list(told.glob("fulltilt-*"))) == 1
