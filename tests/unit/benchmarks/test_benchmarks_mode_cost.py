"""``mode_cost``: ratios of modes, from processes that train in them."""

import pytest
from benchmarks import _speed_probe, mode_cost
from benchmarks._runner import Context


def test_a_mode_is_told_as_times_as_fast_as_neither():
    rounds = [{mode_cost.PLAIN: (100.0, 400.0), mode_cost.AGAIN: (200.0, 200.0), "deterministic": (50.0, 200.0)}] * 6
    arms = {(arm.arm, arm.metric): arm.median for arm in mode_cost.build_arms("a case", rounds)}
    assert arms[mode_cost.PLAIN, "samples_per_s"] == 250.0
    assert arms[mode_cost.AGAIN, "times_as_fast"] == pytest.approx(1.0)
    assert arms["deterministic", "times_as_fast"] == pytest.approx(0.5)


def test_each_mode_trains_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(mode_cost, "CASES", {"cpu": {"tiny": ("small_cnn(width=4)", "4", "1", "8")}})
    started = []
    monkeypatch.setattr(
        mode_cost,
        "start_probe",
        lambda *given, **more: started.append(given[1]) or _speed_probe.start_probe(*given, **more),
    )
    findings = mode_cost.run(Context(device="cpu", quick=True))
    assert sorted(map(str, started)) == sorted(map(str, [*mode_cost.MODES.values()] * 2))
    rates = [arm.median for arm in findings.arms if arm.metric == "samples_per_s"]
    assert len(rates) == 3
    assert min(rates) > 0
