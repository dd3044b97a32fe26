"""``fulltilt.tune`` in a notebook: what a cell shows while it searches, and of the result."""

import dataclasses
import functools
import sys
import types

import pytest
from rich.console import Console

import fulltilt
from fulltilt.cli import _notebook
from fulltilt.levers import default_plan
from fulltilt.records import Trial
from fulltilt.tuner.answer.picks import Pick, Picks
from fulltilt.tuner.answer.result import SearchSummary, TuneResult
from fulltilt.tuner.search.progress import TrialDone, TrialStarted

PLAN = default_plan().replace(batch_size=32, num_workers=2)
ROW = Trial(id="t1", plan=PLAN, status="ok", samples_per_s=1234.0)


def search(target, *, on_event=None):
    if on_event:
        on_event(TrialStarted(id="t1", plan=PLAN, why="the settings as they were", n_done=0, n_planned=4))
        on_event(TrialDone(trial=ROW, n_done=1, n_planned=4, seconds_left=60.0))
    if target == "broken":
        raise OSError("no space left")
    return target


@pytest.fixture
def shown(monkeypatch):
    """What the cell shows, one text a change."""
    texts = []
    handle = types.SimpleNamespace(update=texts.append)
    ipython = types.SimpleNamespace(HTML=str, display=lambda html, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython)
    monkeypatch.setattr(_notebook.tuning, "tune", search)
    return texts


def test_a_notebook_sees_the_search_as_it_goes_and_nothing_of_it_afterwards(shown, monkeypatch):
    monkeypatch.setattr(_notebook, "Console", functools.partial(Console, force_jupyter=True))
    assert fulltilt.tune("a") == "a"
    running, done, end = shown
    assert "t1 runs for" in running
    assert "1,234" in done
    assert "1 of at most 4 trials" in done
    assert end == ""
    with pytest.raises(OSError, match="no space left"):
        fulltilt.tune("broken")
    assert shown[-1] == ""


def test_a_script_and_who_takes_the_events_are_shown_nothing(shown, monkeypatch):
    assert fulltilt.tune("a") == "a"
    monkeypatch.setattr(_notebook, "Console", functools.partial(Console, force_jupyter=True))
    events = []
    assert fulltilt.tune("a", on_event=events.append) == "a"
    assert [type(event) for event in events] == [TrialStarted, TrialDone]
    assert shown == []


def test_a_result_is_three_lines_and_in_a_notebook_the_first_part_of_its_page():
    pick = Pick(trial=ROW, rule="fastest")
    result = TuneResult(
        machine=None, workload={}, trials=(ROW,), picks=Picks(throughput=pick, efficiency=None, recommended=pick),
        search=SearchSummary(
            strategy="s", grid_size=1, n_trials=1, n_end_to_end=1, n_out_of_memory=0, seconds=185.0
        ),
        learning_rate=None, epoch_seconds=None, user_plan=PLAN, baseline=ROW, folder="runs/tune/x",
        null_reasons={"savings": "the plan took no turns"},
    )  # fmt: skip
    verdict, plan, page = repr(result).splitlines()
    assert plan == "yours t1: batch_size 32, num_workers 2"
    assert page == "1 plan in 3 min 05 s: runs/tune/x/report.html"
    assert verdict.endswith(".")
    assert f'<p class="verdict">{verdict}</p>' in result._repr_html_()
    other = dataclasses.replace(ROW, id="t2", plan=PLAN.replace(compile=True))
    result = dataclasses.replace(result, picks=dataclasses.replace(result.picks, unproven=Pick(trial=other, rule="")))
    verdict, plan, _ = repr(result).splitlines()
    assert verdict.startswith("No result yet, keep your settings")
    assert plan.startswith("other t2: "), "beside that it passed for the plan to keep"
