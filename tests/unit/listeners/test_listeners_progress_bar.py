"""ProgressBar: what a person reads, on a terminal and in a log file."""

import io

from rich.console import Console

from fulltilt.listeners import ProgressBar, tell_warnings
from fulltilt.listeners.progress_bar import format_seconds
from fulltilt.records import EpochDone, Evaluated, Noted, RunEnded, RunStarted, StepsDone


class Terminal(io.StringIO):
    def isatty(self):
        return True


def started(**more):
    values = {"steps_per_epoch": 10, "n_epochs": 2} | more
    return RunStarted(
        name="digits", out_dir="runs/x", device="cpu", plan={}, n_parameters=1234, n_samples=100, **values
    )


def steps_done(step, seconds=1.0):
    return StepsDone(
        epoch=0,
        step=step,
        step_in_epoch=step,
        n_steps=5,
        n_samples=50,
        seconds=seconds,
        loss=0.4321,
        lr=0.1,
        samples_per_s=1500.0,
    )


EPOCH = EpochDone(epoch=0, step=10, loss=0.5, metrics={}, seconds=2.0, samples_per_s=1400.0)
EVALUATED = Evaluated(epoch=0, step=10, split="val", metrics={"accuracy": 0.9125}, seconds=0.1, training_seconds=2.0)
ENDED = RunEnded(reason="finished", step=20, seconds=4.2, metrics={})


def run(stream, events):
    bar = ProgressBar(Console(file=stream, width=160))
    for event in events:
        bar(event)
    return stream.getvalue()


def test_without_a_terminal_there_is_one_line_an_epoch_and_no_control_code():
    text = run(io.StringIO(), [started(), steps_done(5), steps_done(10), EPOCH, EVALUATED, ENDED])
    assert text.splitlines() == [
        "digits on cpu, 1,234 parameters, files in runs/x",
        "epoch 1/2  loss 0.5  1,400 samples/s  2.0 s  val accuracy 0.9125",
        "finished after 20 steps, 4.2 s",
    ]
    assert "\x1b" not in text
    assert "\r" not in text


def test_a_run_that_went_on_says_how_many_of_its_steps_are_new():
    """``finished after 270 steps, 17.5 s`` were all its steps and the seconds of this process."""
    text = run(io.StringIO(), [started(first_step=14), ENDED])
    assert "finished after 20 steps, 6 of them since the checkpoint it went on from, 4.2 s" in text


def test_an_epoch_without_evaluation_is_printed_too():
    assert "epoch 1/2  loss 0.5" in run(io.StringIO(), [started(), EPOCH, ENDED])


def test_an_evaluation_in_the_middle_of_an_epoch_is_printed():
    assert "val accuracy 0.9125" in run(io.StringIO(), [started(), steps_done(5), EVALUATED]).splitlines()[-1]


def test_a_terminal_shows_step_loss_speed_and_what_is_left():
    text = run(Terminal(), [started(), steps_done(5, seconds=2.0)])
    assert "step 5/20" in text
    assert "loss 0.4321" in text
    assert "1,500 samples/s" in text
    assert "6.0 s left" in text  # 15 steps at 0.4 s


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


def test_what_is_left_counts_from_where_the_run_was_resumed():
    text = run(Terminal(), [started(first_step=10), steps_done(15, seconds=2.0)])
    assert "2.0 s left" in text  # 5 steps at 0.4 s


def test_a_run_of_unknown_length_promises_no_end():
    text = run(Terminal(), [started(steps_per_epoch=None), steps_done(5)])
    assert "step 5 " in text
    assert "left" not in text


def test_notes_are_printed_as_they_are():
    text = run(io.StringIO(), [started(), Noted(message="fp16 [needs] a GPU", level="warning")])
    assert text.splitlines()[-1] == "warning: fp16 [needs] a GPU"


def test_a_failed_run_says_after_how_many_steps_before_it_says_why():
    ended = RunEnded(reason="failed: StorageError: no space; 3 are kept", step=7, seconds=2.0, metrics={})
    last = run(io.StringIO(), [started(), ended]).splitlines()[-1]
    assert last == "failed after 7 steps, 2.0 s: StorageError: no space; 3 are kept"


def test_without_progress_warnings_are_still_told_and_notes_are_not(capsys):
    tell_warnings(Noted(message="slower than promised", level="warning"))
    tell_warnings(Noted(message="of use to nobody"))
    assert capsys.readouterr() == ("", "warning: slower than promised\n")


def test_durations_are_written_for_people():
    assert [format_seconds(s) for s in (0.04, 59.94, 187.2, 8100)] == ["0.0 s", "59.9 s", "3:07", "2:15:00"]


def test_what_the_run_is_on_is_printed_below_its_name():
    text = run(io.StringIO(), [started(report=("CPU: 2 cores", "batch: 8 × accumulate 4"))])
    assert text.splitlines()[1:] == ["  CPU: 2 cores", "  batch: 8 × accumulate 4"]


def test_a_run_that_starts_anew_with_smaller_batches_has_one_bar():
    again = started(steps_per_epoch=10, first_step=5)
    text = run(Terminal(), [started(), steps_done(5), again, steps_done(10), ENDED])
    assert text.count("files in runs/x") == 2
    assert text.rstrip().endswith("finished after 20 steps, 15 of them since the checkpoint it went on from, 4.2 s")
