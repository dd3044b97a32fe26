"""The journal: what was written is handed out again once, in order, and unreadable lines cost only themselves."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.errors import RunFolderError
from fulltilt.levers import default_plan
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.search.journal import JOURNAL_FILE, Journal
from fulltilt.tuner.search.session import END_TO_END, REPEAT

PLAN = default_plan()


def make_row(id, **changes):
    row = SimulatedTarget(lambda plan: Answer(samples_per_s=10.0, seconds=2.0))(PLAN, id=id, why="")
    return dataclasses.replace(row, **changes)


def open_folder(path):
    return RunFolder(path, fingerprint_parts={"a": 1}, command="tune", results=["trials.jsonl"])


def test_rows_come_back_in_order_and_once(tmp_path):
    with open_folder(tmp_path) as folder:
        journal = Journal(folder)
        for row in (make_row("t1"), make_row("t2", kind=REPEAT), make_row("t3", kind=REPEAT)):
            journal.append(row)
    with open_folder(tmp_path) as folder:
        journal = Journal(folder)
    assert journal.take((PLAN, END_TO_END, None, None)).id == "t1"
    assert journal.take((PLAN, END_TO_END, None, None)) is None
    assert [journal.take((PLAN, REPEAT, None, None)).id for _ in range(2)] == ["t2", "t3"]
    assert journal.take((PLAN, REPEAT, None, None)) is None
    assert journal.next_id() == "t4"


def test_an_unreadable_line_is_left_out_with_a_note_that_names_it(tmp_path):
    with open_folder(tmp_path) as folder:
        Journal(folder).append(make_row("t1"))
        wrong = json.loads((tmp_path / JOURNAL_FILE).read_text()) | {"status": "splendid"}
        with (tmp_path / JOURNAL_FILE).open("a") as stream:
            stream.write('{"id": \n\x00\xff\n[]\n' + json.dumps(wrong) + "\n" + "[" * 100_000 + "\n")
        Journal(folder).append(make_row("t2"))
        journal = Journal(folder)
    assert [trial.id for trial in journal.trials] == ["t1", "t2"]
    assert len(journal.notes) == 5
    assert f"{JOURNAL_FILE}:2" in journal.notes[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples_per_s": None}, "status is ok, and samples_per_s is None"),
        ({"memory_rss_peak_gib": -1.0}, "memory_rss_peak_gib is -1, which nothing takes or reaches"),
        ({"memory_rss_peak_gib": 0.0}, "memory_rss_peak_gib is 0, which nothing takes or reaches"),
        ({"memory_rss_peak_gib": 1e300}, "memory_rss_peak_gib is 1e+300, which nothing takes or reaches"),
        ({"seconds": -1000.0}, "seconds is -1000, which nothing takes or reaches"),
        ({"id": "t1"}, "t1: an earlier row is called so, too"),
    ],
)
def test_a_row_that_cannot_be_is_left_out_to_be_run_again(tmp_path, changes, said):
    with open_folder(tmp_path) as folder:
        for row in (make_row("t1"), make_row("t2")):
            Journal(folder).append(row)
        first, second = (tmp_path / JOURNAL_FILE).read_text().splitlines()
        (tmp_path / JOURNAL_FILE).write_text(f"{first}\n{json.dumps(json.loads(second) | changes)}\n")
        journal = Journal(folder)
    assert [trial.id for trial in journal.trials] == ["t1"]
    assert f"{JOURNAL_FILE}:2: the row was changed or damaged and is left out, to be run again" in journal.notes[0]
    assert said in journal.notes[0]


def test_a_folder_in_the_place_of_the_rows_is_refused(tmp_path):
    (tmp_path / JOURNAL_FILE).mkdir()
    with pytest.raises(RunFolderError, match=f"{JOURNAL_FILE} cannot be read"), open_folder(tmp_path) as folder:
        Journal(folder)


def test_a_torn_last_line_is_no_row(tmp_path):
    with open_folder(tmp_path) as folder:
        Journal(folder).append(make_row("t1"))
        with (tmp_path / JOURNAL_FILE).open("a") as stream:
            stream.write('{"id": "t2", "plan": {"batch')
        journal = Journal(folder)
        assert [trial.id for trial in journal.trials] == ["t1"]
        journal.append(make_row("t3"))
        assert [trial.id for trial in Journal(folder).trials] == ["t1", "t3"]


def test_without_a_folder_rows_stay_in_memory():
    journal = Journal()
    journal.append(make_row("t1"))
    assert journal.next_id() == "t2"
