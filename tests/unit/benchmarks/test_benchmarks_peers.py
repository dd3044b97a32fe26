"""``batch_finders``: what a peer ran is recorded as it was, its failures are real, and figures follow from the runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks import _peers_finders, batch_finders
from benchmarks._peers_finders import FINDERS, Finder, find_with_timm, is_available
from benchmarks._peers_job import Attempt, Job
from benchmarks._peers_process import Found, Search, describe_death, read_unfinished, run_search
from benchmarks._peers_workloads import CASES, cnn, transformer
from benchmarks._runner import ROOT, Context, silence_peers
from benchmarks.batch_finders import (
    OURS,
    build_settings,
    describe_findings,
    describe_searches,
    describe_tune,
    judge_searches,
    measure_again,
)

from fulltilt.config import plan_of
from fulltilt.levers import Facts, default_plan
from fulltilt.records import Trial, encode
from fulltilt.tuner import build_space
from fulltilt.tuner.question.source import resolve_target

FULL, QUICK = Context(device="cpu", quick=False), Context(device="cpu", quick=True)
CASE = CASES["digits, small transformer"]
GIB = 2**30

LIMITED_RUN = """
import contextlib, json, torch
from benchmarks._peers_job import Job, limit_memory
from benchmarks._peers_workloads import transformer

torch.set_num_threads(1)
job = Job(transformer, device="cpu", n_steps=1)
job.run_steps(2)
limit_memory(job.device, 128 * 2**20)
for batch_size in (64, 8192, 64):
    with contextlib.suppress(RuntimeError):
        job.run_steps(batch_size)
print(json.dumps([[a.batch_size, a.largest_step, a.status] for a in job.attempts[1:]]))
"""


@pytest.fixture
def job():
    return Job(transformer, device="cpu", n_steps=2)


# The job: what a finder ran.


def test_steps_that_ended_are_counted_and_told_when_they_begin(job):
    told = []
    job.on_attempt = lambda job: told.append(len(job.attempts))
    job.run_steps(4)
    job.run_steps(2)
    assert job.attempts == [Attempt(batch_size=size, largest_step=size, status="ok") for size in (4, 2)]
    assert told == [1, 2]
    first, second = job.build_model(), job.build_model()
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("batch_size", "steps"), [(4, [4, 2, 4, 2, 4]), (16, [6] * 5)])
def test_short_data_begins_again_and_bounds_the_step_that_counts(batch_size, steps):
    seen = []
    job = Job(cnn, device="cpu", n_steps=5)
    job.dataset = torch.utils.data.Subset(job.dataset, range(6))
    job.workload = dataclasses.replace(
        cnn, loss=lambda outputs, targets: seen.append(len(targets)) or outputs.square().mean()
    )
    job.run_steps(batch_size)
    assert seen == steps
    assert [(a.batch_size, a.largest_step) for a in job.attempts] == [(batch_size, max(steps))]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
    ],
)
def test_a_failure_is_recorded_and_handed_on(job, error, status):
    def fail(outputs, targets):
        raise error

    job.workload = dataclasses.replace(transformer, loss=fail)
    with pytest.raises(type(error)):
        job.run_steps(4)
    (attempt,) = job.attempts
    assert (attempt.status, attempt.largest_step) == (status, 0)
    assert attempt.said.startswith(type(error).__name__)


def test_a_batch_above_the_limit_fails_in_the_allocator_and_the_next_one_runs():
    done = subprocess.run([sys.executable, "-c", LIMITED_RUN], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[64, 64, "ok"], [8192, 0, "out_of_memory"], [64, 64, "ok"]]


# The finders.


def build_fitting(largest_fitting: int, words: str) -> Job:
    """A job whose steps fail above a batch size, with the words given."""

    def compute_loss(outputs, targets):
        if len(targets) > largest_fitting:
            raise RuntimeError(words)
        return torch.nn.functional.cross_entropy(outputs, targets)

    return Job(dataclasses.replace(transformer, loss=compute_loss), device="cpu", n_steps=1)


CPU_WORDS = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried …"


def get_peer(name: str) -> Finder:
    if not is_available(FINDERS[name]):
        pytest.skip(f"{FINDERS[name].package} is not installed here")
    return FINDERS[name]


@pytest.mark.parametrize(
    ("start", "fitting", "largest", "tried"),
    [("largest", 60, 80, [80, 72, 64, 57]), ("default", 4096, 8192, [128])],  # down by tenths; no further than 128
)
def test_accelerate_ends_at_the_first_batch_that_fits(start, fitting, largest, tried):
    job = build_fitting(fitting, CPU_WORDS)
    assert get_peer(f"accelerate, {start} start").find(job, largest) == tried[-1]
    assert [a.batch_size for a in job.attempts] == tried
    assert [a.status for a in job.attempts] == [*["out_of_memory"] * (len(tried) - 1), "ok"]


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_lightning_is_recorded_from_inside_its_own_steps(mode):
    finder = get_peer(f"lightning, {mode}")
    job = build_fitting(20, CPU_WORDS)
    with silence_peers():
        found = finder.find(job, 8192)
    tried = [(a.batch_size, a.status) for a in job.attempts]
    assert tried[:5] == [(2, "ok"), (4, "ok"), (8, "ok"), (16, "ok"), (32, "out_of_memory")]
    assert found <= 20
    assert all(a.largest_step == a.batch_size for a in job.attempts if a.status == "ok")


@pytest.fixture
def timm_rules(monkeypatch):
    """Rules of the same kind as timm's, which is not installed in every environment."""
    rules = SimpleNamespace(
        check_batch_size_retry=lambda words: "illegal" not in words, decay_batch_step=lambda size: size // 2
    )
    monkeypatch.setattr(_peers_finders, "load_timm_decay", lambda: rules)


