"""What a search says while it runs, in lines: for a pipe, a log, a terminal that cannot be redrawn."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from fulltilt.records import BUSY_PCT, PROBES, Plan, Trial, format_gib, format_rate
from fulltilt.report import describe_plan, format_duration, format_throughput, mark_busy
from fulltilt.report.table import BUSY_MARK
from fulltilt.tuner.question.default_budget import DEFAULT_BUDGET_S
from fulltilt.tuner.search.progress import SearchEvent, SearchNoted, SearchStarted, TrialCut, TrialDone, TurnsDone

PROBE_NAMES = {"device": "step alone", "loader": "loader alone", "memory": "of tensors, estimated"}
LINE_WIDTH = 160  # of a trial's line: what it does not hold is in the run folder
STATUS_STYLES = {"ok": "green", "out_of_memory": "yellow", "skipped": "dim", "error": "red", "timeout": "red"}


class SearchLines:
    """Writes the events of a search to a console: a line for each trial that was run, and for each group in turns."""

    def __init__(self, console: Console):
        self._console = console
        self._user_plan: Plan | None = None
        self._is_mark_explained = False

    def __call__(self, event: SearchEvent) -> None:
        if isinstance(event, SearchStarted):
            self._user_plan = event.user_plan
        if isinstance(event, TrialDone):
            if not event.is_resumed:
                line = _build_line(event)
                self._console.print(line, soft_wrap=True)
                self._explain_mark(line)
        elif isinstance(event, TurnsDone):
            if not event.is_resumed:
                self._console.print(_build_group_line(event, self._user_plan), soft_wrap=True)
        elif said := describe_event(event):
            self._console.print(said, style="" if isinstance(event, SearchStarted) else "yellow", markup=False)

    def _explain_mark(self, line: Text) -> None:
        """Say what the mark of a busy machine means, under the first line that has it."""
        if self._is_mark_explained or f" {BUSY_MARK} samples/s" not in line.plain:
            return
        self._is_mark_explained = True
        said = (
            f"{BUSY_MARK} a busy machine's figure: some task waited for a core more than {BUSY_PCT:.0f} % of the time"
        )
        self._console.print(f"      {said}", style="dim", markup=False)


class RowCount:
    """Counts the rows of a search that lie in its folder, from its events."""

    def __init__(self):
        self._n_rows: int | None = None  # until the folder was read
        self._folder = ""

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case SearchStarted():
                self._n_rows, self._folder = event.n_resumed, event.folder
            case TrialDone() if not event.is_resumed:
                self._n_rows = (self._n_rows or 0) + 1
            case TurnsDone() if not event.is_resumed:
                self._n_rows = (self._n_rows or 0) + len(event.rows)

    def describe_kept(self) -> str:
        """Return what an interruption leaves, in words."""
        if self._n_rows is None:
            return "the search had not begun; the same command begins it, or goes on with the rows of an earlier run"
        if not self._n_rows:
            return "no trial had ended yet, nothing was measured"
        rows = "1 row is" if self._n_rows == 1 else f"{self._n_rows} rows are"
        return f"{rows} kept in {self._folder}; the same command goes on"


def _build_line(event: TrialDone) -> Text:
    """Build a trial's figures, with dim words for what is left; plan and reason are cut to what fits between."""
    trial = event.trial
    is_dim = trial.kind in PROBES and trial.status == "ok"
    figures, *more = _describe_trial(trial)
    return _fit_line(figures, [*more, trial.why or ""], event, style="dim" if is_dim else STATUS_STYLES[trial.status])


def _build_group_line(event: TurnsDone, user_plan: Plan | None) -> Text:
    return _fit_line(f"      {describe_group(event, user_plan)}", [event.rows[0].why or ""], event)


def _fit_line(figures: str, more: Sequence[str], event: TrialDone | TurnsDone, *, style: str = "") -> Text:
    """Build one line of what was measured, what else there is to say of it, and what is left."""
    left = f"  · {describe_left(event, is_short=True)}"
    figures = _cut(figures, LINE_WIDTH - len(left))
    words = _cut("".join(f"  · {part}" for part in more if part), LINE_WIDTH - len(left) - len(figures))
    return Text.assemble((figures, style), (words + left, "dim"))


def _cut(text: str, width: int) -> str:
    text = text.partition("\n")[0]
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"[:width]


