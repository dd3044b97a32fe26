"""The result schema: intervals, judgements, and what a result file holds."""

from __future__ import annotations

import json
import math

import pytest
from benchmarks._schema import Arm, BenchmarkResult, build_arm, compute_bounds, judge, judge_median

from fulltilt.hardware import read_machine
from fulltilt.records import dumps, loads

COMMON = {"case": "c", "arm": "a", "metric": "m", "unit_of_replication": "u"}


def build_result(*, ci95: tuple[float | None, float | None] = (1.0, 3.0), **changes) -> BenchmarkResult:
    arm = Arm(
        case="step 1 ms", arm="fulltilt", metric="overhead_us_per_step", median=2.0, ci95=ci95, n=7,
        unit_of_replication="round", note="settings", samples=(1.0, 2.0, 3.0),
    )  # fmt: skip
    values = {
        "name": "loop", "claim": "It is fast.", "command": "python -m benchmarks loop", "date": "2026-01-31",
        "device": "cpu", "machine": read_machine(), "versions": {"torch": "2.13.0"}, "seconds": 1.5, "arms": (arm,),
        "targets": (judge("overhead, µs", 2.0, ci95, at_most=30),), "notes": ("a note",),
    }  # fmt: skip
    return BenchmarkResult(**{**values, **changes})


def test_an_arm_has_the_median_its_interval_and_its_samples_in_order():
    samples = (5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 7.0)
    arm = build_arm(samples, **COMMON)
    assert (arm.median, arm.ci95, arm.n, arm.samples) == (4.0, (1.0, 9.0), 7, samples)
    target = judge_median("t", samples, at_most=9.0, note="why")
    assert (target.measured, target.ci95, target.met, target.note) == (4.0, (1.0, 9.0), True, "why")


def test_figures_that_are_none_are_refused():
    for values in ([], [1.0, math.nan], [1.0, math.inf]):
        with pytest.raises(ValueError, match="sample"):
            build_arm(values, **COMMON)
    with pytest.raises(ValueError, match="nan"):
        judge("x", math.nan, None, at_most=1)


@pytest.mark.parametrize(
    ("n", "quantile", "bounded"),
    [
        (1, 0.5, (False, False)),
        (5, 0.5, (False, False)),
        (6, 0.5, (True, True)),
        (18, 0.95, (True, False)),
        (71, 0.95, (True, False)),
        (72, 0.95, (True, True)),
        (200, 0.99, (True, False)),
    ],
)
def test_an_end_that_so_few_values_do_not_bound_is_none(n, quantile, bounded):
    """The least and the greatest value stood there, as if they were bounds."""
    low, high = compute_bounds([float(i) for i in range(n)], quantile)
    assert (low is not None, high is not None) == bounded


@pytest.mark.parametrize(
    ("ci95", "limits", "met"),
    [
        ((10, 30), {"at_most": 30}, True),
        ((29, 31), {"at_most": 30}, None),
        ((30, 31), {"at_most": 30}, None),
        ((30.1, 31), {"at_most": 30}, False),
        (None, {"at_most": 30}, True),
        ((None, 30), {"at_most": 30}, True),
        ((10, None), {"at_most": 30}, None),
        ((30.1, None), {"at_most": 30}, False),
        ((None, None), {"at_most": 30}, None),
        ((0.5, 1.5), {"at_most": 0}, False),
        ((20, 31), {"at_least": 20}, True),
        ((19, 31), {"at_least": 20}, None),
        ((19, 20), {"at_least": 20}, None),
        ((18, 19), {"at_least": 20}, False),
        ((20, None), {"at_least": 20}, True),
        ((None, 31), {"at_least": 20}, None),
        ((None, 19), {"at_least": 20}, False),
    ],
)
def test_a_target_is_decided_only_by_the_whole_interval(ci95, limits, met):
    target = judge("overhead, µs", 20, ci95, **limits)
    assert (target.met, {target.comparison.replace(" ", "_"): target.limit}) == (met, limits)


def test_a_result_comes_back_from_its_file_as_it_was_an_end_without_bound_as_null():
    result = build_result(ci95=(1.0, None))
    document = json.loads(dumps(result, indent=1))
    assert (document["version"], document["arms"][0]["ci95"]) == (1, [1.0, None])
    assert loads(BenchmarkResult, dumps(result)) == result
    del document["arms"][0]["n"]
    with pytest.raises(ValueError, match="n"):
        loads(BenchmarkResult, json.dumps(document))


def test_values_of_one_cluster_count_once():
    """85 cases of 13 models stood there as 85 repetitions, with intervals that narrow."""
    clusters = [name for name in "abcdefghijklm" for _ in range(6)]
    values = [float(ord(cluster)) for cluster in clusters]
    arm = build_arm(values, **COMMON, clusters=clusters)
    alone = compute_bounds([float(ord(name)) for name in "abcdefghijklm"])
    assert (arm.n, len(arm.samples), arm.median) == (13, 78, float(ord("g")))
    low, high = arm.ci95
    assert high - low == pytest.approx(alone[1] - alone[0], abs=2)
    assert high - low > compute_bounds(values)[1] - compute_bounds(values)[0], "as if there were 78"
    assert compute_bounds(values, clusters=clusters) == arm.ci95, "drawn with a fixed seed"
    with pytest.raises(ValueError, match="3 values have 2 clusters"):
        compute_bounds([1.0, 2.0, 3.0], clusters=["a", "b"])


def test_few_clusters_do_not_bound_a_tail_however_many_values_they_have():
    values = [float(i) for i in range(130)]
    low, high = compute_bounds(values, 0.95, clusters=[str(i % 13) for i in range(130)])
    assert (low is not None, high) == (True, None)
    assert compute_bounds(values, 0.95)[1] is not None