@pytest.mark.parametrize(
    ("fitting", "words", "start", "said", "tried"),
    [
        (10, CPU_WORDS, 64, None, [64, 32, 16, 8]),
        (10, "an illegal memory access was encountered", 64, "illegal", [64]),
        (0, CPU_WORDS, 4, "decayed the batch size to 0", [4, 2, 1]),
    ],
)
def test_timms_loop_decays_until_a_batch_runs_and_stops_at_other_errors(timm_rules, fitting, words, start, said, tried):
    job = build_fitting(fitting, words)
    if said is None:
        assert find_with_timm(job, start) == tried[-1]
    else:
        with pytest.raises(RuntimeError, match=said):
            find_with_timm(job, start)
    assert [a.batch_size for a in job.attempts] == tried


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed here")
def test_timms_own_rules_are_read_from_their_file():
    rules = _peers_finders.load_timm_decay()
    assert (rules.decay_batch_step(512), rules.check_batch_size_retry("illegal")) == (384, False)
    assert rules.__name__ not in sys.modules


# One search in a process of its own.


def build_search(**changes) -> Search:
    given = {"finder": "timm", "case": CASE.name, "device": "cpu", "n_steps": 1}
    return Search(**{**given, "smallest": 2, "largest": 64, "room_mib": 64, **changes})


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed here")
def test_a_search_comes_back_with_what_it_tried():
    found = run_search(build_search())
    assert found.failure is None
    assert (found.recommended, found.n_out_of_memory, found.has_run_its_own) == (64, 0, True)
    assert found.tried == (Attempt(batch_size=64, largest_step=64, status="ok"),)
    assert found.seconds > 0


def test_a_process_that_takes_too_long_is_a_failure():
    found = run_search(build_search(), deadline_s=0.05)
    assert found.recommended is None
    assert "no answer after 0.05 s" in found.failure