def describe_group(event: TurnsDone, user_plan: Plan | None = None) -> str:
    """Return the speeds of a group, or what failed: ``in turns: 12,160, 9,210 (yours) samples/s``."""
    failed = [row for row in event.rows if row.status != "ok"]
    if failed:
        return "; ".join(f"{row.status.replace('_', ' ')} in turns: {row.reason}" for row in failed)
    rates = [f"{format_rate(row.samples_per_s or 0.0)}{' (yours)' * (row.plan == user_plan)}" for row in event.rows]
    return f"in turns: {', '.join(rates)} samples/s"


def describe_event(event: SearchEvent) -> str | None:
    """Return what is said of a search beside its trials; None of an event that is passed over."""
    match event:
        case SearchStarted():
            found = f", {event.n_resumed} rows found there" if event.n_resumed else ""
            grid = f"grid of {event.grid_size:,}, {_describe_limit(event)}"
            return f"{event.strategy} search on {event.device}: {grid}; {event.folder}{found}"
        case SearchNoted():
            return event.message
        case TrialCut():
            return f"{event.id} was ended with the budget after {event.seconds:.1f} s: it is no row"
    return None


def _describe_limit(event: SearchStarted) -> str:
    """Say how long the search takes: ``at most 3 min 00 s``."""
    if event.budget_s is None:
        turns = f": {event.n_planned:,} trials with those in turns, more on a noisy machine"
        has_turns = event.n_planned > event.grid_size
        return f"all of which runs{turns if has_turns else ''} (--budget 10m would end it earlier)"
    more = " (longer where single runs are long; --budget sets it)" if event.is_budget_default else ""
    return f"at most {format_duration(event.budget_s)}{more}"


def describe_left_out(event: SearchStarted | None) -> str | None:
    """Say what a search would add that does not keep to what is named; None where that is nothing."""
    if event is None or not event.levers_left_out:
        return None
    first, n = ", ".join(event.levers_left_out[:3]), len(event.levers_left_out)
    names = f"{n} more switches ({first}, …)" if n > 3 else f"also {first}"
    grid, took = f"a grid of {event.full_grid_size:,}", f"at most {format_duration(DEFAULT_BUDGET_S)}"
    return f"`fulltilt tune` with the same flags tries {names}: on from these rows, {grid}, {took} where runs are short"


def _describe_trial(trial: Trial) -> tuple[str, ...]:
    """Return rate and memory, or how it failed, then the plan; of a probe also which part of the step it measured."""
    is_probe, plan = trial.kind in PROBES, describe_plan(trial.plan)
    name = f"{trial.id:>4}  " + (f"{trial.kind} probe" if is_probe else "")
    if trial.status != "ok":
        end = f"{', ' if is_probe else ''}{trial.status.replace('_', ' ')}: "
        return f"{name}{end}{(trial.reason or '').partition(chr(10))[0]}", plan
    memory_gib = read_memory_gib(trial)
    memory = "" if memory_gib is None else format_gib(memory_gib)
    if not is_probe:
        return f"{name}{describe_rate(trial):>18} samples/s  {memory}".rstrip(), plan
    row = read_row(trial) | {"samples_per_s_ci95": None}
    rate = "" if trial.samples_per_s is None else f"{mark_busy(format_throughput(row), row)} samples/s"
    return f"{name}: {', '.join(filter(None, (rate, memory))) or 'no figure'} {PROBE_NAMES[trial.kind]}", plan


def describe_rate(trial: Trial) -> str:
    """Return the throughput with its interval, and the mark of a busy machine."""
    row = read_row(trial)
    return mark_busy(format_throughput(row), row)


def read_row(trial: Trial) -> dict[str, Any]:
    """Return what the words about a throughput are made from, as the JSON has it."""
    names = ("status", "samples_per_s", "samples_per_s_ci95", "cpu_pressure_pct")
    return {name: getattr(trial, name) for name in names}


def read_memory_gib(trial: Trial) -> float | None:
    """Return what a memory probe estimates; of everything else, what the device held at its peak."""
    return trial.memory_allocated_peak_gib if trial.kind == "memory" else trial.device_memory_peak_gib


def describe_left(event: TrialDone | TurnsDone, *, is_short: bool = False) -> str:
    """Return ``3 of at most 12 trials, about 1 min left``; without the time before there is a pace.

    Args:
        is_short: Return ``3 of 12, about 1 min left``.
    """
    if event.n_done >= event.n_planned:  # the last one, or a noisy machine's search that looks on
        return f"{event.n_done} trials"
    left = "" if event.seconds_left is None else f", about {format_duration(event.seconds_left)} left"
    return f"{event.n_done} of {event.n_planned if is_short else f'at most {event.n_planned} trials'}{left}"
