"""``mode_cost`` and ``retain_memory``: ratios of modes, from processes that train in them."""

import pytest
from benchmarks import _speed_probe, mode_cost, retain_memory
from benchmarks._runner import Context
from benchmarks._speed_probe import Size, start_probe


def test_a_mode_is_told_as_times_as_fast_as_neither():
    rounds = [{mode_cost.PLAIN: (100.0, 400.0), mode_cost.AGAIN: (200.0, 200.0), "deterministic": (50.0, 200.0)}] * 6
    arms = {(arm.arm, arm.metric): arm.median for arm in mode_cost.build_arms("a case", rounds)}
    assert arms[mode_cost.PLAIN, "samples_per_s"] == 250.0
    assert arms[mode_cost.AGAIN, "times_as_fast"] == pytest.approx(1.0)
    assert arms["deterministic", "times_as_fast"] == pytest.approx(0.5)


def test_each_mode_trains_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(mode_cost, "CASES", {"cpu": {"tiny": Size("small_cnn(width=4)", 4, 1, 8)}})
    started = []

    def start(size, values, **more):
        started.append(values)
        return _speed_probe.start_probe(size, values, **more)

    monkeypatch.setattr(mode_cost, "start_probe", start)
    findings = mode_cost.run(Context(device="cpu", quick=True))
    assert sorted(map(str, started)) == sorted(map(str, [*mode_cost.MODES.values()] * 2))
    rates = [arm.median for arm in findings.arms if arm.metric == "samples_per_s"]
    assert len(rates) == 3
    assert min(rates) > 0


def test_a_probe_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*no_such_model"):
        start_probe(Size("no_such_model", 4, 1, 8), {}, device="cpu")


def test_the_arm_that_keeps_memory_takes_far_fewer_pages_anew():
    """With images of 8 px neither takes many, but by chance of the process."""
    ways, _ = retain_memory.find_ways()
    size = retain_memory.CASES["small CNN, 64 images of 96 px"]
    plain, ours = (start_probe(size, *ways[arm], device="cpu") for arm in (retain_memory.PLAIN, retain_memory.OURS))
    assert ours["faults_per_step"] < plain["faults_per_step"] / 10
    assert min(plain["samples_per_s"], ours["samples_per_s"]) > 0


def test_allocators_are_put_in_glibcs_place_where_they_are_installed(monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", {"jemalloc": "libjemalloc.so.2"}.get)
    ways, missing = retain_memory.find_ways()
    values, environment = ways["jemalloc"]
    assert (values, environment["LD_PRELOAD"]) == ({}, "libjemalloc.so.2")
    assert "background_thread:true" in environment["MALLOC_CONF"]
    assert missing == ["tcmalloc_minimal"]


def test_ratios_are_of_the_rounds():
    def block(rate):
        return dict.fromkeys(("faults_per_step", "kernel_ms_per_step", "rss_peak_gib"), 1.0) | {"samples_per_s": rate}

    plain, ours = retain_memory.PLAIN, retain_memory.OURS
    rounds = [{plain: (block(100.0 * n),) * 2, ours: (block(400.0 * n), block(100.0 * n))} for n in (1, 2)]
    found = {(arm.arm, arm.metric): arm.median for arm in retain_memory.build_arms("x", rounds)}
    assert found[ours, retain_memory.FASTER] == pytest.approx(2.0), "the geometric mean of both blocks"
    assert found[plain, retain_memory.FASTER] == 1.0