def test_a_process_that_dies_leaves_what_it_had_tried():
    tried = (Attempt(batch_size=64, largest_step=64, status="ok"), Attempt(batch_size=128))
    line = json.dumps(encode(Found(recommended=None, seconds=2.0, tried=tried)))
    found = read_unfinished(f"not the last line\n{line}\n", describe_death(-11, ""))
    assert found.failure == "the process was ended by SIGSEGV"
    assert [(a.batch_size, a.status, a.said) for a in found.tried] == [
        (64, "ok", None), (128, "error", "the process was ended by SIGSEGV"),
    ]  # fmt: skip
    assert (found.seconds, found.recommended) == (2.0, None)
    silent = read_unfinished("", describe_death(1, "Traceback\nKeyError: 'no such finder'\n"))
    assert silent.failure == "the process ended with 1: KeyError: 'no such finder'"


@pytest.mark.parametrize(
    ("tried", "recommended", "was_run"),
    [
        ([(64, 64, "ok")], 64, True),
        ([(4096, 4096, "ok")], 8192, False),  # a cap that was never reached
        ([(2048, 1797, "ok")], 2048, False),  # the data has no such batch
        ([(100, 100, "ok")], 95, False),  # a margin taken off at the end
        ([(64, 64, "out_of_memory")], 64, False),
    ],
)
def test_only_a_whole_step_of_that_many_samples_counts_as_run(tried, recommended, was_run):
    rows = tuple(Attempt(batch_size=a, largest_step=b, status=status) for a, b, status in tried)
    assert Found(recommended=recommended, seconds=1.0, tried=rows).has_run_its_own is was_run


# The space, and the figures.


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_the_batch_size_is_the_only_axis_and_the_data_holds_the_largest(case):
    config = resolve_target(case.target, build_settings(case, FULL)).config
    space = build_space(config, Facts(device_type="cpu", n_cores_usable=2))
    assert {name: values for name, values in space.axes.items() if len(values) > 1} == {"batch_size": case.batch_sizes}
    assert plan_of(config)["threads"] == 1
    assert len(case.workload.dataset()) >= max(case.batch_sizes)


def build_trial(size: int, rate: float | None, peak_gib: float = 0.5, **changes) -> Trial:
    plan = default_plan({"batch_size": size})
    status = "ok" if rate else "out_of_memory"
    values = {"id": "t", "plan": plan, "status": status, "reason": None if rate else "no room", "samples_per_s": rate}
    return Trial(**{**values, "memory_rss_peak_gib": peak_gib, **changes})


RATES = {64: 200.0, 8192: 100.0}
SEARCHES = {
    OURS: Found(recommended=64, seconds=9.0, tried=(Attempt(batch_size=64, largest_step=64, status="ok"),)),
    "lightning, power": Found(
        recommended=8192, seconds=2.0,
        tried=(
            Attempt(batch_size=4096, largest_step=4096, status="ok"),
            Attempt(batch_size=9000, largest_step=0, status="out_of_memory", said="RuntimeError: no memory"),
        ),
    ),
    "timm": Found(recommended=None, seconds=1.0, failure="RuntimeError: could not create a primitive"),
}  # fmt: skip


def measure(run_batch, sizes=(64, 8192), *, n_rounds=6, limit_bytes=GIB):
    return measure_again(sizes, run_batch, n_rounds=n_rounds, limit_bytes=limit_bytes)


@pytest.fixture
def measured():
    return measure(lambda size: build_trial(size, RATES[size]))


def read_arms(searches, measured):
    return {(arm.arm, arm.metric): arm for arm in describe_searches("case", searches, measured)}


def test_what_was_recommended_is_measured_in_every_round_and_what_it_cost_is_counted(measured):
    arms = read_arms(SEARCHES, measured)
    assert arms[OURS, "samples_per_s"].samples == (200.0,) * 6
    found = {metric: arm.median for (name, metric), arm in arms.items() if name == "lightning, power"}
    assert found == {
        "trials": 2, "out_of_memory": 1, "seconds": 2.0, "recommended_batch_size": 8192, "recommended_was_run": 0,
        "samples_per_s": 100.0, "memory_peak_pct_of_limit": 50.0, "ratio_of_fulltilt_to_it": 2.0,
    }  # fmt: skip
    assert arms[OURS, "recommended_was_run"].median == 1
    assert {metric for name, metric in arms if name == "timm"} == {"trials", "out_of_memory", "seconds"}


