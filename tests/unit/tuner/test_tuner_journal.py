"""The journal: what was written is handed out again once, in order, and unreadable lines cost only themselves."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.unit.tuner.tuner_cases import USER, make_row, make_turns

from fulltilt.errors import RunFolderError
from fulltilt.records import IN_TURNS, WHOLE_RUN
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.search.journal import JOURNAL_FILE, Journal

FIRST, SECOND = make_row(1, 10.0), make_row(2, 10.0)
OTHER, THIRD = USER.replace(num_workers=2), USER.replace(num_workers=4)


def make_group(group, *plans, first=10, **options):
    return [make_turns(first + 10 * group + i, group, 100.0, plan=plan, **options) for i, plan in enumerate(plans)]


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
    open_journal(FIRST, make_row(2, 10.0, kind="device"), make_row(3, 10.0, kind="device"))
    journal = open_journal()
    assert journal.holds((USER, WHOLE_RUN))
    assert journal.take((USER, WHOLE_RUN)).id == "t1"
    assert journal.take((USER, WHOLE_RUN)) is None
    assert [journal.take((USER, "device")).id for _ in range(2)] == ["t2", "t3"]
    assert journal.take((USER, "device")) is None
    assert (journal.next_ids(), journal.next_ids(2)) == (["t4"], ["t4", "t5"])


def test_groups_come_back_whole_in_order_and_once(open_journal):
    pairs = [make_group(1, USER, OTHER), make_group(2, USER, THIRD), make_group(3, USER, OTHER)]
    open_journal(FIRST, *pairs[0], *pairs[1], *pairs[2])
    journal = open_journal()
    assert journal.count_groups() == 3
    assert not journal.take_group([USER, OTHER, THIRD]), "a group of other plans says nothing of these"
    assert not journal.take_group([USER])
    assert [journal.take_group([OTHER, USER]) for _ in range(3)] == [pairs[0], pairs[2], []]
    assert journal.take((USER, IN_TURNS)) is None
    assert journal.take_rest((WHOLE_RUN, IN_TURNS)) == [FIRST, *pairs[1]]
    assert not journal.holds_group([USER, THIRD])


def test_a_group_in_which_a_plan_failed_answers_for_all_plans_that_it_had(open_journal):
    """It was measured anew by every search that read it back: its row is that of the plan that failed alone."""
    failed, after = make_group(1, OTHER, status="error"), make_group(2, USER, THIRD)
    open_journal(*failed, *after)
    journal = open_journal()
    assert not journal.holds_group([USER, THIRD.replace(num_workers=1)])
    assert journal.take_group([USER, OTHER, THIRD]) == failed
    assert journal.take_group([USER, THIRD]) == after


def test_a_group_that_was_torn_or_damaged_is_measured_anew_under_another_number(open_journal, file):
    open_journal(*make_group(1, USER, OTHER), *make_group(2, USER, OTHER))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:40])
    journal = open_journal()
    assert journal.take_group([USER, OTHER]) == make_group(1, USER, OTHER)
    assert not journal.holds_group([USER, OTHER])
    assert journal.count_groups() == 2
    assert [row.id for row in journal.take_rest((IN_TURNS,))] == ["t30"], "what is whole of it is kept as a row"


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


GIB = 2**30
SKIPPED = make_row(2, None, status="skipped", reason="larger than batch 32, which ran out of memory", batch_size=64)


@pytest.fixture
def run_within(tmp_path):
    """Open the folder's journal while so much memory is free, append rows → the journal."""

    def open_and_append(limit_gib, *rows):
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=[JOURNAL_FILE]) as folder:
            journal = Journal(folder, passing_limit_bytes=limit_gib and limit_gib * GIB)
            for row in rows:
                journal.append(*(row if isinstance(row, list) else [row]))
            return journal

    return open_and_append


@pytest.mark.parametrize(
    ("then_gib", "now_gib", "runs_again"), [(8, 16, True), (8, 8, False), (100, 105, False), (16, 8, False),
                                            (None, 16, False)],
)  # fmt: skip
def test_what_ran_out_of_the_memory_that_was_free_then_runs_again_where_more_is(
    run_within, then_gib, now_gib, runs_again
):
    """A search beside another program called large batches out of memory for good."""
    failed = make_row(1, None, status="out_of_memory", reason="no room")
    other = make_row(3, 10.0, num_workers=1)
    group = make_group(1, THIRD, status="out_of_memory")
    run_within(then_gib, failed, SKIPPED, other, make_row(4, None, status="error", reason="boom", plan=OTHER), group)
    journal = run_within(now_gib)
    assert [journal.holds((row.plan, WHOLE_RUN)) for row in (failed, SKIPPED)] == [not runs_again] * 2
    assert journal.holds_group([THIRD, USER]) is not runs_again
    assert all(journal.holds((plan, WHOLE_RUN)) for plan in (other.plan, OTHER))
    assert (journal.n_found, len(journal.trials)) == (5 - 3 * runs_again, 5)
    assert journal.next_ids() == ["t21"], "ids are not given twice"
    said = (
        "t1, t2, t20: ran out of the memory that was free, and more was since (16.00 GiB for a trial): to be run again"
    )
    assert journal.notes == [said] * runs_again


def test_what_ran_again_where_more_memory_was_free_stays_though_less_is_later(run_within):
    run_within(8, make_row(1, None, status="out_of_memory", reason="no room"), SKIPPED)
    assert run_within(16, make_row(3, 10.0)).take((USER, WHOLE_RUN)) is None
    journal = run_within(4)
    assert journal.take((USER, WHOLE_RUN)).id == "t3"
    assert not journal.holds((SKIPPED.plan, WHOLE_RUN))
    run_within(4, dataclasses.replace(SKIPPED, id="t4"))
    assert run_within(4).holds((SKIPPED.plan, WHOLE_RUN)), "it does not run again and again"
