"""What becomes of a trial's end: the row, and the limit it is held against."""

import dataclasses
from pathlib import Path

import pytest

from fulltilt.levers import default_plan
from fulltilt.records import Evidence, Measurement, PhasesMs, TrialRequest, WorkloadSource
from fulltilt.tuner.trials import live
from fulltilt.tuner.trials.process import ProcessOutcome
from fulltilt.tuner.trials.rows import build_trial
from fulltilt.tuner.trials.target import ProcessTarget

TIMED = Measurement(
    phases_ms=PhasesMs(data_wait=0.0, h2d=None, forward=1.0, backward=2.0, optimizer=0.5, other=0.0, step=3.5),
    samples_per_s=100.0, samples_per_s_ci95=(99.0, 101.0), block_samples_per_s=(100.0, 100.0), n_steps=16,
    n_warmup_steps=8,
)  # fmt: skip


def build_outcome(**memory):
    measurement, evidence = dataclasses.replace(TIMED, **memory), Evidence(has_result=True, exit_code=0)
    return ProcessOutcome(evidence=evidence, measurement=measurement, reply={}, log_path=Path("t1.log"), seconds=1.0)


@pytest.mark.parametrize(
    ("memory", "limit_gib", "said"),
    [
        ({"memory_rss_peak_gib": 1.9}, 2, None),
        ({"memory_rss_peak_gib": 2.1}, 2, "peaked at 2.10 GiB, the limit is 2.00 GiB"),
        ({"memory_rss_peak_gib": 2.1, "memory_peak_part": "evaluation"}, 2, "2.10 GiB in the part 'evaluation', the"),
        ({"memory_rss_peak_gib": 2.1, "memory_peak_part": "evaluation"}, 3, None),
        ({"memory_reserved_peak_gib": 1.5, "memory_rss_peak_gib": 8.0}, 2, None),  # a GPU's limit is about the GPU
        ({"memory_reserved_peak_gib": 2.5, "memory_rss_peak_gib": 0.5}, 2, "the limit is 2.00 GiB"),
        ({}, 2, None),
        ({"memory_rss_peak_gib": 999.0}, None, None),
    ],
)
def test_a_run_that_peaked_above_its_limit_is_out_of_memory_though_it_ended_well(memory, limit_gib, said):
    limit_bytes = None if limit_gib is None else limit_gib * 2**30
    trial = build_trial(default_plan(), build_outcome(**memory), id="t1", why="", memory_limit_bytes=limit_bytes)
    assert trial.status == ("ok" if said is None else "out_of_memory")
    assert (trial.samples_per_s is None) is (said is not None)
    assert (said or "") in (trial.reason or "")
    if said is None:
        assert trial.memory_peak_part == memory.get("memory_peak_part")


@pytest.mark.parametrize(
    ("measured", "status", "said"),
    [
        ({"memory_rss_peak_gib": 2.1}, "out_of_memory", "the run peaked at 2.10 GiB, the limit is 2.00 GiB"),
        ({"samples_per_s": None}, "error", "the trial measured None samples/s, which is no rate"),
        ({"memory_rss_peak_gib": 1.9}, None, None),
    ],
)
def test_a_whole_run_in_place_of_a_turn_is_judged_as_others_are(tmp_path, monkeypatch, measured, status, said):
    """One that peaked above its limit between two looks of the watchdog counted as a turn."""
    monkeypatch.setattr(live, "run_trial_process", lambda *_, **__: build_outcome(**measured))
    source = WorkloadSource(config={}, base_dir=".")
    usual = TrialRequest(source=source, device="cpu", plan=default_plan(), memory_limit_bytes=2 * 2**30)
    runner = live.GroupRunner(lambda _: None, tmp_path, n_fit=1)
    requests = {name: dataclasses.replace(usual, id=name) for name in ("t1", "t2")}
    if status is None:
        assert {turns.samples_per_s for turns in runner(requests).values()} == {100.0}
        return
    with pytest.raises(live.ArmFailedError, match=said) as caught:
        runner(requests)
    assert caught.value.status == status


class Recording(ProcessTarget):
    """Keeps the last request, and answers as a process would that measured what it was asked for."""

    def _run(self, request):
        self.request = request
        return build_outcome()


def test_over_ranks_a_probe_takes_one_ranks_part_and_its_rate_counts_for_all(tmp_path):
    source = WorkloadSource(config={"data": {"val_batch_size": 255}}, base_dir=".")
    target = Recording(TrialRequest(source=source, device="cpu", rank_devices=("cpu", "cpu")), tmp_path)
    plan = default_plan({"batch_size": 34})
    probe = target(plan, id="t1", why="", kind="device")
    assert (target.request.plan["batch_size"], target.request.kind) == (17, "device")
    assert (probe.plan, probe.n_devices, probe.batch_size_per_device) == (plan, 2, 17)
    assert (probe.samples_per_s, probe.samples_per_s_ci95) == (200.0, (198.0, 202.0))
    assert probe.block_samples_per_s == (200.0, 200.0)
    assert "its rate counts 2 times" in probe.notes[-1]
    probe = target(default_plan({"batch_size": 3}), id="t1", why="", kind="device")
    assert target.request.plan["batch_size"] == 2, "the larger part is waited for"
    assert target.request.source.config["data"]["val_batch_size"] == 128
    assert probe.samples_per_s == 150.0, "3 samples in the time that one rank takes for 2"

    whole = target(plan, id="t2", why="")
    assert (target.request.plan, target.request.rank_devices, target.request.kind) == (plan, ("cpu", "cpu"), "trial")
    assert (whole.samples_per_s, whole.notes) == (100.0, ())
