"""What is said of a trial process that was ended from outside, by what was seen of it."""

from __future__ import annotations

import time

import pytest

from fulltilt.errors import find_remedy
from fulltilt.levers import default_plan
from fulltilt.records import TrialRequest, WorkloadSource
from fulltilt.tuner.trials import process


def end(folder, kind="trial", *, elapsed_s=61.0, part=None, silent_s=None, patience_s=60.0):
    """The reason why a process with a deadline of 60 s was ended; None where it was not."""
    source = WorkloadSource(config={}, base_dir=".")
    request = TrialRequest(
        id="t1", source=source, plan=default_plan({"batch_size": 8}), device="cpu", n_steps=4, deadline_s=60.0,
        patience_s=patience_s, kind=kind,
    )  # fmt: skip
    watch = process._Watch(request, None, folder / "t1.log", None)
    if silent_s is not None:
        watch._progress_s = time.monotonic() - silent_s
    watch._missed = watch._find_missed_deadline(elapsed_s)
    watch._part = part
    return watch.collect_evidence().deadline


@pytest.mark.parametrize(("kind", "is_said"), [("trial", True), ("device", True), ("facts", False), ("roofs", False)])
def test_only_where_steps_are_timed_is_it_said_that_none_was(tmp_path, kind, is_said):
    """``and no step was timed`` stood there of reading the facts, where none ever is."""
    assert ("no step was timed" in end(tmp_path, kind)) == is_said


@pytest.mark.parametrize(("patience_s", "remedy"), [(60.0, process.DEADLINE_REMEDY), (120.0, "give a larger --budget")])
@pytest.mark.parametrize("part", [None, "evaluation"])
def test_a_deadline_ends_with_what_raises_it(tmp_path, patience_s, remedy, part):
    """The advice was ``the deadline is 60 s``."""
    reason = end(tmp_path, patience_s=patience_s, part=part)
    assert "no result after 61.0 s, and no step was timed, the deadline is 60 s" in reason
    assert find_remedy(f"{reason} (log: t1.log)") == remedy
    assert ("in the part 'evaluation'" in reason) == (part is not None)


def test_silence_has_no_remedy_but_the_log(tmp_path):
    reason = end(tmp_path, elapsed_s=50.0, silent_s=1e6)
    assert reason.startswith("no step done for 1000")
    assert find_remedy(reason) is None
    assert end(tmp_path, elapsed_s=50.0) is None
