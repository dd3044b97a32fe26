"""Targets of a configuration, the load they need, and verdicts from raw figures."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fulltilt.config import config_for_object, config_from_values
from fulltilt.errors import ConfigError, DeviceError, RunFolderError, UsageError
from fulltilt.infer.check import open_check_folder, plan_check, read_previous
from fulltilt.infer.load.loop import Answer
from fulltilt.infer.measuring import Stopping
from fulltilt.infer.targets import (
    Figures,
    Load,
    Target,
    compute_dependence,
    count_at_most,
    decide,
    estimate_figure,
    judge,
    judge_load,
    plan_load,
    plan_targets,
)
from fulltilt.infer.training import describe_training, find_training
from fulltilt.records.run_folder import RunFolder
from fulltilt.stats import compute_proportion_interval

GUIDE = {"batch_latency_ms": {"p99": 100}, "memory_gib": 16, "samples_per_hour": 10000, "response_s": {"p95": 2}}


def build_config(*, run=None, speed=None, **targets):
    values = {"data": {"dataset": "digits", "batch_size": 8}, "model": "mlp", "targets": targets}
    return config_from_values({**values, "run": run or {"device": "cpu"}, "speed": speed or {}}, base_dir="")


def build_figures(*, responses_s=(0.1,), calls_s=(0.05,), memory_peak_gib=1.0, n_samples=8, block_s=0.1):
    return Figures(
        call_s=tuple(calls_s),
        response_s=tuple(responses_s),
        block_samples=(n_samples,) * 5,
        block_s=tuple(block_s * factor for factor in (0.98, 1.0, 1.02, 1.0, 1.0)),
        memory_peak_gib=memory_peak_gib,
    )


LOAD = Load(requests_per_s=2.0, samples_per_request=8, n_requests=368, seed=0)


def test_the_guides_four_targets_have_the_names_of_the_contract_and_368_requests():
    config = build_config(**GUIDE, requests_per_s=20)
    targets = plan_targets(config)
    names = ["batch_latency_ms_p99", "memory_gib", "samples_per_hour", "response_s_p95"]
    assert [target.name for target in targets] == names
    load = plan_load(config, targets)
    assert (load.n_requests, load.samples_per_request) == (368, 8)
    config = build_config(memory_gib=1, requests_per_s=20)
    load = plan_load(config, plan_targets(config))
    assert (load.requests_per_s, load.n_requests) == (None, 0), "no target is about the load"


@pytest.mark.parametrize(
    ("targets", "more", "refusal", "words"),
    [
        ({}, {}, ConfigError, "no target is stated; write some"),
        ({"requests_per_s": 5}, {}, ConfigError, "no target is stated"),
        ({"response_s": {"p95": 2}}, {}, ConfigError, "needs a load; say how many requests arrive a second"),
        ({"response_s": {"p97": 2}}, {}, ConfigError, r"(?s)p97.*p99"),
        ({"response_s": {"p99": 1}, "scenario": "offline"}, {}, ConfigError, "has no response times"),
        ({"memory_gib": 1}, {"run": {"device": [0, 1]}}, ConfigError, "names 2 devices"),
        ({"memory_gib": 1}, {"run": {"device": "cuda:77"}}, DeviceError, "cuda:77"),
        ({"memory_gib": 1}, {"weights": "."}, UsageError, "holds no checkpoint; name the folder of a training"),
    ],
)
def test_what_cannot_be_checked_is_refused_with_the_remedy(tmp_path, monkeypatch, targets, more, refusal, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(refusal, match=words):
        plan_check(build_config(**targets, run=more.get("run")), weights=more.get("weights"))


@pytest.mark.parametrize(
    ("interval", "limit", "is_floor", "verdict"),
    [
        ((1, 2), 2, False, "met"),
        ((1, 2), 1.5, False, "not proven"),
        ((1, 2), 0.9, False, "missed"),
        ((1, 2), 1, True, "met"),
        ((1, 2), 1.5, True, "not proven"),
        ((1, 2), 2.1, True, "missed"),
    ],
)
def test_a_target_is_met_or_missed_by_its_whole_interval(interval, limit, is_floor, verdict):
    assert decide(interval, limit, is_floor=is_floor) == verdict


def test_figures_are_judged_in_the_unit_of_their_target():
    figures = build_figures(responses_s=[0.2] * 368, calls_s=[0.05] * 368, memory_peak_gib=3.0)
    limits = {"batch_latency_ms": ("p99", 51), "response_s": ("max", 0.2), "memory_gib": (None, 2.9)}
    judged = [
        judge(Target(figure=figure, statistic=which, limit=limit), figures, LOAD)
        for figure, (which, limit) in {**limits, "samples_per_hour": (None, 200_000)}.items()
    ]
    assert [j.measured for j in judged] == pytest.approx([50, 0.2, 3.0, 80 * 3600])
    assert [j.verdict for j in judged] == ["met", "met", "missed", "met"]
    assert [j.met for j in judged] == [True, True, False, True]
    assert judged[2].ci95 == (3.0, 3.0)
    assert judged[0].null_reasons == {}


def test_a_mean_has_an_interval_around_it_and_one_slow_request_among_368_leaves_the_99th_percentile_unproven():
    calls_s = np.random.default_rng(0).gamma(2, 0.01, 200)
    figures = build_figures(calls_s=calls_s, responses_s=[0.1] * 367 + [9.0])
    judged = judge(Target(figure="batch_latency_ms", statistic="mean", limit=100), figures, LOAD)
    assert judged.measured == pytest.approx(1000 * calls_s.mean())
    assert judged.ci95[0] < judged.measured < judged.ci95[1] < 100
    judged = judge(Target(figure="response_s", statistic="p99", limit=1.0), figures, LOAD)
    assert (judged.measured, judged.ci95[1], judged.verdict, judged.met) == (0.1, math.inf, "not proven", False)


def test_a_load_that_outruns_the_model_is_missed_however_short_it_lasted():
    figures = build_figures(responses_s=[0.5] * 368)  # 10 requests/s back to back
    target = Target(figure="response_s", statistic="p95", limit=2.0)
    verdicts = {}
    for requests_per_s in (2.0, 10.0, 50.0):
        load = Load(requests_per_s=requests_per_s, samples_per_request=8, n_requests=368, seed=0)
        verdicts[requests_per_s] = judge_load(figures, load)
        assert judge(target, figures, load).verdict == verdicts[requests_per_s]
    assert verdicts == {2.0: "met", 10.0: "not proven", 50.0: "missed"}


def test_another_configuration_sets_the_earlier_training_aside_and_the_same_one_finds_it(tmp_path):
    def find(**sections):
        with open_check_folder(plan_check(build_config(memory_gib=1, **sections)), tmp_path) as folder:
            return find_training(tmp_path), folder.set_aside

    def finish_training():
        (tmp_path / "training").mkdir()
        (tmp_path / "training" / "checkpoint.pt").touch()
        (tmp_path / "training.json").write_text('{"reason": "finished"}')

    assert find() == (None, None)
    finish_training()
    assert find() == (tmp_path / "training", None)
    found, set_aside = find(speed={"precision": "bf16"})
    assert found is None
    assert "set aside as training-1, training-1.json (changed: training.speed.precision fp32 → bf16)" in set_aside
    assert (tmp_path / "training-1" / "checkpoint.pt").exists()


@pytest.mark.parametrize("content", ["", "[1]", "3", '{"reason"', "\0"])
def test_a_damaged_result_of_the_training_means_that_there_is_none(tmp_path, content):
    (tmp_path / "training.json").write_text(content)
    assert find_training(tmp_path) is None


def test_lines_of_the_history_that_are_damaged_tell_nothing(tmp_path, monkeypatch):
    result = {"device": "cpu", "weights": None, "targets": [{"name": "memory_gib", "measured": 0.5}]}
    result["load"] = {"requests_per_s": 2.0, "samples_per_request": 8, "scenario": "server"}
    lines = ["[]", "5", "{}", '{"device"', '{"device": "cpu", "weights": 3, "load": []}', json.dumps(result), "null"]
    (tmp_path / "history.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("fulltilt.infer.check.encode", lambda given: given)
    assert read_previous(SimpleNamespace(path=tmp_path), result) == {"memory_gib": 0.5}


def test_no_more_arrivals_are_drawn_than_memory_takes():
    assert count_at_most(Load(requests_per_s=1e12, samples_per_request=1, n_requests=368, seed=0)) == 1_000_000


def test_the_folder_of_a_workload_has_the_name_that_training_and_search_give_it():
    config = config_for_object("my_module:workload", ["targets.memory_gib=1", "run.device=cpu"])
    assert plan_check(config).name == "my_module_workload"


def test_the_folder_of_a_training_is_never_taken_over(tmp_path):
    with RunFolder(tmp_path, fingerprint_parts={}, command="train", results=("checkpoint.pt",)):
        (tmp_path / "checkpoint.pt").touch()
    with pytest.raises(RunFolderError, match="holds the results of another run"):
        open_check_folder(plan_check(build_config(memory_gib=1)), tmp_path)


def test_a_training_is_another_one_with_other_epochs_and_the_same_with_other_targets():
    base = describe_training(build_config(memory_gib=1))
    assert describe_training(build_config(memory_gib=2, requests_per_s=5)) == base
    for other in (
        {"run": {"epochs": 3, "device": "cpu"}},
        {"speed": {"precision": "bf16"}},
        {"speed": {"compile": True}},
    ):
        assert describe_training(build_config(**other)) != base


def simulate_queue(utilization, n, seed):
    """Responses of one worker that takes a second for each request, from an empty queue on; synthetic."""
    rng = np.random.default_rng(seed)
    responses, waiting = np.empty(n), 0.0
    for i, gap in enumerate(rng.exponential(1 / utilization, n)):
        waiting = max(0.0, waiting - gap) + 1
        responses[i] = waiting
    return responses


@pytest.mark.parametrize("utilization", [0.2, 0.6])
def test_the_interval_of_a_response_holds_the_truth_although_requests_wait_for_each_other(utilization):
    truth = float(np.quantile(simulate_queue(utilization, 200_000, 0)[1000:], 0.95))
    load = Load(requests_per_s=utilization, samples_per_request=1, n_requests=100, seed=0)
    n, hits = 100, 0
    for seed in range(1, n + 1):
        values = simulate_queue(utilization, 120 if utilization < 0.5 else 1000, seed)
        figures = build_figures(responses_s=values, calls_s=[1.0], n_samples=1, block_s=1.0)
        low, high = estimate_figure("response_s", "p95", figures, load).ci95
        hits += low <= truth <= high
    assert compute_proportion_interval(hits, n, confidence=0.99)[1] >= 0.95, f"{hits} of {n}"


def test_too_few_requests_for_a_busy_worker_prove_nothing():
    load = Load(requests_per_s=0.8, samples_per_request=1, n_requests=100, seed=0)
    figures = build_figures(responses_s=simulate_queue(0.8, 100, 1), calls_s=[1.0], n_samples=1, block_s=1.0)
    judged = judge(Target(figure="response_s", statistic="p95", limit=1000.0), figures, load)
    assert (judged.verdict, judged.ci95[1]) == ("not proven", math.inf)
    assert judged.null_reasons == {"ci95": "too few requests for a bound"}
    assert count_at_most(load) == 100, "no fewer than planned, which is more than MAX_LOAD_S allows"


@pytest.mark.parametrize(("scenario", "samples"), [("single", 1), ("multi", 8), ("offline", 8)])
def test_streams_and_offline_need_no_rate_and_have_samples_of_their_own(scenario, samples):
    config = build_config(batch_latency_ms={"p99": 100}, scenario=scenario, requests_per_s=5)
    load = plan_load(config, plan_targets(config))
    assert (load.scenario, load.requests_per_s, load.samples_per_request) == (scenario, None, samples)
    assert (load.n_requests, compute_dependence(load, build_figures())) == (368, 1)


def find_end(calls_s, n_planned=368):
    """Return after how many answers the load ends, and how often it was looked at."""
    targets = [Target(figure="batch_latency_ms", statistic="p99", limit=100.0)]
    targets += [Target(figure="memory_gib", statistic=None, limit=1)]
    answers, looks = [], []
    load = dataclasses.replace(LOAD, requests_per_s=20.0, n_requests=n_planned)
    is_enough = Stopping(targets, load, build_figures(), [], looks.append)
    for call_s in calls_s:
        answers.append(Answer(due_s=0.0, start_s=0.0, end_s=0.1, call_s=call_s))
        if is_enough(answers):
            break
    return len(answers), len(looks)


def test_a_load_ends_with_its_plan_where_that_decides_and_goes_on_where_it_does_not():
    assert find_end([0.05] * 2000)[0] == 368
    once_late = [0.05] * 100 + [0.5] + [0.05] * 2000
    n_sent, n_looks = find_end(once_late)
    assert 612 < n_sent < 1300, "one hiccup leaves p99 of 368 open, the test decides later"
    assert n_looks < 60, "a look makes a request wait"


def test_a_load_that_is_refused_ends_before_its_plan_is_through():
    assert find_end([0.5] * 368)[0] == 51
    assert find_end([0.5] * 368, n_planned=20)[0] == 20


def test_more_requests_than_planned_are_bounded_in_number_and_time():
    assert count_at_most(dataclasses.replace(LOAD, n_requests=100)) == 240, "two minutes at 2 a second"
    assert count_at_most(LOAD) == 368, "no fewer than planned"
    assert count_at_most(Load(requests_per_s=None, samples_per_request=1, n_requests=50, seed=0)) == 200
