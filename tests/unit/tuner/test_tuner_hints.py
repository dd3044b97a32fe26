"""Each hint by its own numbers, and silence below its threshold."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.tuner.tuner_cases import make_row

from fulltilt.records import PhasesMs
from fulltilt.tuner.answer.hints import find_hints, find_search_hints

QUIET = make_row(1, 100.0)


def change(**changes):
    return dataclasses.replace(QUIET, **changes)


def with_phases(**changes):
    phases = {"data_wait": 1.0, "h2d": None, "forward": 4.0, "backward": 4.0, "optimizer": 0.9, "other": 0.1}
    return change(phases_ms=PhasesMs(**(phases | {"step": 10.0} | changes)))


@pytest.mark.parametrize(
    ("row", "limit_gib", "rule", "words"),
    [
        (with_phases(data_wait=3.0), None, "data-wait", "30 % of the step waits for data"),
        (change(gpu_utilization_pct=40.0), None, "utilization", "40 %"),
        (change(memory_reserved_peak_gib=2.0), 10.0, "memory", "a larger batch"),
        (change(memory_reserved_peak_gib=9.5), 10.0, "memory", "leaves room"),
        (change(cpu_pressure_pct=40.0), None, "contention", "tasks waited for a core 40 % of the time: data"),
        (change(steal_pct=12.0), None, "contention", "the host took 12 % of the cores' time for others: data"),
        (change(null_reasons={"phases_ms": "no phase claims 12 %"}), None, "phases", "no phase claims 12 %"),
        # none inside the bands
        (with_phases(), None, None, ""),
        (with_phases(data_wait=None, other=None), None, None, ""),
        (change(gpu_utilization_pct=70.0), None, None, ""),
        (change(memory_reserved_peak_gib=7.0), 10.0, None, ""),
        (QUIET, 1000.0, None, ""),
        (change(phases_ms=None), None, None, ""),
    ],
)
def test_a_hint_says_its_numbers_and_none_that_was_not_read(row, limit_gib, rule, words):
    hints = find_hints(row, limit_gib)
    assert [(hint.rule, hint.trial_id) for hint in hints] == ([(rule, "t1")] if rule else [])
    assert all(words in hint.text for hint in hints)


def test_failed_rows_are_pointed_out():
    (hint,) = find_search_hints([QUIET, make_row(2, None, status="error", reason="boom")])
    assert (hint.evidence, "boom" in hint.text) == ({"n_failed": 1, "ids": ["t2"]}, True)
    assert find_search_hints([QUIET]) == ()
