"""The table of a running search, redrawn in place: the last trials, the one that runs, the picks so far, what is left.

It is drawn about once a second: the search measures on this machine. The console draws from a thread of its own, out of
tuples that are replaced whole and read once a part, so no lock is needed; at worst a frame shows a trial as running a
moment after its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fulltilt.cli._live_words import (
    KINDS,
    PROBE_NAMES,
    STATUS_STYLES,
    describe_cut,
    describe_left,
    describe_rate,
    describe_start,
    read_memory_gib,
    read_row,
)
from fulltilt.records import PROBES, WHOLE_RUNS, Plan, Trial, format_gib
from fulltilt.report import describe_busy, describe_plan, format_duration
from fulltilt.tuner.search.progress import (
    SearchEvent,
    SearchNoted,
    SearchStarted,
    TrialCut,
    TrialDone,
    TrialProgressed,
    TrialStarted,
)

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

N_ROWS = 10  # trials shown at most
N_OTHER_LINES = 15  # of a frame, beside its rows: head, legend, running trial, picks, what is left
WIDE = 130  # columns from which why a trial was chosen stands beside its plan, not under it
BAR_WIDTH = 20
LOUD = ("error", "timeout")  # ends that are also said above the table, where they stay
PICK_NAMES = {
    "recommended": "recommended",
    "throughput": "fastest",
    "efficiency": "most per GiB",
    "memory": "least memory",
}
STAGES = {"configured": "building the run", "built": "warming up"}


class LiveTable:
    """Takes the events of a search and redraws the table.

    Args:
        clock: Seconds, for how long the running trial has been at it.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console, clock
        self._trials: tuple[Trial, ...] = ()
        self._running: TrialStarted | None = None
        self._running_since_s = 0.0
        self._stage = ""
        self._last: TrialDone | None = None
        self._picks: tuple[tuple[str, Trial], ...] = ()
        self._user_plan: Plan | None = None
        self._memory_room_gib: float | None = None
        self._has_started = False

    @contextlib.contextmanager
    def show(self) -> Iterator[LiveTable]:
        """Draw until the block ends; then the table is gone. Where the block is left by an error it stays to be read.

        The cursor is shown again either way.
        """
        from rich.live import Live

        live = Live(
            get_renderable=self.build_frame,
            console=self._console,
            refresh_per_second=1,
            transient=True,
            vertical_overflow="crop",
        )
        with live:
            try:
                yield self
            except BaseException:
                live.transient = False
                raise

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case SearchStarted():
                self._has_started = True
                self._user_plan, self._memory_room_gib = event.user_plan, event.memory_room_gib
                self._console.print(describe_start(event), markup=False)
            case SearchNoted():
                self._console.print(event.message, style="yellow", markup=False)
            case TrialStarted():
                self._running, self._running_since_s, self._stage = event, self._clock(), "starting"
            case TrialProgressed():
                self._stage = _describe_stage(event)
            case TrialDone():
                self._take(event)
            case TrialCut():
                self._running = None
                self._console.print(describe_cut(event), style="yellow", markup=False)

    def _take(self, event: TrialDone) -> None:
        trial = event.trial
        if not event.is_resumed and trial.status in LOUD:
            said = f"{trial.id} {trial.status}: {describe_plan(trial.plan)}\n  {trial.reason}"
            self._console.print(said, style=STATUS_STYLES[trial.status], markup=False)
        self._trials = (*self._trials, trial)
        self._last, self._running = event, None
        if trial.kind in WHOLE_RUNS:
            self._picks = choose_picks(self._trials, self._user_plan, self._memory_room_gib)

    def build_frame(self) -> Group:
        """The table as it stands, in the console's width and height."""
        from rich.console import Group

        shown = self._select_shown()
        legend = describe_busy(map(read_row, shown))
        parts = [self._build_rows(shown)] if shown else []
        parts += [_fit(_build_dim(legend))] if legend else []
        return Group(*parts, self._build_running(), self._build_picks(), self._build_left())

    @property
    def _is_wide(self) -> bool:
        return self._console.width >= WIDE

    def _select_shown(self) -> tuple[Trial, ...]:
        """The newest trials that there is room for."""
        room = (self._console.height - N_OTHER_LINES) // (1 if self._is_wide else 2)
        return self._trials[-max(1, min(N_ROWS, room)) :]

    def _build_rows(self, trials: tuple[Trial, ...]) -> Table:
        from rich.table import Table

        is_wide = self._is_wide
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        table.add_column("trial", no_wrap=True)
        table.add_column("samples/s", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
        table.add_column("plan" if is_wide else "plan, and why it was run", no_wrap=True, ratio=3, overflow="ellipsis")
        if is_wide:
            table.add_column("why it was run", no_wrap=True, ratio=2, overflow="ellipsis")
        for trial in trials:
            memory = read_memory_gib(trial) if trial.status == "ok" else None
            plan, why = _describe_plan(trial), _build_dim(_describe_why(trial))
            cells = [trial.id, _describe_result(trial), "" if memory is None else format_gib(memory)]
            texts = [plan, why] if is_wide else [plan.append("\n").append_text(why)]
            table.add_row(*cells, *texts, style=_choose_style(trial))
        return table

    def _build_running(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        event = self._running
        if event is None:
            idle = "between two trials" if self._has_started else "reading the workload in a process of its own"
            return Group(Text(), Text(f"▸ {idle}", style="dim"), Text())
        part = f"{event.kind} probe" if event.kind in PROBES else f"whole run{KINDS.get(event.kind, '')}"
        seconds = format_duration(self._clock() - self._running_since_s)
        head = Text(f"▸ {event.id} runs for {seconds}: {part}, {self._stage}", style="bold")
        return Group(
            Text(),
            *(_fit(line) for line in (head, Text(f"  {describe_plan(event.plan)}"), _build_dim(f"  {event.why}"))),
        )

    def _build_picks(self) -> Group:
        """The picks as they would be if the search ended now; a plan that is several of them stands once."""
        from rich.console import Group
        from rich.text import Text

        picks, names = self._picks, dict[str, list[str]]()
        for name, trial in picks:
            names.setdefault(trial.id, []).append(PICK_NAMES[name])
        rows = {trial.id: trial for _, trial in picks}
        lines = []
        for index, (id, titles) in enumerate(names.items()):
            trial = rows[id]
            memory = trial.device_memory_peak_gib
            size = f", {format_gib(memory)}" if memory is not None else ""
            text = Text(f"{', '.join(titles)} so far: ", style="bold green" if not index else "green")
            text.append(f"{id}, {describe_rate(trial)} samples/s{size}", style="not bold")
            lines += [_fit(text), _fit(Text(f"  {describe_plan(trial.plan)}", style="green"))]
        return Group(Text(), *lines) if lines else Group(Text())

    def _build_left(self) -> Text:
        from rich.text import Text

        last = self._last
        if last is None:
            return Text()
        n_done, n_planned = last.n_done, max(last.n_planned, 1)
        n_filled = min(BAR_WIDTH, BAR_WIDTH * n_done // n_planned)
        text = Text("━" * n_filled, style="green").append("━" * (BAR_WIDTH - n_filled), style="dim")
        return _fit(text.append(f" {describe_left(last)}", style="default"))


def choose_picks(
    trials: tuple[Trial, ...], user_plan: Plan | None, memory_room_gib: float | None
) -> tuple[tuple[str, Trial], ...]:
    """(name, row) of the picks by the rules that decide at the end; nothing before a whole run ended well."""
    from fulltilt.errors import NoPlanError
    from fulltilt.tuner.picks import recommend

    table, _ = recommend.merge_repeats(trials)
    try:
        picks = recommend.pick(
            table,
            user_plan=user_plan or table[0].plan,
            memory_limit_gib=memory_room_gib,
            memory_safety_pct=100.0,  # the room has its distance from the limit already
            runs=[trial for trial in trials if trial.kind in WHOLE_RUNS],
        )
    except NoPlanError:
        return ()
    chosen = [(name, getattr(picks, name)) for name in PICK_NAMES]
    return tuple((name, pick.trial) for name, pick in chosen if pick is not None)


def _describe_stage(event: TrialProgressed) -> str:
    if event.values.get("stage") == "measuring":
        return f"{event.values.get('n_steps', 0)} steps taken"
    if event.values.get("stage") == "rehearsing":
        return f"rehearsing its {event.values.get('part')}"
    return STAGES.get(str(event.values.get("stage")), "under way")


def _describe_result(trial: Trial) -> str:
    if trial.status != "ok":
        return "OOM" if trial.status == "out_of_memory" else trial.status
    return describe_rate(trial) or "–"


def _describe_plan(trial: Trial) -> Text:
    """The plan, after the part of it that ran where that is not the whole."""
    from rich.text import Text

    part = f"{PROBE_NAMES[trial.kind]}: " if trial.kind in PROBES else ""
    return Text(part + describe_plan(trial.plan) + KINDS.get(trial.kind, ""))


def _describe_why(trial: Trial) -> str:
    said = trial.why if trial.status == "ok" else trial.reason
    return (said or "").partition("\n")[0]


def _choose_style(trial: Trial) -> str:
    if trial.status != "ok":
        return STATUS_STYLES[trial.status]
    return "dim" if trial.kind in PROBES else ""


def _build_dim(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="dim")


def _fit(text: Text) -> Text:
    """One line whatever the width: what does not fit ends with an ellipsis."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
