"""``mode_cost`` and ``retain_memory``: ratios of modes, from processes that train in them."""

import pytest
from benchmarks import _speed_probe, mode_cost, retain_memory
from benchmarks._runner import Context
from benchmarks._speed_probe import Size, start_probe


def test_each_mode_trains_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(mode_cost, "CASES", {"cpu": {"tiny": Size("small_cnn(width=4)", 4, 1, 8)}})
    monkeypatch.setattr(mode_cost, "MODES", dict([*mode_cost.MODES.items()][:2]))
    started, start = [], _speed_probe.start_probe
    monkeypatch.setattr(
        _speed_probe, "start_probe", lambda *asked, **more: started.append(asked[1]) or start(*asked, **more)
    )
    findings = mode_cost.run(Context(device="cpu", quick=True))
    assert sorted(map(str, started)) == sorted(map(str, [*mode_cost.MODES.values()] * 2))
    found = {(arm.arm, arm.metric): arm.median for arm in findings.arms}
    plain, *others = mode_cost.MODES
    assert set(found) == {(plain, "samples_per_s")} | {
        (name, metric) for name in others for metric in ("samples_per_s", "times_as_fast")
    }
    assert min(found.values()) > 0


def test_a_probe_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*no_such_model"):
        start_probe(Size("no_such_model", 4, 1, 8), {}, {}, device="cpu")


def test_the_arm_that_keeps_memory_takes_far_fewer_pages_anew():
    """With images of 8 px neither takes many, but by chance of the process."""
    ways, _ = retain_memory.find_ways()
    size = retain_memory.CASES["small CNN, 64 images of 96 px"]._replace(batch_size=16)
    for _ in range(3):  # whether the plain process keeps its memory by itself is its chance, too
        plain, ours = (start_probe(size, *ways[arm], device="cpu") for arm in (retain_memory.PLAIN, retain_memory.OURS))
        assert min(plain["samples_per_s"], ours["samples_per_s"]) > 0
        if ours["faults_per_step"] < plain["faults_per_step"] / 10:
            return
    pytest.fail(f"{ours['faults_per_step']} pages a step, {plain['faults_per_step']} without")


def test_allocators_are_put_in_glibcs_place_where_they_are_installed(monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", {"jemalloc": "libjemalloc.so.2"}.get)
    ways, missing = retain_memory.find_ways()
    values, environment = ways["jemalloc"]
    assert (values, environment["LD_PRELOAD"]) == ({}, "libjemalloc.so.2")
    assert "background_thread:true" in environment["MALLOC_CONF"]
    assert missing == ["tcmalloc_minimal"]


def test_a_way_is_told_as_times_as_fast_as_the_first_in_the_same_round():
    def build_block(rate):
        return {"samples_per_s": rate}

    blocks = {"plain": (100.0, 400.0), "again": (200.0, 200.0), "ours": (400.0, 1600.0), "slow": (50.0, 200.0)}
    rounds = [{name: tuple(map(build_block, pair)) for name, pair in blocks.items()}] * 6
    arms = {(arm.arm, arm.metric): arm.median for arm in _speed_probe.describe_ways("x", rounds, ["samples_per_s"])}
    assert arms["plain", "samples_per_s"] == 250.0
    ratios = {name: arms[name, "times_as_fast"] for name in ("again", "ours", "slow")}
    assert ratios == pytest.approx({"again": 1.0, "ours": 4.0, "slow": 0.5}), "geometric means of both blocks"
