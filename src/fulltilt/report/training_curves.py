"""Draw the learning curves of trainings over steps, epochs and seconds of training.

Radio buttons and style rules choose which axis is shown; there is no script.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from fulltilt.report.charts import MAX_SERIES, Point, build_curve_chart
from fulltilt.report.html import build_figure
from fulltilt.report.summary import format_duration
from fulltilt.report.training import Interval, Reading, TrainingRun, join_intervals

N_POINTS = 200  # of a curve; more cannot be seen
LOG_RATIO = 20  # a loss that falls by more than this is drawn on a logarithmic axis
AXES: Mapping[str, tuple[str, Callable[[Interval | Reading], float | None]]] = {
    "epoch": ("epochs", lambda at: at.epoch),
    "step": ("optimizer steps", lambda at: at.step),
    "seconds": ("seconds of training", lambda at: at.training_seconds),
}

Curve = list[tuple[Interval | Reading, float]]  # (place, figure)
Curves = dict[str, Curve]  # by their name in the legend


def build_curves(runs: Mapping[str, TrainingRun]) -> str:
    """Build all curves over all axes, behind one switch; of the first six runs."""
    runs = dict(itertools.islice(runs.items(), MAX_SERIES))
    is_streaming = any(run.intervals[-1].epoch is None for run in runs.values())
    axes = [axis for axis in AXES if axis != "epoch" or not is_streaming]
    shown = "seconds" if len(runs) > 1 else axes[0]
    switch = "".join(
        f'<input type="radio" name="axis" id="by-{axis}"{" checked" if axis == shown else ""}>'
        f'<label for="by-{axis}">{AXES[axis][0]}</label>'
        for axis in axes
    )
    joined = {name: join_intervals(run.intervals, N_POINTS) for name, run in runs.items()}
    lines = {name: intervals for name, (intervals, _) in joined.items()}
    figures = "".join(_figure(title, unit, curves, axes) for title, unit, curves in _list_charts(runs, lines))
    size = max(size for _, size in joined.values())
    note = f'<p class="note">A point of a training curve is the mean of up to {size} logging intervals.</p>'
    return f'{switch}<div class="charts by">{figures}</div>{note if size > 1 else ""}'


def _figure(title: str, unit: str, curves: Curves, axes: Sequence[str]) -> str:
    values = [y for curve in curves.values() for _, y in curve]
    is_log = unit == "loss" and bool(values) and min(values) > 0 and max(values) > LOG_RATIO * min(values)
    drawn = []
    for axis in axes:
        x_title, place_on = AXES[axis]
        points = {
            name: [[_build_point(name, x, at, y) for at, y in curve if (x := place_on(at)) is not None]]
            for name, curve in curves.items()
        }
        chart = build_curve_chart(points, x_title=x_title, y_title=unit, is_log=is_log)
        drawn.append(f'<div class="by-{axis}">{chart}</div>')
    return build_figure(title, "".join(drawn))


def _build_point(name: str, x: float, at: Interval | Reading, y: float) -> Point:
    label = f"{name}: {y:.4g} at step {at.step:,}, {format_duration(at.training_seconds)}"
    return Point(x=x, y=y, label=label.removeprefix(": "))


def _list_charts(
    runs: Mapping[str, TrainingRun], lines: Mapping[str, Sequence[Interval]]
) -> Iterator[tuple[str, str, Curves]]:
    """Yield (title, unit, curves). Of one run training and validation share a chart; of several each has its own."""

    def place(figure: str) -> Curves:
        places = {name: [(at, getattr(at, figure)) for at in intervals] for name, intervals in lines.items()}
        return {name: [(at, y) for at, y in curve if y is not None] for name, curve in places.items()}

    validation = {
        metric: {name: read_curve(run.evaluations, metric) for name, run in runs.items()}
        for metric in list_metrics(runs)
    }
    names = dict.fromkeys(metric for run in runs.values() for at in run.epochs for metric in at.metrics)
    training = {metric: {name: read_curve(run.epochs, metric) for name, run in runs.items()} for metric in names}
    training |= {"loss": place("loss")}
    if len(runs) == 1:
        for metric in dict.fromkeys(["loss", *validation]):
            kinds = {"training": training.pop(metric, {}), "validation": validation.get(metric, {})}
            pair = {kind: next(iter(curves.values()), []) for kind, curves in kinds.items()}
            yield name_metric(metric).capitalize(), metric, _drop_empty(pair)
    else:
        yield "Training loss", "loss", training.pop("loss")
        for metric, curves in validation.items():
            yield f"Validation {name_metric(metric)}", metric, _drop_empty(curves)
    for metric, curves in training.items():
        yield f"Training {name_metric(metric)}", metric, _drop_empty(curves)
    yield "Learning rate", "learning rate", place("lr")
    yield "Throughput", "samples/s", place("samples_per_s")


def _drop_empty(curves: Curves) -> Curves:
    return {name: curve for name, curve in curves.items() if curve}


def read_curve(readings: Sequence[Reading], metric: str) -> Curve:
    """Read the curve of a metric where it was measured."""
    return [(at, at.metrics[metric]) for at in readings if metric in at.metrics]


def list_metrics(runs: Mapping[str, TrainingRun]) -> list[str]:
    """List the metrics of the validation set, of all runs."""
    return list(dict.fromkeys(name for run in runs.values() for at in run.evaluations for name in at.metrics))


def name_metric(metric: str) -> str:
    return metric.replace("_", " ")
