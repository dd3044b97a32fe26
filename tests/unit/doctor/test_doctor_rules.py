"""What the rules and the report make of an observation, from made-up rows (synthetic: they measure nothing)."""

import numpy as np
import pytest

from fulltilt.attach.inside.spans import DATA_WAIT, HOST_SYNC
from fulltilt.doctor.observation import COLUMNS, Observation, Site
from fulltilt.doctor.watch import build_document
from fulltilt.report.diagnosis import describe_result, list_findings

N_STEPS, STEP_MS = 100, 100


def make_observation(spent_ms=None, *, flags=0, **fields):
    """Steps of 100 ms; ``spent_ms``: kind of work → its part of each."""
    rows = np.zeros((N_STEPS, len(COLUMNS)), dtype=np.int64)
    rows[:, 0] = STEP_MS * 10**6
    for kind, ms in (spent_ms or {}).items():
        rows[:, 1 + kind] = ms * 10**6
    rows[:, COLUMNS.index("flags")] = flags
    return Observation(rows=rows, **{"n_steps": N_STEPS + 1, "n_processes": 1, **fields})


def make_site(kind, ms, *, where, does="item"):
    """A line that each counted step ran once."""
    n = len(make_observation().plain.rows)
    return Site(kind=kind, file="t.py", line=3, does=does, where=where, n_calls=n, n_steps=n, ns=n * ms * 10**6)


@pytest.mark.parametrize(("blocked_ms", "ceiling_pct"), [(90, 10), (30, 30), (100, 0)])
def test_a_synchronisation_saves_no_more_than_the_host_could_do_meanwhile(blocked_ms, ceiling_pct):
    """The device's work that the host waits for stays: only what the host does else can go on beside it."""
    site = make_site("host_sync", blocked_ms, where="cuda")
    document = build_document(make_observation({HOST_SYNC: blocked_ms}, device="cuda", sites=(site,)))
    (finding,) = document["findings"]
    assert finding["ceiling_pct"] == pytest.approx(ceiling_pct)
    assert f"up to {ceiling_pct} % of a step" in describe_result(document)
    assert f"{blocked_ms}.00 ms blocked; without it at most {ceiling_pct} % less" in "".join(
        list_findings(document["findings"])
    )


def test_steps_that_each_begin_an_iterator_are_told_so():
    document = build_document(make_observation(flags=1))
    (note,) = document["notes"]
    assert f"{N_STEPS - 5} of {N_STEPS} steps begin a new iterator of a DataLoader" in note
    assert "make the iterator once" in note
    (note,) = build_document(make_observation(flags=2))["notes"]
    assert "let the command take more steps" in note


@pytest.mark.parametrize(("wait_ms", "is_checked"), [(50, False), (1, True)])
def test_loading_that_could_not_be_traced_is_not_told_as_checked(wait_ms, is_checked):
    document = build_document(make_observation({DATA_WAIT: wait_ms}))
    assert ("slow-transform" in document["checked"]) == is_checked
    assert f"None of the {2 + is_checked} rules" in describe_result(document)
    assert any("could not be traced" in note for note in document["notes"]) != is_checked
