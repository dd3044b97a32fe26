"""ProgressBar: what a person reads, on a terminal and in a log file."""

import dataclasses
import io

import pytest
from listener_events import ENDED, epoch_done, evaluated, started, steps_done, tell
from rich.console import Console

from fulltilt.listeners import ProgressBar
from fulltilt.listeners.progress_bar import format_seconds
from fulltilt.records import CheckpointSaved, Noted, RunEnded


class Terminal(io.StringIO):
    def isatty(self):
        return True


EPOCH, EVALUATED = epoch_done(), evaluated(metrics={"accuracy": 0.9125, "error_pct/rare": 90.0})


def run(stream, events):
    tell(ProgressBar(Console(file=stream, width=160)), *events)
    return stream.getvalue()


def test_without_a_terminal_there_is_one_line_an_epoch_and_no_control_code():
    text = run(io.StringIO(), [started(), steps_done(5), steps_done(10), EPOCH, EVALUATED, ENDED])
    assert text.splitlines() == [
        "digits on cpu, 1,234 parameters, files in runs/x",
        "epoch 1/2  loss 0.5  1,400 samples/s  2.0 s  val accuracy 0.9125",
    ]
    assert "\x1b" not in text
    assert "\r" not in text


SINCE = "of them since the checkpoint it went on from"
INTERRUPTED = RunEnded(reason="interrupted", step=20, seconds=4.2, metrics={})
SAVED = CheckpointSaved(epoch=1, step=5, path="checkpoint.pt", seconds=0.1)
FAILED = RunEnded(reason="failed: StorageError: no space; 3 are kept", step=7, seconds=2.0, metrics={})


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ([started(first_step=14), INTERRUPTED], f"interrupted after 20 steps, 6 {SINCE}, 4.2 s"),
        ([started(), EPOCH, Noted(message="x")], "note: x"),
        ([started(), steps_done(5), EVALUATED], "val accuracy 0.9125"),
        ([started(), Noted(message="fp16 [needs] a GPU", level="warning")], "warning: fp16 [needs] a GPU"),
        ([started(), FAILED], "failed after 7 steps, 2.0 s"),
        ([started(), SAVED, FAILED], "failed after 7 steps, 2.0 s; the checkpoint of step 5 is kept"),
        ([started(), dataclasses.replace(FAILED, step=1)], "failed after 1 step, 2.0 s"),
        ([started(report=("CPU: 2 cores", "batch: 8 × accumulate 4"))], "  batch: 8 × accumulate 4"),
    ],
)
def test_the_last_line_says_what_came_last(events, last):
    lines = run(io.StringIO(), events).splitlines()
    assert lines[-1] == last
    assert ("epoch 1/2  loss 0.5  1,400 samples/s  2.0 s" in lines) == (EPOCH in events), "without evaluation too"


def test_a_quiet_console_leaves_the_warnings_one_line_each_on_stderr(capsys):
    """Out of memory and a full disk were told to nobody"""
    console = Console(file=(stream := io.StringIO()), quiet=True)
    noted = [Noted(message="x"), Noted(message="memory ran\nout", level="warning")]
    tell(ProgressBar(console), started(), steps_done(5), *noted, EPOCH, EVALUATED, INTERRUPTED)
    assert (capsys.readouterr(), stream.getvalue()) == (("", "warning: memory ran out\n"), "")


@pytest.mark.parametrize(
    ("changes", "step", "left"),
    [
        ({}, "step 5/20 ", "samples/s · 6.0 s left"),  # 15 steps at 0.4 s
        ({"first_step": 3}, "step 5/20 ", "samples/s · 15.0 s left"),  # 2 steps since it was resumed took 2 s
        ({"steps_per_epoch": None}, "step 5 ", "samples/s"),
    ],
)
def test_a_terminal_shows_step_loss_speed_and_what_is_left_where_the_end_is_known(changes, step, left):
    text = run(Terminal(), [started(**changes), steps_done(5, seconds=2.0)])
    assert all(part in text for part in (step, "loss 0.4321", f"1,500 {left}"))
    assert ("left" in text) is ("left" in left)


def test_a_bar_is_drawn_twice_a_second_at_most():
    stream, now_s = Terminal(), 0.0
    bar = ProgressBar(Console(file=stream, width=160), clock=lambda: now_s)
    bar(started(steps_per_epoch=1000))
    for step in range(100):
        now_s += 0.01
        bar(steps_done(1000 + step, seconds=0.01))
    drawn = [step for step in range(100) if f"step {1000 + step:,}/" in stream.getvalue()]
    assert len(drawn) == 2
    assert drawn[0] == 0


def test_durations_are_written_for_people():
    assert [format_seconds(s) for s in (0.04, 59.94, 187.2, 8100)] == ["0.0 s", "59.9 s", "3:07", "2:15:00"]


def test_a_run_that_starts_anew_with_smaller_batches_has_one_bar_and_says_what_has_changed():
    first = started(report=("CPU: 2 cores, 3.5 GiB free", "batch: 8 × accumulate 4"))
    again = started(steps_per_epoch=10, first_step=5, report=("CPU: 2 cores, 3.4 GiB free", "batch: 4 × accumulate 8"))
    text = run(Terminal(), [first, steps_done(5), again, steps_done(10), INTERRUPTED])
    told = ("files in runs/x", "CPU: 2 cores", "batch: 8 × accumulate 4", "batch: 4 × accumulate 8")
    assert [text.count(line) for line in told] == [1, 1, 1, 1]
    assert text.rstrip().endswith(f"interrupted after 20 steps, 15 {SINCE}, 4.2 s")
