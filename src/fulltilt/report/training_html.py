"""The page of a training, or of several side by side: one file, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records.settings import flatten_settings
from fulltilt.report.html import build_page
from fulltilt.report.quality import find_direction, find_times_to_common_quality
from fulltilt.report.summary import format_duration
from fulltilt.report.table import format_value
from fulltilt.report.training import TrainingRun
from fulltilt.report.training_curves import build_curves, list_metrics, read_curve, say_metric

SAME_IN_ALL = ("run.name",)  # of the settings: what tells runs apart without changing them


def build_training_html(runs: Sequence[TrainingRun]) -> str:
    """The page of ``fulltilt report``.

    Args:
        runs: At least one; curves are drawn of the first six.
    """
    names = _name_runs(runs)
    title = " · ".join(dict.fromkeys(run.name for run in runs))
    described = "<br>".join(escape(_describe_run(name, run)) for name, run in zip(names, runs, strict=True))
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{described}</p>',
        _summary(names, runs),
        _common_quality(names, runs),
        "<h2>Learning curves</h2>",
        build_curves(names, runs),
        _differences(names, runs),
        _notes(names, runs),
    ]
    return build_page(f"fulltilt training: {title}", sections)


def _name_runs(runs: Sequence[TrainingRun]) -> list[str]:
    """``A``, ``B`` … where there are several; a single run needs no name."""
    if len(runs) == 1:
        return [""]
    return [chr(ord("A") + index) if index < 26 else str(index) for index in range(len(runs))]


def _describe_run(name: str, run: TrainingRun) -> str:
    end = "under way, or killed" if run.ended is None else run.ended["reason"]
    attempts = f" after {run.n_attempts} starts" if run.n_attempts > 1 else ""
    device, n_parameters = run.started["device"], run.started["n_parameters"]
    said = f"{run.folder}: {end}{attempts} · {device} · {n_parameters:,} parameters"
    n_samples = run.started.get("n_samples")
    return (f"{name}  " if name else "") + said + (f" · {n_samples:,} training samples" if n_samples else "")


def _summary(names: Sequence[str], runs: Sequence[TrainingRun]) -> str:
    metrics = list_metrics(runs)
    head = ["run", "epochs", "steps", "training time", "samples/s", "training loss"]
    head += [f"validation {say_metric(metric)}{kind}" for metric in metrics for kind in _list_kinds(metric)]
    rows = []
    for name, run in zip(names, runs, strict=True):
        at = run.intervals[-1]
        cells = [name or run.name, "–" if at.epoch is None else f"{at.epoch:.4g}", f"{at.step:,}"]
        cells += [format_duration(run.training_seconds), f"{run.samples_per_s or 0:,.0f}"]
        cells.append(
            f"{run.epochs[-1].metrics['loss']:.4g}" if run.epochs and "loss" in run.epochs[-1].metrics else "–"
        )
        for metric in metrics:
            cells += _describe_metric(run, metric)
        rows.append(cells)
    return _table(head, rows)


def _list_kinds(metric: str) -> list[str]:
    return [", last", ", best"] if find_direction(metric) else [", last"]


def _describe_metric(run: TrainingRun, metric: str) -> list[str]:
    """Its last figure and, where a direction is known, its best with the place."""
    points = read_curve(run, metric)
    n_cells = len(_list_kinds(metric))
    if not points:
        return ["–"] * n_cells
    cells = [f"{points[-1][1]:.4g}"]
    if n_cells > 1:
        choose = max if find_direction(metric) == "rising" else min
        best = choose(points, key=lambda point: point[1])
        cells.append(f"{best[1]:.4g} (epoch {best[0].epoch:.4g}, {format_duration(best[0].training_seconds)})")
    return cells


def _common_quality(names: Sequence[str], runs: Sequence[TrainingRun]) -> str:
    """How long each took to the quality that all of them reached."""
    if len(runs) < 2:
        return ""
    rows = []
    for metric in list_metrics(runs):
        direction = find_direction(metric)
        curves = [[(at.training_seconds, value) for at, value in read_curve(run, metric)] for run in runs]
        if direction is None or not all(curves):
            continue
        target, times = find_times_to_common_quality(curves, is_rising=direction == "rising")
        rows.append([f"{say_metric(metric)} {target:.4g}", *map(format_duration, times)])
    if not rows:
        return ""
    said = (
        "<p>Seconds of training until an evaluation first showed what all of them reached. One run each: "
        "how much runs of one plan differ is not in it.</p>"
    )
    return f"<h2>Time to the same quality</h2>{said}{_table(['validation', *names], rows)}"


def _differences(names: Sequence[str], runs: Sequence[TrainingRun]) -> str:
    """Settings that are not the same in all runs, as they were resolved; the plan as it ran."""
    if len(runs) < 2:
        return ""
    settings = [_list_settings(run) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in settings for key in one) if key not in SAME_IN_ALL]
    rows = [[key, *(format_value(one.get(key)) for one in settings)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return "<h2>What differs</h2><p>No setting: the runs are repetitions of each other.</p>"
    return f"<h2>What differs</h2>{_table(['setting', *names], rows)}"


def _list_settings(run: TrainingRun) -> dict[str, Any]:
    """The configuration with every lever as it ran: one that was left to the program may differ from run to run."""
    settings = dict(flatten_settings(run.started.get("config") or {}))
    catalogue = load_catalogue()
    for name, value in run.started["plan"].items():
        key = catalogue[name].key if name in catalogue else f"plan.{name}"
        asked = settings.get(key, value)
        settings[key] = value if asked == value else f"{format_value(value)} (set to {format_value(asked)})"
    return settings | {name: run.started.get(name) for name in ("device", "n_parameters", "n_samples")}


def _notes(names: Sequence[str], runs: Sequence[TrainingRun]) -> str:
    lines = [f"{name}: {note}".removeprefix(": ") for name, run in zip(names, runs, strict=True) for note in run.notes]
    if not lines:
        return ""
    return "<h2>What was told on the way</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="plain"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
    )
