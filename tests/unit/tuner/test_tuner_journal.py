"""The journal: what was written is handed out again once, in order, and unreadable lines cost only themselves."""

from __future__ import annotations

import json

import pytest
from tests.unit.tuner.tuner_cases import USER, make_row

from fulltilt.errors import RunFolderError
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.search.journal import JOURNAL_FILE, Journal
from fulltilt.tuner.search.session import END_TO_END, REPEAT

FIRST, SECOND = make_row(1, 10.0), make_row(2, 10.0)


@pytest.fixture
def file(tmp_path):
    return tmp_path / JOURNAL_FILE


@pytest.fixture
def open_journal(tmp_path):
    """Open the folder's journal, append rows → the journal as the next search finds it."""

    def open_and_append(*rows):
        with RunFolder(tmp_path, fingerprint_parts={"a": 1}, command="tune", results=[JOURNAL_FILE]) as folder:
            journal = Journal(folder)
            for row in rows:
                journal.append(row)
            return Journal(folder)

    return open_and_append


def test_rows_come_back_in_order_and_once(open_journal):
    open_journal(FIRST, make_row(2, 10.0, kind=REPEAT), make_row(3, 10.0, kind=REPEAT))
    journal = open_journal()
    assert journal.take((USER, END_TO_END, None, None)).id == "t1"
    assert journal.take((USER, END_TO_END, None, None)) is None
    assert [journal.take((USER, REPEAT, None, None)).id for _ in range(2)] == ["t2", "t3"]
    assert journal.take((USER, REPEAT, None, None)) is None
    assert journal.next_id() == "t4"


def test_an_unreadable_line_is_left_out_with_a_note_that_names_it(open_journal, file):
    open_journal(FIRST)
    wrong = json.loads(file.read_text()) | {"status": "splendid"}
    with file.open("a") as stream:
        stream.write('{"id": \n\x00\xff\n[]\n' + json.dumps(wrong) + "\n" + "[" * 100_000 + "\n")
    journal = open_journal(SECOND)
    assert [trial.id for trial in journal.trials] == ["t1", "t2"]
    assert len(journal.notes) == 5
    assert f"{JOURNAL_FILE}:2" in journal.notes[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples_per_s": None}, "status is ok, and samples_per_s is None"),
        ({"memory_rss_peak_gib": 0.0}, "memory_rss_peak_gib is 0, which nothing takes or reaches"),
        ({"memory_rss_peak_gib": 1e300}, "memory_rss_peak_gib is 1e+300, which nothing takes or reaches"),
        ({"samples_per_s": 99.0, "block_samples_per_s": [9.0, 11.0]}, "99, which is no mean of its blocks (9 to 11)"),
        ({"seconds": -1000.0}, "seconds is -1000, which nothing takes or reaches"),
        ({"id": "t1"}, "t1: an earlier row is called so, too"),
    ],
)
def test_a_row_that_cannot_be_is_left_out_to_be_run_again(open_journal, file, changes, said):
    open_journal(FIRST, SECOND)
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{json.dumps(json.loads(second) | changes)}\n")
    journal = open_journal()
    assert [trial.id for trial in journal.trials] == ["t1"]
    assert f"{JOURNAL_FILE}:2: the row was changed or damaged and is left out, to be run again" in journal.notes[0]
    assert said in journal.notes[0]


def test_a_torn_last_line_is_no_row_and_a_folder_in_their_place_is_refused(open_journal, file):
    open_journal(FIRST)
    with file.open("a") as stream:
        stream.write('{"id": "t2", "plan": {"batch')
    assert [trial.id for trial in open_journal().trials] == ["t1"]
    assert [trial.id for trial in open_journal(make_row(3, 10.0)).trials] == ["t1", "t3"]
    file.unlink()
    file.mkdir()
    with pytest.raises(RunFolderError, match=f"{JOURNAL_FILE} cannot be read"):
        open_journal()
