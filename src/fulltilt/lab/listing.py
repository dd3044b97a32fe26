"""Show experiments as a JSON document, as one sentence and as a table."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.errors import strip_control_codes
from fulltilt.lab.lab import find_out_dir, open_stream
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.redaction import redact
from fulltilt.records import VERSION
from fulltilt.report import format_duration

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = ("id", "sweep", "state", "attempt", "priority", "point", "overrides", "owner", "wish", "node", "devices")
SHOWN += ("n_threads", "reason")
WRITTEN = ("point", "overrides", "reason")  # by people and trainings: there may be a secret in it
COUNTED = ("succeeded", "failed", "cancelled", "held", "finalizing", "running", "leased")
COUNTED += ("cancelling", "backoff", "queued")
URGENCY = ("failed", "held", "cancelling", "running", "leased", "finalizing", "backoff")
URGENCY += ("queued", "succeeded", "cancelled")
N_ROWS = 16  # rows of a table: it fits a screen with the lines around it
TAIL_BYTES = 65_536  # of the end of the event log: far more than lies between two evaluations
STYLES = {"succeeded": "green", "failed": "red", "held": "red", "running": "bold", "cancelling": "yellow"}
STYLES |= {"backoff": "yellow", "cancelled": "dim"}
TROUBLED = ("failed", "held", "backoff")  # their reason matters more than their metrics

Entry = Mapping[str, Any]
"""One experiment of the document of ``lab list``."""


def write_document(lab: Path, experiments: Iterable[Experiment], most: int | None) -> str:
    """Return experiments as JSON, written one by one: all of them as objects take ten times the room."""
    entries = ", ".join(json.dumps(build_entry(lab, experiment, most)) for experiment in experiments)
    return f'{{"version": {VERSION}, "experiments": [{entries}]}}'


def build_entry(lab: Path, experiment: Experiment, most: int | None = None) -> dict[str, Any]:
    """Build what is shown of an experiment, without secrets.

    Args:
        most: Devices of the largest machine; None: it is not known.
    """
    n = experiment.n_devices
    is_stuck = experiment.state in ("queued", "backoff") and most is not None and n > most
    written = {name: redact(getattr(experiment, name)) for name in WRITTEN}
    return {name: getattr(experiment, name) for name in SHOWN} | {
        **written,
        "metrics": read_metrics(lab, experiment),
        "obstacle": f"no machine here has {n} device{'s' * (n > 1)}" if is_stuck else None,
        "seconds": compute_seconds(experiment),
        "out_dir": str(find_out_dir(lab, experiment.id)),
    }


def compute_seconds(experiment: Experiment) -> float | None:
    """Return the seconds that the newest attempt took, or has taken so far."""
    if experiment.started_s is None:
        return None
    ended_s = time.time() if experiment.state in ("leased", "running", "cancelling") else experiment.ended_s
    return None if ended_s is None else max(0.0, ended_s - experiment.started_s)


def read_metrics(lab: Path, experiment: Experiment) -> Mapping[str, float]:
    """Return the metrics of the accepted result, or else of the last evaluation that the training logged."""
    if experiment.state == "succeeded" or experiment.attempt == 0:
        return experiment.metrics
    evaluated = read_newest_events(lab, experiment.newest, "Evaluated")
    return read_numbers(evaluated[-1], "metrics") if evaluated else {}


def read_newest_events(lab: Path, attempt: Attempt, kind: str) -> list[bytes]:
    """Return the lines of events of a kind, of the last part of what an attempt logged."""
    try:
        with open_stream(lab, attempt, "events.jsonl") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = stream.read().split(b"\n")[:-1]  # the last one may be half written
    except OSError:
        return []
    return [line for line in lines if line.startswith(f'{{"event": "{kind}"'.encode())]


def read_numbers(line: bytes, key: str) -> dict[str, float]:
    """Return the finite numbers of a mapping in a line of an event log. What a runner sends may be anything."""
    try:
        found = json.loads(line)[key]
        numbers = {str(name): value for name, value in found.items() if isinstance(value, int | float)}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def describe_counts(entries: Sequence[Entry]) -> str:
    """Return the number of experiments in each state: ``4 succeeded, 1 running, 1 queued``."""
    return describe_states(Counter(entry["state"] for entry in entries))


def describe_states(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in COUNTED if counts.get(state))


def describe_point(entry: Entry) -> str:
    """Return the values of a point, ``lr=0.001 batch_size=64``, then the overrides it was submitted with."""
    said = {key.rpartition(".")[2]: show_value(value) for key, value in entry["point"].items()}
    words = [word for word in entry["overrides"] if word.partition("=")[0].rpartition(".")[2] not in said]
    return " ".join([*(f"{name}={value}" for name, value in said.items()), *words]) or "–"


def describe_metrics(metrics: Mapping[str, float | None]) -> str:
    """Format metrics, without those whose name has a slash: parts of a breakdown that stay in the files."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "/" not in name and value is not None)


def describe_best(entries: Sequence[Entry]) -> str:
    """Describe the result with the lowest validation loss; empty with fewer than two results."""
    with_loss = [each for each in entries if each["state"] == "succeeded" and each["metrics"].get("loss") is not None]
    if len(with_loss) < 2:
        return ""
    best = min(with_loss, key=lambda entry: entry["metrics"]["loss"])
    return f"lowest loss: {best['id']} ({describe_point(best)}), {describe_metrics(best['metrics'])}"


def describe_outcome(entry: Entry) -> str:
    """Return why an experiment does not begin or go on, or else its metrics."""
    said = entry.get("obstacle") or (entry["state"] in TROUBLED and entry["reason"])  # an older server tells none
    return said or describe_metrics(entry["metrics"])


def build_table(entries: Sequence[Entry], *, width: int, n_rows: int | None = N_ROWS) -> Table:
    """Build the table of the experiments that matter most now, oldest first.

    Only points and metrics are cut where all do not fit into ``width`` columns.
    """
    from rich.table import Table
    from rich.text import Text

    urgent = sorted(entries, key=lambda entry: URGENCY.index(entry["state"]))[:n_rows]
    shown = {entry["id"] for entry in urgent}
    rows = [(entry, _list_cells(entry)) for entry in entries if entry["id"] in shown]
    names = ("id", "state", "point", "metrics", "device", "seconds")
    widths = {name: max(map(len, [name, *(cells[n] for _, cells in rows)])) for n, name in enumerate(names)}
    room = max(width - sum(widths.values()) + widths["point"] + widths["metrics"] - 2 * (len(names) - 1), 20)
    widths["point"] = min(widths["point"], max(room // 2, room - widths["metrics"]))
    widths["metrics"] = min(widths["metrics"], room - widths["point"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        justify = "right" if name == "seconds" else "left"
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify=justify, width=widths[name])
    for entry, cells in rows:
        table.add_row(*(Text(strip_control_codes(cell)) for cell in cells), style=STYLES.get(entry["state"], ""))
    return table


def _list_cells(entry: Entry) -> list[str]:
    return [
        entry["id"],
        entry["state"] + (f" ({entry['attempt']})" if entry["attempt"] > 1 else ""),
        describe_point(entry),
        " ".join(describe_outcome(entry).split()),  # a reason may have lines
        ", ".join(entry["devices"]),
        "" if entry["seconds"] is None else format_duration(entry["seconds"]),
    ]


def show_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
