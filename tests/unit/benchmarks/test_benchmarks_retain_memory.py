"""The benchmark of kept memory: that its arms are what they say, on processes of their own."""

from __future__ import annotations

from benchmarks import retain_memory
from benchmarks._speed_probe import start_probe


def test_the_arm_that_keeps_memory_takes_far_fewer_pages_anew():
    """With images of 8 px neither takes many, but by chance of the process."""
    ways, _ = retain_memory.find_ways()
    (case,) = (case for case in retain_memory.CASES if "96 px" in case)
    arms = (retain_memory.PLAIN, retain_memory.OURS)
    plain, ours = (start_probe(retain_memory.CASES[case], *ways[arm], device="cpu") for arm in arms)
    assert ours["faults_per_step"] < plain["faults_per_step"] / 10
    assert min(plain["samples_per_s"], ours["samples_per_s"]) > 0


def test_allocators_are_put_in_glibcs_place_where_they_are_installed(monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", {"jemalloc": "libjemalloc.so.2"}.get)
    ways, missing = retain_memory.find_ways()
    values, environment = ways["jemalloc"]
    assert values == {}
    assert environment["LD_PRELOAD"] == "libjemalloc.so.2"
    assert "background_thread:true" in environment["MALLOC_CONF"]
    assert missing == ["tcmalloc_minimal"]


def test_ratios_are_of_the_rounds_and_the_spread_is_of_all_processes():
    def block(rate):
        return dict.fromkeys(("faults_per_step", "kernel_ms_per_step", "rss_peak_gib"), 1.0) | {"samples_per_s": rate}

    ways = (retain_memory.PLAIN, retain_memory.OURS)
    rounds = [
        {ways[0]: (block(100.0 * n), block(100.0 * n)), ways[1]: (block(400.0 * n), block(100.0 * n))} for n in (1, 2)
    ]
    found = {(arm.arm, arm.metric): arm.median for arm in retain_memory.build_arms("x", rounds)}
    assert found[ways[1], retain_memory.FASTER] == 2.0, "the geometric mean of both blocks"
    assert found[ways[1], "spread_ratio"] == 8.0
    assert found[ways[0], retain_memory.FASTER] == 1.0
