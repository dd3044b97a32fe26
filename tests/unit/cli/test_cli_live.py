"""What a person reads while a search runs: lines, or a table that is redrawn in place."""

import contextlib
import dataclasses
import io

import pytest
from rich.console import Console
from tests.unit.cli.cli_cases import STARTED, FakeTerminal, done, make_trial

from fulltilt.cli._live import LiveTable, show_search
from fulltilt.levers import default_plan
from fulltilt.records import IN_TURNS
from fulltilt.tuner import SearchNoted, TrialCut, TrialProgressed, TrialStarted
from fulltilt.tuner.search.progress import TurnsDone

OWN_PLAN = default_plan({"batch_size": 32})
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
LONG_PLAN = {
    "batch_size": 4096, "num_workers": 12, "precision": "bf16", "compile": "max-autotune", "channels_last": True,
    "persistent_workers": True, "prefetch_factor": 8, "pin_memory": True, "fused_optimizer": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _a_usual_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def draw(*events, width=160, height=40, clock=None):
    """The lines of the frame after ``events``, and what was said above it."""
    above = Console(file=FakeTerminal(), width=width, height=height, highlight=False)
    table = LiveTable(above, clock=clock or (lambda: 100.0))
    for event in events:
        table(event)
    paper = Console(file=io.StringIO(), width=width, height=height)
    paper.print(table.build_frame())
    return paper.file.getvalue().splitlines(), above.file.getvalue()


def find_row(lines, start):
    return next(line for line in lines if line.startswith(start))


def test_a_row_holds_figures_plan_and_why_it_was_run_and_what_is_left_is_counted():
    lines, _ = draw(STARTED, done(make_trial("t3")))
    row = find_row(lines, "t3")
    assert all(part in row for part in ("1,234 ± 1.0 %", "512 MiB", "batch_size 64", "predicted the fastest"))
    assert "3 of at most 12 trials, about 1 min 01 s left" in lines[-1]


def test_the_running_trial_says_why_how_long_and_how_far_until_the_budget_ends_it():
    times_s = iter((100.0, 112.0))
    plan = default_plan({"batch_size": 128})
    started = TrialStarted(id="t4", plan=plan, why="next to [the] best", n_done=3, n_planned=9)
    progressed = TrialProgressed(id="t4", values={"stage": "measuring", "n_steps": 24})
    said = "\n".join(draw(started, progressed, clock=lambda: next(times_s))[0])
    assert all(part in said for part in ("t4 runs for 12 s: whole run, 24 steps taken", "batch_size 128"))
    assert "next to [the] best" in said
    probe = dataclasses.replace(started, kind="device")
    lines, _ = draw(STARTED, done(make_trial("t3", kind="loader")), probe)
    assert "loader alone: batch_size 64" in find_row(lines, "t3")
    assert any("t4 runs for" in line and "device probe" in line for line in lines)
    lines, above = draw(STARTED, started, TrialCut(id="t4", seconds=7.0))
    assert not any("t4 runs" in line for line in lines)
    assert "t4 was ended with the budget after 7.0 s: it is no row" in above


def test_the_fastest_so_far_is_one_that_may_be_recommended():
    large = make_trial("t1", {"batch_size": 256}, samples_per_s=2100.0, memory_gib=9.0)
    fine = make_trial("t2", {"batch_size": 128}, samples_per_s=2000.0, memory_gib=4.0)
    lines, _ = draw(STARTED, done(large), done(fine))
    assert find_row(lines, "fastest so far: t2, 2,000")  # t1 needs more than the room of 8 GiB
    assert not any("so far" in line for line in draw(STARTED, done(large))[0])


def test_plans_that_take_turns_are_shown_with_their_speeds_and_which_is_the_users():
    started = dataclasses.replace(STARTED, user_plan=OWN_PLAN)
    running = TrialStarted(id="t5", plan=OWN_PLAN, why="the finalists take turns", n_done=4, n_planned=9, kind=IN_TURNS)
    times_s = iter((100.0, 112.0))
    lines, _ = draw(started, running, clock=lambda: next(times_s))
    assert find_row(lines, "▸ in turns for 12 s: the finalists take turns")
    lines, _ = draw(started, running, took_turns())
    assert find_row(lines, "in turns: 12,160, 9,210 (yours) samples/s")
    assert not any("in turns for" in line for line in lines)


def test_no_pick_is_shown_while_nothing_has_run_whole():
    failed = make_trial("t1", status="out_of_memory", samples_per_s=None, reason="needs 3 GiB")
    lines, _ = draw(STARTED, done(make_trial("t0", kind="device")), done(failed))
    assert not any("so far" in line for line in lines)
    assert any("OOM" in line and "needs 3 GiB" in line for line in lines)


def test_an_error_stays_above_the_table_with_its_reason():
    failed = make_trial("t1", status="error", samples_per_s=None, reason="no [kernel] image")
    lines, above = draw(STARTED, SearchNoted(message="a [note]"), done(failed))
    assert all(part in above for part in ("t1 error: batch_size 64", "no [kernel] image", "a [note]"))
    assert any("no [kernel] image" in line for line in lines)
    lines, above = draw(STARTED, done(failed, is_resumed=True))  # of an earlier search: in the table alone
    assert "no [kernel] image" not in above
    assert find_row(lines, "t1")


@pytest.mark.parametrize("width", [40, 60, 80, 129, 130, 200])
@pytest.mark.parametrize("height", [14, 24, 50])
def test_a_frame_fits_the_terminal_however_long_the_plans_are(width, height):
    why = "the model expects it 3.4 % faster than the best so far, and it corrects the loader's share " * 3
    events = [done(make_trial(f"t{n}", LONG_PLAN, why=why, samples_per_s=1e6 + n)) for n in range(30)]
    running = TrialStarted(id="t30", plan=default_plan(LONG_PLAN), why=why, n_done=30, n_planned=40)
    lines, _ = draw(STARTED, *events, running, width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert find_row(lines, "t29")  # the newest is never the one that is left out
    assert any("t30 runs for" in line for line in lines)


def test_sixty_columns_keep_the_figures_whole_and_cut_the_words():
    lines, _ = draw(STARTED, done(make_trial("t3", LONG_PLAN, why="a reason " * 20)), width=60, height=24)
    index = lines.index(find_row(lines, "t3"))
    assert "1,234 ± 1.0 %  512 MiB  batch_size 4096" in lines[index]
    assert lines[index].endswith("…")
    assert lines[index + 1].strip().startswith("a reason")


@pytest.mark.parametrize("end", [None, KeyboardInterrupt])
def test_the_table_is_gone_at_the_end_unless_an_error_ends_it_and_the_cursor_is_back(end):
    console = Console(file=FakeTerminal(), width=100, height=30, highlight=False)

    def search():
        with show_search(console) as view:
            view(STARTED)
            view(done(make_trial("t3")))
            if end:
                raise end

    with pytest.raises(end) if end else contextlib.nullcontext():
        search()
    said = console.file.getvalue()
    assert said.rindex(SHOW_CURSOR) > said.rindex(HIDE_CURSOR)
    assert "model_first search on cpu: grid of 336, at most 3 min" in said
    assert "\x1b[2K" in said  # lines of it were erased
    after_frame = said[said.rindex("of at most 12") :]
    assert ("\x1b[1A" in after_frame) is (end is None)  # the cursor went back up over it


def show(*events, terminal=io.StringIO, **options):
    console = Console(file=terminal(), width=200, no_color=True, highlight=False, **options)
    with show_search(console) as view:
        for event in events:
            view(event)
    return console.file.getvalue()


def took_turns(*rows):
    """A group of two plans, the user's own the second, unless its rows are given."""
    own = make_trial("t6", OWN_PLAN, samples_per_s=9210.0, kind=IN_TURNS, why="the finalists take turns")
    other = make_trial("t5", samples_per_s=12160.0, kind=IN_TURNS, why="the finalists take turns")
    return TurnsDone(rows=rows or (other, own), n_done=6, n_planned=12, seconds_left=30.0)


RATE = "1,234 ± 1.0 % samples/s  512 MiB  · batch_size 64"
FAILED = {"samples_per_s": None, "reason": "needs [3 GiB]"}


@pytest.mark.parametrize(
    ("trial", "changes", "said"),
    [
        (make_trial(), {}, [RATE, "· predicted the fastest  · 3 of 12, about 1 min 01 s left"]),
        (make_trial(status="out_of_memory", **FAILED), {}, ["out of memory: needs [3 GiB]  · batch_size 64"]),
        (make_trial(kind="device"), {}, ["device probe: 1,234 samples/s, 512 MiB step alone  · batch_size 64"]),
        (make_trial(kind="loader"), {}, ["loader probe: 1,234 samples/s, 512 MiB loader alone  · batch_size 64"]),
        (
            dataclasses.replace(make_trial(kind="memory"), samples_per_s=None, memory_allocated_peak_gib=1.25),
            {},
            ["memory probe: 1.25 GiB of tensors, estimated  · batch_size 64"],
        ),
        (make_trial(kind="device", status="error", **FAILED), {}, ["device probe, error: needs [3 GiB]"]),
        # ``12 of about 12 trials, about 0 s left`` stood there while a noisy machine's search ran further plans.
        (make_trial(), {"n_done": 12, "n_planned": 12, "seconds_left": 0.0}, ["· 12 trials\n"]),
    ],
)
def test_a_line_says_figures_why_a_trial_was_run_and_what_is_left(trial, changes, said):
    written = show(done(trial, **changes))
    assert all(part in written for part in said)
    assert ("left" in written) is (not changes)
    assert len(written.splitlines()) == 1


@pytest.mark.parametrize("answer", [{}, {"status": "error", "samples_per_s": None, "reason": "a reason " * 30 + "\nb"}])
def test_a_line_keeps_within_its_width_and_never_loses_figures_or_what_is_left(answer):
    trial = make_trial("t3", LONG_PLAN, why="the model expects it 3.4 % faster " * 5, **answer)
    (line,) = show(done(trial)).splitlines()
    assert len(line) <= 160
    assert line.lstrip().startswith("t3  error: a reason" if answer else "t3       1,234 ± 1.0 % samples/s  512 MiB")
    assert line.endswith("…  · 3 of 12, about 1 min 01 s left")


def test_a_group_has_a_line_with_the_speeds_of_its_plans():
    said = show(dataclasses.replace(STARTED, user_plan=OWN_PLAN), took_turns())
    assert "in turns: 12,160, 9,210 (yours) samples/s  · the finalists take turns  · 6 of 12, about 30 s left" in said
    failed = make_trial("t5", status="timeout", samples_per_s=None, reason="no answer", kind=IN_TURNS)
    assert "timeout in turns: no answer  · " in show(took_turns(failed))
    assert "in turns" not in show(dataclasses.replace(took_turns(), is_resumed=True))


@pytest.mark.parametrize(
    ("name", "terminal", "options"),
    [("dumb", FakeTerminal, {}), ("xterm-256color", io.StringIO, {"force_terminal": True})],
    ids=["a dumb terminal", "a pipe that takes colours"],
)
def test_where_no_cursor_moves_there_are_lines(name, terminal, options, monkeypatch):
    monkeypatch.setenv("TERM", name)
    said = show(done(make_trial()), terminal=terminal, **options)
    assert "1,234 ± 1.0 % samples/s  512 MiB" in said
    assert "3 of 12" in said
    assert HIDE_CURSOR not in said
    assert "\x1b[2K" not in said


def test_rows_found_in_the_folder_are_counted_and_not_shown_again():
    started = dataclasses.replace(STARTED, n_resumed=2)
    said = show(started, SearchNoted(message="a note"), done(make_trial(), is_resumed=True))
    assert "; runs/tune/a, 2 rows found there" in said
    assert "a note" in said
    assert "1,234" not in said


def test_a_figure_of_a_busy_machine_is_marked_and_the_mark_explained():
    busy = dataclasses.replace(make_trial("t3"), cpu_pressure_pct=83.0)
    lines, _ = draw(STARTED, done(make_trial("t2")), done(busy))
    assert "1,234 ± 1.0 % *" in find_row(lines, "t3")
    assert "*" not in find_row(lines, "t2")
    assert find_row(lines, "* a busy machine's figure (1 row): some task waited for a core")
    assert not any("busy" in line for line in draw(STARTED, done(make_trial("t2")))[0])


def test_the_mark_of_a_busy_machine_is_explained_once_however_many_lines_have_it():
    """The explanation stood in each line, longer than the figures."""
    explained = "* a busy machine's figure: some task waited for a core more than 50 % of the time"
    for kind, marked in (("end_to_end", "% * samples/s"), ("device", "1,234 * samples/s")):
        busy = dataclasses.replace(make_trial(kind=kind), cpu_pressure_pct=83.0)
        said = show(done(make_trial(kind=kind)), done(busy), done(busy))
        assert (said.count(marked), said.count(explained)) == (2, 1)
        assert "*" not in show(done(make_trial(kind=kind)))


def test_a_search_says_at_its_start_how_long_it_takes_at_most():
    assert "grid of 336, at most 3 min 00 s (longer where single runs are long; --budget sets it); " in show(STARTED)
    asked = dataclasses.replace(STARTED, budget_s=360.0, is_budget_default=False)
    assert "grid of 336, at most 6 min 00 s; " in show(asked)
    whole = dataclasses.replace(STARTED, budget_s=None, is_budget_default=False)
    assert "grid of 336, all of which runs (--budget 10m would end it earlier); " in show(whole)
    said = "grid of 336, all of which runs: 357 trials with those in turns, more on a noisy machine "
    said += "(--budget 10m would end it earlier); "
    assert said in show(dataclasses.replace(whole, n_planned=357)), "the lines count to that"
