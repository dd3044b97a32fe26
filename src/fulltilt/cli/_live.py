"""What a search shows while it runs: a table redrawn in place, or lines where the console cannot be redrawn.

The table holds the last trials, the one that runs, the fastest so far and what is left. It is drawn once a second,
since the search measures on this machine. The console draws from a thread of its own, out of tuples that are replaced
whole and read once a part, so no lock is needed; at worst a frame shows a trial as running a moment after its end.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fulltilt.cli import _live_lines as words
from fulltilt.records import IN_TURNS, PROBES, Trial, format_gib
from fulltilt.report import describe_busy, describe_plan, format_duration
from fulltilt.tuner.picks.finalists import filter_safe
from fulltilt.tuner.picks.speed import read_rate
from fulltilt.tuner.search import progress

N_ROWS = 10  # trials shown at most
N_OTHER_LINES = 15  # of a frame, beside its rows: head, legend, running trial, picks, what is left
WIDE = 130  # columns from which why a trial was chosen stands beside its plan, not under it
BAR_WIDTH = 20
LOUD = ("error", "timeout")  # ends that are also said above the table, where they stay
STAGES = {
    "configured": "building the run",
    "built": "warming up",
    "measuring": "{n_steps} steps taken",
    "rehearsing": "rehearsing its {part}",
}


@contextlib.contextmanager
def show_search(console: Console) -> Iterator[progress.OnEvent]:
    """Show the events of a search: as a table redrawn in place where the console can be redrawn, else as lines.

    A pipe that was told to take colours (``FORCE_COLOR``) still gets lines. The table is gone at the end; where the
    block is left by an error it stays to be read. The cursor is shown again either way.
    """
    if not (console.is_interactive and console.file.isatty()):
        yield words.SearchLines(console)
        return
    table = LiveTable(console)
    live = Live(
        get_renderable=table.build_frame,
        console=console,
        refresh_per_second=1,
        transient=True,
        vertical_overflow="crop",
    )
    with live:
        try:
            yield table
        except BaseException:
            live.transient = False
            raise


class LiveTable:
    """Takes the events of a search and builds the table.

    Args:
        clock: Seconds, for how long the running trial has been at it.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console, clock
        self._trials: tuple[Trial, ...] = ()
        self._running: progress.TrialStarted | None = None
        self._running_since_s = 0.0
        self._stage = ""
        self._last: progress.TrialDone | progress.TurnsDone | None = None
        self._turns = ""  # the speeds of the last group
        self._started: progress.SearchStarted | None = None

    def __call__(self, event: progress.SearchEvent) -> None:
        match event:
            case progress.SearchStarted():
                self._started = event
            case progress.TrialStarted():
                self._running, self._running_since_s, self._stage = event, self._clock(), "starting"
            case progress.TrialProgressed():
                stage = STAGES.get(str(event.values.get("stage")), "under way")
                self._stage = stage.format(**{"n_steps": 0, "part": "", **event.values})
            case progress.TrialDone():
                self._take(event)
            case progress.TurnsDone():
                user_plan = self._started.user_plan if self._started else None
                self._last, self._running, self._turns = event, None, words.describe_group(event, user_plan)
            case progress.TrialCut():
                self._running = None
        if said := words.describe_event(event):
            self._console.print(said, style="" if isinstance(event, progress.SearchStarted) else "yellow", markup=False)

    def _take(self, event: progress.TrialDone) -> None:
        trial = event.trial
        if not event.is_resumed and trial.status in LOUD:
            said = f"{trial.id} {trial.status}: {describe_plan(trial.plan)}\n  {trial.reason}"
            self._console.print(said, style=words.STATUS_STYLES[trial.status], markup=False)
        self._trials = (*self._trials, trial)
        self._last, self._running = event, None

    def build_frame(self) -> Group:
        """Build the table as it stands, in the console's width and height."""
        is_wide = self._console.width >= WIDE
        room = (self._console.height - N_OTHER_LINES) // (1 if is_wide else 2)
        shown = self._trials[-max(1, min(N_ROWS, room)) :]
        legend = describe_busy(map(words.read_row, shown))
        return Group(
            *([_build_table(shown, is_wide=is_wide)] if shown else []),
            *([_fit(legend, "dim")] if legend else []),
            *("", *self._build_running(), "", *self._build_fastest(), self._build_left()),
        )

    def _build_running(self) -> Iterator[Text]:
        event = self._running
        if event is None:
            idle = "between two trials" if self._started else "reading the workload in a process of its own"
            yield Text(f"▸ {idle}", "dim")
            return
        if event.kind == IN_TURNS:
            yield _fit(f"▸ in turns for {format_duration(self._clock() - self._running_since_s)}: {event.why}", "bold")
            return
        part = f"{event.kind} probe" if event.kind in PROBES else "whole run"
        seconds = format_duration(self._clock() - self._running_since_s)
        yield _fit(f"▸ {event.id} runs for {seconds}: {part}, {self._stage}", "bold")
        yield _fit(f"  {describe_plan(event.plan)}")
        yield _fit(f"  {event.why}", "dim")

    def _build_fastest(self) -> Iterator[Text]:
        """Build the fastest whole run so far, and the speeds of the last group in turns."""
        whole = [trial for trial in self._trials if trial.status == "ok" and trial.kind not in PROBES]
        fine = filter_safe(whole, self._started.memory_room_gib if self._started else None)
        if fine:
            fastest = max(fine, key=read_rate)
            yield _fit(f"fastest so far: {fastest.id}, {words.describe_rate(fastest)} samples/s", "bold green")
            yield _fit(f"  {describe_plan(fastest.plan)}", "green")
        if self._turns:
            yield _fit(self._turns, "dim")

    def _build_left(self) -> Text:
        last = self._last
        if last is None:
            return Text()
        n_filled = min(BAR_WIDTH, BAR_WIDTH * last.n_done // max(last.n_planned, 1))
        text = _fit("━" * n_filled, "green").append("━" * (BAR_WIDTH - n_filled), style="dim")
        return text.append(f" {words.describe_left(last)}", style="default")


def _build_table(trials: tuple[Trial, ...], *, is_wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("trial", no_wrap=True)
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("plan" if is_wide else "plan, and why it was run", no_wrap=True, ratio=3, overflow="ellipsis")
    if is_wide:
        table.add_column("why it was run", no_wrap=True, ratio=2, overflow="ellipsis")
    for trial in trials:
        is_ok, is_probe = trial.status == "ok", trial.kind in PROBES
        rate = words.describe_rate(trial) or "–" if is_ok else trial.status.replace("out_of_memory", "OOM")
        memory_gib = words.read_memory_gib(trial) if is_ok else None
        memory = "" if memory_gib is None else format_gib(memory_gib)
        part = f"{words.PROBE_NAMES[trial.kind]}: " if is_probe else ""
        plan = Text(f"{part}{describe_plan(trial.plan)}")
        why = Text(((trial.why if is_ok else trial.reason) or "").partition("\n")[0], "dim")
        texts = [plan, why] if is_wide else [plan.append("\n").append_text(why)]
        style = words.STATUS_STYLES[trial.status] if not is_ok else "dim" if is_probe else ""
        table.add_row(trial.id, rate, memory, *texts, style=style)
    return table


def _fit(text: str, style: str = "") -> Text:
    """Build one line whatever the width: what does not fit ends with an ellipsis."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")
