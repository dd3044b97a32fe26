"""What a search says while it runs, in lines: for a pipe, a log, a terminal that cannot be redrawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fulltilt.cli._live_words import (
    STATUS_STYLES,
    describe_cut,
    describe_left,
    describe_probe,
    describe_start,
    describe_trial,
    read_row,
)
from fulltilt.records import PROBES
from fulltilt.report import explain_mark
from fulltilt.tuner.search.progress import OnEvent, SearchEvent, SearchNoted, SearchStarted, TrialCut, TrialDone

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def show_search(console: Console) -> Iterator[OnEvent]:
    """Show the events of a search: as a table redrawn in place where the console can be redrawn, else as lines.

    A pipe that was told to take colours (``FORCE_COLOR``) still gets lines.
    """
    if not (console.is_interactive and console.file.isatty()):
        yield SearchLines(console)
        return
    from fulltilt.cli._live_table import LiveTable

    with LiveTable(console).show() as table:
        yield table


class SearchLines:
    """Takes the events of a search and writes a line or two for each trial that was run."""

    def __init__(self, console: Console):
        self._console = console

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case SearchStarted():
                self._console.print(describe_start(event), markup=False)
            case SearchNoted():
                self._console.print(event.message, style="yellow", markup=False)
            case TrialCut():
                self._console.print(describe_cut(event), style="yellow", markup=False)
            case TrialDone() if not event.is_resumed:
                self._print_trial(event)

    def _print_trial(self, event: TrialDone) -> None:
        """A line for the figures, dim words for why it was run and for what is left."""
        from rich.text import Text

        trial, left = event.trial, describe_left(event)
        is_probe = trial.kind in PROBES
        text = Text(describe_probe(trial) if is_probe else describe_trial(trial))
        text.stylize("dim" if is_probe and trial.status == "ok" else STATUS_STYLES[trial.status])
        said = [part for part in (trial.why, explain_mark(read_row(trial)), left) if part]
        if said:
            text.append(f"  · {' · '.join(said)}", style="dim")
        self._console.print(text, soft_wrap=True)


class RowCount:
    """Takes the events of a search and counts the rows that lie in its folder."""

    def __init__(self):
        self._n_rows: int | None = None  # until the folder was read
        self._folder = ""

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case SearchStarted():
                self._n_rows, self._folder = event.n_resumed, event.folder
            case TrialDone() if not event.is_resumed:
                self._n_rows = (self._n_rows or 0) + 1

    def describe_kept(self) -> str:
        """What an interruption leaves, in words."""
        if self._n_rows is None:
            return "the search had not begun; the same command begins it, or goes on with the rows of an earlier run"
        if not self._n_rows:
            return "no trial had ended yet, nothing was measured"
        rows = "1 row is" if self._n_rows == 1 else f"{self._n_rows} rows are"
        return f"{rows} kept in {self._folder}; the same command goes on"
