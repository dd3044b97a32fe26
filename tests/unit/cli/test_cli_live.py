"""What a person reads while a search runs."""

import dataclasses
import io

import pytest
from rich.console import Console
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.cli._live import show_search
from fulltilt.levers import default_plan
from fulltilt.tuner import SearchNoted, SearchStarted, TrialDone

PLAN = default_plan({"batch_size": 64})


def make_trial(kind="end_to_end", why="round 1: batch_size 64", **answer):
    given = Answer(**({"samples_per_s": 1234.0, "memory_gib": 0.5} | answer))
    row = SimulatedTarget(lambda _: given)(PLAN, id="t3", why=why)
    return dataclasses.replace(row, kind=kind)


def show(*events, force_terminal=None):
    console = Console(file=io.StringIO(), width=200, force_terminal=force_terminal, no_color=True, highlight=False)
    with show_search(console) as view:
        for event in events:
            view(event)
    return console.file.getvalue()


def done(trial, **changes):
    return TrialDone(**({"trial": trial, "n_done": 3, "n_planned": 12, "seconds_left": 61.0} | changes))


RATE = "1,234 ± 1.0 % samples/s  512 MiB  batch_size 64"
FAILED = {"samples_per_s": None, "reason": "needs [3 GiB]"}


@pytest.mark.parametrize(
    ("trial", "changes", "said"),
    [
        (make_trial(), {}, [RATE, "· round 1: batch_size 64 · 3 of at most 12 trials, at most about 1 min 01 s left"]),
        (make_trial(status="out_of_memory", **FAILED), {}, ["out of memory: batch_size 64", "needs [3 GiB]"]),
        (make_trial(kind="device"), {}, ["device probe: 1,234 samples/s, 512 MiB step alone, batch_size 64"]),
        (make_trial(kind="loader"), {}, ["loader probe: 1,234 samples/s, 512 MiB loader alone, batch_size 64"]),
        (
            dataclasses.replace(make_trial(kind="memory"), samples_per_s=None, memory_allocated_peak_gib=1.25),
            {},
            ["memory probe: 1.25 GiB of tensors, estimated, batch_size 64"],
        ),
        (make_trial(kind="device", status="error", **FAILED), {}, ["device probe, error: batch_size 64", "[3 GiB]"]),
        # ``12 of about 12 trials, about 0 s left`` stood there while a noisy machine's search ran further plans.
        (make_trial(), {"n_done": 12, "n_planned": 12, "seconds_left": 0.0}, ["· 12 trials\n"]),
    ],
)
def test_a_trial_says_its_figures_why_it_was_run_and_what_is_left(trial, changes, said):
    written = show(done(trial, **changes))
    assert all(part in written for part in said)
    assert ("left" in written) is (not changes)
    assert len(written.strip().splitlines()) == 1 + (trial.status != "ok")


def test_a_pipe_that_takes_colours_gets_lines_and_no_cursor_movements():
    said = show(done(make_trial()), force_terminal=True)
    assert "1,234 ± 1.0 % samples/s" in said
    assert "\x1b[?25l" not in said
    assert "\x1b[2K" not in said


def test_rows_found_in_the_folder_are_counted_and_not_shown_again():
    started = SearchStarted(
        strategy="exhaustive", grid_size=4, n_planned=4, n_resumed=2, device="cpu", folder="runs/tune/a"
    )
    said = show(started, SearchNoted(message="a note"), done(make_trial(), is_resumed=True))
    assert "grid of 4; runs/tune/a, 2 rows found there" in said
    assert "a note" in said
    assert "1,234" not in said


@pytest.mark.parametrize("kind", ["end_to_end", "device"])
def test_a_row_of_a_busy_machine_is_marked_and_the_mark_explained(kind):
    busy = dataclasses.replace(make_trial(kind=kind), cpu_pressure_pct=83.0)
    said = show(done(busy))
    assert "% * samples/s" in said or "1,234 * samples/s" in said
    assert "· * some task waited for a core 83 % of the time" in said
    assert "*" not in show(done(make_trial(kind=kind)))
