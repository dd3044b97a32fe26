"""The learning curves of trainings: every chart over steps, epochs and seconds of training.

Radio buttons and style rules choose which axis is shown; there is no script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from fulltilt.report.charts import MAX_SERIES, Point, build_curve_chart
from fulltilt.report.summary import format_duration
from fulltilt.report.training import Interval, Reading, TrainingRun, join_intervals

N_POINTS = 200  # of a curve; more cannot be seen
LOG_RATIO = 20  # a loss that falls by more than this is drawn on a logarithmic axis
AXES: Mapping[str, tuple[str, Callable[[Interval | Reading], float | None]]] = {
    "epoch": ("epochs", lambda at: at.epoch),
    "step": ("optimizer steps", lambda at: at.step),
    "seconds": ("seconds of training", lambda at: at.training_seconds),
}

Groups = dict[str, list[list[tuple[Interval | Reading, float]]]]  # legend → lines of (place, figure)


def build_curves(names: Sequence[str], runs: Sequence[TrainingRun]) -> str:
    """All curves over all axes, behind one switch; of the first six runs."""
    names, runs = names[:MAX_SERIES], runs[:MAX_SERIES]
    is_streaming = any(run.intervals[-1].epoch is None for run in runs)
    axes = [axis for axis in AXES if axis != "epoch" or not is_streaming]
    shown = "seconds" if len(runs) > 1 else axes[0]
    switch = "".join(
        f'<input type="radio" name="axis" id="by-{axis}"{" checked" if axis == shown else ""}>'
        f'<label for="by-{axis}">{AXES[axis][0]}</label>'
        for axis in axes
    )
    figures = "".join(_figure(title, unit, groups, axes) for title, unit, groups in _list_charts(names, runs))
    sizes = {size for run in runs if (size := join_intervals(run.intervals, N_POINTS)[1]) > 1}
    joined = (
        f'<p class="note">A point of a training curve is the mean of up to {max(sizes)} logging intervals.</p>'
        if sizes
        else ""
    )
    return f'{switch}<div class="charts by">{figures}</div>{joined}'


def _figure(title: str, unit: str, groups: Groups, axes: Sequence[str]) -> str:
    drawn = []
    for axis in axes:
        x_title, place_on = AXES[axis]
        lines = {
            name: [[p for at, y in line if (p := _build_point(name, at, y, place_on)) is not None] for line in lines]
            for name, lines in groups.items()
        }
        chart = build_curve_chart(lines, x_title=x_title, y_title=unit, is_log=unit == "loss" and _is_wide(groups))
        drawn.append(f'<div class="by-{axis}">{chart}</div>')
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(drawn)}</figure>"


def _build_point(
    name: str, at: Interval | Reading, y: float, place_on: Callable[[Interval | Reading], float | None]
) -> Point | None:
    x = place_on(at)
    if x is None:
        return None
    label = f"{name}: {y:.4g} at step {at.step:,}, {format_duration(at.training_seconds)}"
    return Point(x=x, y=y, label=label.removeprefix(": "))


def _list_charts(names: Sequence[str], runs: Sequence[TrainingRun]) -> list[tuple[str, str, Groups]]:
    """(title, unit, curves). Of one run training and validation share a chart; of several each has its own."""
    joined = [join_intervals(run.intervals, N_POINTS)[0] for run in runs]
    losses: Groups = {
        name: [[(at, at.loss) for at in line if at.loss is not None]] for name, line in zip(names, joined, strict=True)
    }
    validation = {metric: _group(names, [read_curve(run, metric) for run in runs]) for metric in list_metrics(runs)}
    training = {
        metric: _group(names, [_select(run.epochs, metric) for run in runs]) for metric in _list_training_metrics(runs)
    }
    charts: list[tuple[str, str, Groups]] = []
    if len(runs) == 1:
        both: Groups = {"training": losses[names[0]], "validation": validation.pop("loss", {}).get(names[0], [])}
        charts.append(("Loss", "loss", {name: lines for name, lines in both.items() if lines}))
        for metric, groups in validation.items():
            pair = {"training": training.pop(metric, {}).get(names[0], []), "validation": groups[names[0]]}
            charts.append(
                (say_metric(metric).capitalize(), metric, {name: lines for name, lines in pair.items() if lines})
            )
    else:
        charts.append(("Training loss", "loss", losses))
        charts += [(f"Validation {say_metric(metric)}", metric, groups) for metric, groups in validation.items()]
    charts += [(f"Training {say_metric(metric)}", metric, groups) for metric, groups in training.items()]
    rates: Groups = {name: [[(at, at.lr) for at in line]] for name, line in zip(names, joined, strict=True)}
    speeds: Groups = {name: [[(at, at.samples_per_s) for at in line]] for name, line in zip(names, joined, strict=True)}
    return [*charts, ("Learning rate", "learning rate", rates), ("Throughput", "samples/s", speeds)]


def _group(names: Sequence[str], curves: Sequence[list[tuple[Reading, float]]]) -> Groups:
    return {name: [list(curve)] for name, curve in zip(names, curves, strict=True) if curve}


def read_curve(run: TrainingRun, metric: str) -> list[tuple[Reading, float]]:
    return _select(run.evaluations, metric)


def _select(readings: Sequence[Reading], metric: str) -> list[tuple[Reading, float]]:
    return [(at, at.metrics[metric]) for at in readings if metric in at.metrics]


def list_metrics(runs: Sequence[TrainingRun]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for at in run.evaluations for name in at.metrics))


def _list_training_metrics(runs: Sequence[TrainingRun]) -> list[str]:
    names = dict.fromkeys(name for run in runs for at in run.epochs for name in at.metrics)
    return [name for name in names if name != "loss"]


def say_metric(metric: str) -> str:
    return metric.replace("_", " ")


def _is_wide(groups: Groups) -> bool:
    values = [y for lines in groups.values() for line in lines for _, y in line]
    return bool(values) and min(values) > 0 and max(values) > LOG_RATIO * min(values)
