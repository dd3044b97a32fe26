"""Build an HTML page about one training or several side by side: one file, no script, nothing fetched."""

from collections.abc import Mapping
from html import escape
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records.settings import flatten_settings
from fulltilt.report.html import build_fold, build_page, build_table
from fulltilt.report.quality import find_direction, find_times_to_common_quality
from fulltilt.report.summary import format_duration
from fulltilt.report.table import format_value
from fulltilt.report.training import TrainingRun
from fulltilt.report.training_curves import build_curves, list_metrics, name_metric, read_curve

Runs = Mapping[str, TrainingRun]  # by name, in order

SAME_IN_ALL = ("run.name",)  # of the settings: what tells runs apart without changing them


def build_training_html(trainings: list[TrainingRun]) -> str:
    """Build the HTML page that ``fulltilt report`` writes.

    Args:
        trainings: At least one; curves are drawn of the first six.
    """
    letters = (chr(ord("A") + index) if index < 26 else str(index) for index in range(len(trainings)))
    runs = {"": trainings[0]} if len(trainings) == 1 else dict(zip(letters, trainings, strict=True))
    title = " · ".join(dict.fromkeys(run.name for run in trainings))
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{"<br>".join(escape(_describe_run(name, run)) for name, run in runs.items())}</p>',
        _summary(runs),
        _common_quality(runs) if len(runs) > 1 else "",
        "<h2>Learning curves</h2>",
        build_curves(runs),
        _differences(runs) if len(runs) > 1 else "",
        build_fold(
            "What was told on the way",
            [f"{name}: {note}".removeprefix(": ") for name, run in runs.items() for note in run.notes],
        ),
    ]
    return build_page(f"fulltilt training: {title}", sections)


def _describe_run(name: str, run: TrainingRun) -> str:
    end = "under way, or killed" if run.ended is None else run.ended["reason"]
    attempts = f" after {run.n_attempts} starts" if run.n_attempts > 1 else ""
    said = f"{run.folder}: {end}{attempts} · {run.started['device']} · {run.started['n_parameters']:,} parameters"
    n_samples = run.started.get("n_samples")
    return (f"{name}  " if name else "") + said + (f" · {n_samples:,} training samples" if n_samples else "")


def _summary(runs: Runs) -> str:
    metrics = list_metrics(runs)
    head = ["run", "epochs", "steps", "training time", "samples/s", "training loss"]
    for metric in metrics:
        head.append(f"validation {name_metric(metric)}, last")
        head += [f"validation {name_metric(metric)}, best"] if find_direction(metric) else []
    rows = []
    for name, run in runs.items():
        at, loss = run.intervals[-1], run.epochs[-1].metrics.get("loss") if run.epochs else None
        rows.append(
            [
                name or run.name,
                "–" if at.epoch is None else f"{at.epoch:.4g}",
                f"{at.step:,}",
                format_duration(run.training_seconds),
                f"{run.samples_per_s or 0:,.0f}",
                "–" if loss is None else f"{loss:.4g}",
                *(cell for metric in metrics for cell in _describe_metric(run, metric)),
            ]
        )
    return _table(head, rows)


def _describe_metric(run: TrainingRun, metric: str) -> list[str]:
    """Give its last figure and, where a direction is known, its best with the place."""
    points, direction = read_curve(run.evaluations, metric), find_direction(metric)
    cells = [f"{points[-1][1]:.4g}" if points else "–"]
    if direction and points:
        at, best = (max if direction == "rising" else min)(points, key=lambda point: point[1])
        cells.append(f"{best:.4g} (epoch {at.epoch:.4g}, {format_duration(at.training_seconds)})")
    elif direction:
        cells.append("–")
    return cells


def _common_quality(runs: Runs) -> str:
    """Say how long each took to the quality that all of them reached."""
    rows = []
    for metric in list_metrics(runs):
        direction = find_direction(metric)
        readings = [read_curve(run.evaluations, metric) for run in runs.values()]
        curves = [[(at.training_seconds, value) for at, value in curve] for curve in readings]
        if direction is not None and all(curves):
            target, times = find_times_to_common_quality(curves, is_rising=direction == "rising")
            rows.append([f"{name_metric(metric)} {target:.4g}", *map(format_duration, times)])
    if not rows:
        return ""
    said = (
        "<p>Seconds of training until an evaluation first showed what all of them reached. One run each: "
        "how much runs of one plan differ is not in it.</p>"
    )
    return f"<h2>Time to the same quality</h2>{said}{_table(['validation', *runs], rows)}"


def _differences(runs: Runs) -> str:
    """List the settings that are not the same in all runs, as they were resolved; the plan as it ran."""
    settings = [_list_settings(run) for run in runs.values()]
    keys = [key for key in dict.fromkeys(key for one in settings for key in one) if key not in SAME_IN_ALL]
    rows = [[key, *(format_value(one.get(key)) for one in settings)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    said = _table(["setting", *runs], rows) if rows else "<p>No setting: the runs are repetitions of each other.</p>"
    return f"<h2>What differs</h2>{said}"


def _list_settings(run: TrainingRun) -> dict[str, Any]:
    """List the configuration with every lever as it ran: one left to the program may differ from run to run."""
    settings = dict(flatten_settings(run.started.get("config") or {}))
    catalogue = load_catalogue()
    for name, value in run.started["plan"].items():
        key = catalogue[name].key if name in catalogue else f"plan.{name}"
        asked = settings.get(key, value)
        settings[key] = value if asked == value else f"{format_value(value)} (set to {format_value(asked)})"
    return settings | {name: run.started.get(name) for name in ("device", "n_parameters", "n_samples")}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return build_table(
        head,
        lines,
    )
