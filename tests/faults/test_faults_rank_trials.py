"""Trials of the tuner over two ranks: one figure for both, and what goes wrong in one of them ends both."""

import dataclasses
import os
import time
from pathlib import Path

import pytest
from leftovers import watch_zygote

from fulltilt.levers import default_plan
from fulltilt.records import TrialRequest, WorkloadSource
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.trials.process import run_trial_process
from fulltilt.tuner.trials.rows import build_trial

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(900)  # processes that load torch: minutes on a machine that is busy


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    preload = ("torch.distributed", "cloudpickle", "fulltilt.tuner.trials.kinds")
    folder = tmp_path_factory.mktemp("trials")
    with watch_zygote(folder, body="rank_trial_bodies:run_request", preload=preload) as watched:
        yield watched


@pytest.fixture
def run(watched, tmp_path):
    """Run a trial over two ranks, unless the changes say otherwise, and see that it leaves nothing."""
    zygote, find_leftovers = watched

    def run_trial(source, **changes):
        request = TrialRequest(
            id="t1", source=source, plan=default_plan({"batch_size": 16}), device="cpu", n_steps=1, seed=3,
            deadline_s=600.0, max_measure_s=0.1, rank_devices=("cpu", "cpu"),
        )  # fmt: skip
        request = dataclasses.replace(request, **changes)
        outcome = run_trial_process(request, zygote=zygote, log_path=tmp_path / "t1.log")
        assert find_leftovers() == []
        return outcome

    return run_trial


def plant(act, **more):
    config = {"act": act, "run": {"hang_timeout_s": 3.0}, **more}
    return WorkloadSource(config=config, base_dir=".", import_paths=(str(HERE),))


@pytest.mark.parametrize(
    ("act", "status", "words", "limit_mib"),
    [
        ("run_out_of_memory", "out_of_memory", ["rank 1 (cpu, process ", "Tried to allocate 2.00 GiB"], None),
        ("fill_memory", "out_of_memory", ["rank 1: process tree used", "the limit is 250 MiB"], 250),
        ("die", "error", ["rank 1 (cpu, process ", "was killed by SIGKILL"], None),
        ("hang", "timeout", ["rank 1 (cpu, process ", "hangs", "after step 3, while another rank waits"], None),
    ],
)
def test_what_goes_wrong_in_one_rank_ends_the_trial_of_all_and_names_it(run, act, status, words, limit_mib):
    """the other rank waits for it for ever; the trial's deadline is ten minutes away"""
    limit = {} if limit_mib is None else {"memory_limit_bytes": limit_mib * 2**20}
    outcome = run(plant(act, fault_s=os.devnull), **limit)
    row = build_trial(default_plan({"batch_size": 16}), outcome, id="t1", why="", n_devices=2)
    if act == "die" and row.status == "out_of_memory":  # the kernel killed somebody, somewhere, meanwhile
        status = "out_of_memory"
    assert row.status == status, row.reason
    assert [word for word in words if word not in row.reason] == [], row.reason
    assert outcome.evidence.deadline is None


def test_out_of_memory_in_one_rank_ends_the_trial_within_30_s(run, tmp_path):
    """Nothing but the failure itself can end it so soon: a rank may stand still for ten minutes, as with compile."""
    outcome = run(plant("run_out_of_memory", fault_s=str(tmp_path / "fault_s"), run={"hang_timeout_s": 600.0}))
    took_s = time.monotonic() - float((tmp_path / "fault_s").read_text())
    assert build_trial(default_plan({}), outcome, id="t1", why="", n_devices=2).status == "out_of_memory"
    assert took_s < 30


@pytest.mark.slow
def test_two_ranks_measure_the_whole_job_on_the_batches_of_one(run, tmp_path):
    source = resolve_target("faulty_workloads:fine").source
    alone, both = run(source, rank_devices=()).measurement, run(source).measurement
    assert both is not None, (tmp_path / "t1.log").read_text()
    assert both.first_loss == pytest.approx(alone.first_loss, rel=1e-5)
    assert both.observed["batch_size"] == alone.observed["batch_size"] == 16
    assert len(both.block_samples_per_s) >= 2
    assert both.samples_per_s_ci95[0] <= both.samples_per_s <= both.samples_per_s_ci95[1]
    assert 0 < both.memory_rss_peak_gib < 2 * alone.memory_rss_peak_gib  # of one rank, not of two
    assert both.flops_per_sample == alone.flops_per_sample
