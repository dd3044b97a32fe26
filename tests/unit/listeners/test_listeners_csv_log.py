"""CsvLog: rows once, in order, whole, whatever happened to the process before."""

import csv
import os
import subprocess
import sys

import pytest
from listener_events import ENDED, Clock, epoch_done, evaluated, started, steps_done, tell

from fulltilt.errors import StorageError
from fulltilt.listeners import CsvLog
from fulltilt.listeners._append import AppendFile
from fulltilt.records import CheckpointStarted


def read(path):
    with path.open() as stream:
        return list(csv.DictReader(stream))


def list_steps(folder):
    return [row["step"] for row in read(folder / "steps.csv")]


def test_rows_have_their_figures_and_one_header(tmp_path):
    tell(CsvLog(tmp_path), started(), steps_done(5, loss=1.25), steps_done(10, loss=1.0), ENDED)
    rows = read(tmp_path / "steps.csv")
    assert [(row["step"], row["loss"], row["lr"]) for row in rows] == [("5", "1.25", "0.1"), ("10", "1.0", "0.1")]
    assert (tmp_path / "steps.csv").read_text().count("samples_per_s") == 1


def test_rows_that_come_faster_than_one_a_second_are_stored_together(tmp_path):
    clock = Clock()
    log = tell(CsvLog(tmp_path, clock=clock), started())
    stored = []
    for step, wait_s in enumerate((0.4, 0.4, 0.4, 0.4, 0.4, 1.0, 1.0), start=1):
        clock.now_s += wait_s
        log(steps_done(step))
        stored.append(len(list_steps(tmp_path)) if (tmp_path / "steps.csv").exists() else 0)
    assert stored == [0, 0, 3, 3, 3, 6, 7], "one that comes a second after the last does not wait for the next event"


@pytest.mark.parametrize("event", [CheckpointStarted(epoch=0, step=7), epoch_done(step=7), ENDED], ids=repr)
def test_any_other_event_stores_what_was_held(tmp_path, event):
    """What another reader of the file sees is what a killed process leaves."""
    log = tell(CsvLog(tmp_path, clock=Clock()), *map(steps_done, (5, 6, 7)))
    assert list_steps(tmp_path) == ["5"]
    log(event)
    assert list_steps(tmp_path) == ["5", "6", "7"]


def test_a_step_file_that_cannot_be_written_leaves_the_epochs(tmp_path):
    (tmp_path / "steps.csv").mkdir()
    log = CsvLog(tmp_path, clock=Clock())
    with pytest.raises(StorageError, match=r"steps\.csv"):
        log(steps_done(5))
    log(epoch_done(loss=0.7))
    assert [row["loss"] for row in read(tmp_path / "epochs.csv")] == ["0.7"]


def test_a_resumed_run_drops_the_rows_it_will_repeat(tmp_path):
    steps = steps_done(5, loss=5.0), steps_done(10, loss=4.0), steps_done(15, loss=3.0)
    tell(CsvLog(tmp_path), started(), *steps, CheckpointStarted(epoch=0, step=15))
    tell(CsvLog(tmp_path), started(first_step=10), steps_done(15, loss=2.5), ENDED)
    rows = [(row["step"], row["loss"]) for row in read(tmp_path / "steps.csv")]
    assert rows == [("5", "5.0"), ("10", "4.0"), ("15", "2.5")]


def test_a_torn_last_line_is_cut_off_on_resume(tmp_path):
    tell(CsvLog(tmp_path), started(), steps_done(5), CheckpointStarted(epoch=0, step=5))
    with (tmp_path / "steps.csv").open("a") as stream:
        stream.write("1,10,0,5,5")
    tell(CsvLog(tmp_path), started(first_step=5), steps_done(10), ENDED)
    assert list_steps(tmp_path) == ["5", "10"]


def test_a_metric_that_comes_later_gets_a_column_and_so_do_phases(tmp_path):
    metrics = {"loss": 0.6, "accuracy": 0.9}
    steps = steps_done(5, phases_ms={"forward": 2.5, "h2d": None})
    tell(CsvLog(tmp_path), started(), steps, epoch_done(loss=0.7), evaluated(metrics=metrics), ENDED)
    train, val = read(tmp_path / "epochs.csv")
    assert (train["split"], train["loss"], train["accuracy"], train["samples_per_s"]) == ("train", "0.7", "", "1400.0")
    assert (val["split"], val["loss"], val["accuracy"], val["training_seconds"]) == ("val", "0.6", "0.9", "2.0")
    (row,) = read(tmp_path / "steps.csv")
    assert (train["epoch"], val["epoch"], row["epoch"]) == ("1", "1", "1")
    assert (row["forward_ms"], row["h2d_ms"]) == ("2.5", "")


def test_rows_are_appended_and_never_rewritten(tmp_path):
    clock = Clock()
    log, path = CsvLog(tmp_path, clock=clock), tmp_path / "steps.csv"
    tell(log, started(), steps_done(5), CheckpointStarted(epoch=0, step=5))
    inode, start = os.stat(path).st_ino, path.read_text()
    for step in range(10, 100, 5):
        clock.now_s += 1.0
        log(steps_done(step))
    assert len(read(path)) == 19
    assert os.stat(path).st_ino == inode
    assert path.read_text().startswith(start)


@pytest.mark.parametrize(("first_step", "expected"), [(5, ["5", "10"]), (0, ["10"])])
def test_after_the_end_the_same_log_can_take_another_run_and_one_from_scratch_starts_empty(
    tmp_path, first_step, expected
):
    tell(CsvLog(tmp_path), started(), steps_done(5), ENDED, started(first_step=first_step), steps_done(10), ENDED)
    assert list_steps(tmp_path) == expected


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        CsvLog(tmp_path / "file")(steps_done(5))


def test_append_on_a_full_device_says_so():
    with pytest.raises(StorageError, match="No space left on device; 2 lines are lost"):
        AppendFile("/dev/full").append(["a line", "another"])


CUT_SHORT = """
import resource, signal, sys
from fulltilt.errors import StorageError
from fulltilt.listeners._append import AppendFile

file = AppendFile(sys.argv[1])
file.append(["whole"])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
try:
    file.append(["short", "x" * 100])
except StorageError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    file.append(["after"])
"""


def test_append_takes_back_what_it_wrote_of_its_lines(tmp_path):
    subprocess.run([sys.executable, "-c", CUT_SHORT, str(tmp_path / "log.txt")], check=True, timeout=600)
    assert (tmp_path / "log.txt").read_text() == "whole\nafter\n"