def test_a_recommendation_that_cannot_be_run_each_time_has_no_rate_and_is_told():
    answers = {64: [200.0] * 4, 8192: [100.0, None, 100.0, 100.0]}
    measured = measure(lambda size: build_trial(size, answers[size].pop()), n_rounds=2)
    assert {name for name, metric in read_arms(SEARCHES, measured) if metric == "samples_per_s"} == {OURS}
    said = "\n".join(describe_findings(CASE, SEARCHES, measured))
    assert "8192 of lightning, power was left out: 1 of 4 runs failed, out_of_memory: no room" in said
    assert "lightning, power recommends 8192, never run; the largest it ran was 4096" in said
    assert "timm ended without a recommendation: RuntimeError: could not create" in said
    assert "first of 1 failures: RuntimeError: no memory" in said
    nothing = measure(lambda size: build_trial(size, None), [64], n_rounds=1)
    assert [t.name for t in judge_searches("case", SEARCHES, nothing)] == [
        "case: recommendations of fulltilt that it never ran"
    ]
    assert measure(build_trial, []).rounds == []


def test_the_targets_say_who_was_beaten_and_what_was_kept(measured):
    targets = {target.name: target for target in judge_searches("case", SEARCHES, measured)}
    assert targets["case: fulltilt's over that of lightning, power"].measured == 2.0
    assert targets["case: memory of fulltilt's, % of the limit"].met is True
    assert all(target.met for target in targets.values())
    broken = judge_searches("case", SEARCHES, dataclasses.replace(measured, limit_gib=0.25))
    assert [target.met for target in broken if "memory" in target.name] == [False]
    slower = measure(lambda size: build_trial(size, 90.0 if size == 64 else 100.0))
    assert [t.met for t in judge_searches("case", SEARCHES, slower) if "lightning" in t.name] == [False]
    same = {OURS: SEARCHES[OURS], "timm": dataclasses.replace(SEARCHES[OURS], seconds=1.0)}
    (race,) = [t for t in judge_searches("case", same, measured) if "timm" in t.name]
    assert (race.measured, race.note) == (1.0, "the same batch size")


def test_our_own_search_is_counted_as_the_others_are():
    rows = [build_trial(64, 200.0), build_trial(128, None, reason="no room (log: /somewhere/t2.log)")]
    probes = [build_trial(256, 300.0, kind="device"), build_trial(512, 1.0, kind="memory")]
    picked = SimpleNamespace(recommended=SimpleNamespace(trial=rows[0]))
    result = SimpleNamespace(
        trials=rows, repeats=[build_trial(64, 201.0, kind="repeat")], probes=probes, picks=picked,
        search=SimpleNamespace(seconds=30.0),
    )  # fmt: skip
    found = describe_tune(result)
    assert len(found.tried) == 4, "estimates on fake tensors run nothing"
    assert (found.recommended, found.n_out_of_memory, found.has_run_its_own) == (64, 1, True)
    assert found.tried[1].said == "no room"
    only_probed = SimpleNamespace(recommended=SimpleNamespace(trial=probes[0]))
    result.picks = only_probed
    assert describe_tune(result).has_run_its_own is False, "a probe of the step alone is no run of the plan"


def test_the_benchmark_says_where_a_finder_is_missing_and_each_names_its_settings(monkeypatch):
    assert all("https://" in finder.settings for finder in FINDERS.values())
    assert not is_available(dataclasses.replace(FINDERS["timm"], package="no_such_package"))
    monkeypatch.setattr(batch_finders, "is_available", lambda finder: finder.package == "timm")
    monkeypatch.setattr(batch_finders, "compare_finders", lambda *args: batch_finders.Findings(arms=(), targets=()))
    notes = batch_finders.run(QUICK).notes
    assert any("left out: lightning, power, lightning, binsearch, accelerate" in note for note in notes)
