"""Each hint by its own numbers, and silence below its threshold."""

from __future__ import annotations

import dataclasses

import pytest
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import default_plan
from fulltilt.records import PhasesMs
from fulltilt.tuner.answer.hints import find_hints, find_search_hints

QUIET = SimulatedTarget(lambda plan: Answer(samples_per_s=100.0))(default_plan(), id="t1", why="")


def with_phases(**changes):
    phases = {"data_wait": 1.0, "h2d": None, "forward": 4.0, "backward": 4.0, "optimizer": 0.9, "other": 0.1}
    return dataclasses.replace(QUIET, phases_ms=PhasesMs(**(phases | {"step": 10.0} | changes)))


@pytest.mark.parametrize(
    ("row", "limit_gib", "rule", "words"),
    [
        (with_phases(data_wait=3.0), None, "data-wait", "30 % of the step waits for data"),
        (dataclasses.replace(QUIET, gpu_utilization_pct=40.0), None, "utilization", "40 %"),
        (dataclasses.replace(QUIET, memory_reserved_peak_gib=2.0), 10.0, "memory", "a larger batch"),
        (dataclasses.replace(QUIET, memory_reserved_peak_gib=9.5), 10.0, "memory", "leaves room"),
        (
            dataclasses.replace(QUIET, cpu_pressure_pct=40.0),
            None,
            "contention",
            "tasks waited for a core 40 % of the time: data",
        ),
        (
            dataclasses.replace(QUIET, steal_pct=12.0),
            None,
            "contention",
            "the host took 12 % of the cores' time for others: data",
        ),
        (
            dataclasses.replace(QUIET, null_reasons={"phases_ms": "no phase claims 12 %"}),
            None,
            "phases",
            "no phase claims 12 %",
        ),
    ],
)
def test_a_hint_says_its_numbers_and_none_that_was_not_read(row, limit_gib, rule, words):
    """``tasks waited for a core 0 % of the time`` was a kernel that does not say."""
    found = find_hints(row, limit_gib)
    assert [hint.rule for hint in found] == [rule]
    assert words in found[0].text
    assert found[0].trial_id == "t1"


@pytest.mark.parametrize(
    ("row", "limit_gib"),
    [
        (with_phases(), None),
        (with_phases(data_wait=None, other=None), None),
        (dataclasses.replace(QUIET, gpu_utilization_pct=70.0), None),
        (dataclasses.replace(QUIET, memory_reserved_peak_gib=7.0), 10.0),
        (QUIET, 1000.0),
        (dataclasses.replace(QUIET, phases_ms=None), None),
    ],
)
def test_no_hint_inside_the_bands(row, limit_gib):
    assert find_hints(row, limit_gib) == ()


def test_failed_rows_are_pointed_out():
    failed = SimulatedTarget(lambda plan: Answer(status="error", reason="boom"))(default_plan(), id="t2", why="")
    found = find_search_hints([QUIET, failed])
    assert found[0].evidence == {"n_failed": 1, "ids": ["t2"]}
    assert "boom" in found[0].text
    assert find_search_hints([QUIET]) == ()
