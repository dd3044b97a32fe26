"""The page of a training, from event logs as the engine writes them."""

import itertools
import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.report.report_documents import read_svg

from fulltilt.cli import run_command
from fulltilt.listeners import EventLog
from fulltilt.records import EpochDone, Evaluated, Noted, Replanned, RunEnded, RunStarted, StepsDone
from fulltilt.report.charts import MAX_MARKS, Point, build_curve_chart, compute_log_ticks
from fulltilt.report.quality import find_direction, find_times_to_common_quality
from fulltilt.report.training import join_intervals, read_training
from fulltilt.report.training_html import build_training_html

N_PER_EPOCH = 4


def started(first_step=0, **changes):
    values = {
        "name": "digits <b>", "out_dir": "x", "device": "cpu", "plan": {"precision": "fp32", "batch_size": 64},
        "n_parameters": 1000, "n_samples": 256, "steps_per_epoch": N_PER_EPOCH, "n_epochs": 2,
        "config": {"optim": {"lr": 0.1}, "data": {"batch_size": 64}, "run": {"name": None}},
    }  # fmt: skip
    return RunStarted(**(values | changes), first_step=first_step, attempt=1 if first_step else 0)


def steps_done(step, *, loss=None, seconds=0.5):
    epoch, n_before = divmod(step - 1, N_PER_EPOCH)
    return StepsDone(
        epoch=epoch + 1, step=step, step_in_epoch=n_before + 1, n_steps=1, n_samples=64, seconds=seconds,
        loss=1.0 / step if loss is None else loss, lr=0.1, samples_per_s=64 / seconds,
    )  # fmt: skip


def ended(step):
    return RunEnded(reason="finished", step=step, seconds=9.0, metrics={})


def list_epochs(n, accuracies, *, first=1, seconds=0.5):
    for step in range(first, n * N_PER_EPOCH + 1):
        yield steps_done(step, seconds=seconds)
        epoch, n_left = divmod(step, N_PER_EPOCH)
        if n_left == 0:
            at = {"epoch": epoch, "step": step}
            yield EpochDone(**at, loss=2.0 / step, metrics={}, seconds=2.0, samples_per_s=128.0)
            metrics = {"loss": 1.5 / step, "accuracy": accuracies[epoch - 1]}
            yield Evaluated(**at, split="val", metrics=metrics, seconds=0.1, training_seconds=step * seconds)


def write_run(folder, events):
    log = EventLog(folder, clock=itertools.count(0, 2).__next__)  # an event every other second: none is held back
    for event in events:
        log(event)
    return folder


@pytest.fixture
def run_a(tmp_path):
    return write_run(tmp_path / "a", [started(), Noted(message="a <note>"), *list_epochs(2, [0.5, 0.75]), ended(8)])


def test_epochs_count_from_1_also_in_a_log_that_counts_them_from_0(tmp_path, run_a):
    older = [json.loads(line) for line in (run_a / "events.jsonl").read_text().splitlines()]
    older = [event | ({"epoch": event["epoch"] - 1} if "epoch" in event else {}) for event in older]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in older))
    for folder in (run_a, tmp_path):
        run = read_training(folder)
        assert [at.epoch for at in run.intervals] == [step / N_PER_EPOCH for step in range(1, 9)]
        assert [at.epoch for at in run.epochs] == [at.epoch for at in run.evaluations] == [1, 2]


def read_charts(html):
    """Caption and axis → the chart as XML."""
    charts = {}
    for caption, body in re.findall(r"<figure><figcaption>(.*?)</figcaption>(.*?)</figure>", html, re.S):
        for axis, svg in re.findall(r'<div class="by-(\w+)"><div class="plot">(<svg.*?</svg>)</div>', body, re.S):
            charts[caption, axis] = ET.fromstring(svg)
    return charts


def list_titles(chart):
    return [circle.find("title").text for circle in chart.iter("circle")]


def test_every_curve_is_there_by_epoch_step_and_seconds(run_a):
    html = build_training_html([read_training(run_a)])
    charts = read_charts(html)
    names = ["Loss", "Accuracy", "Learning rate", "Throughput"]
    assert list(charts) == [(name, axis) for name in names for axis in ("epoch", "step", "seconds")]
    titles = ["validation: 0.5 at step 4, 2 s", "validation: 0.75 at step 8, 4 s"]
    assert list_titles(charts["Accuracy", "step"]) == titles
    lines = list(charts["Loss", "epoch"].iter("polyline"))
    assert [len(line.get("points").split()) for line in lines] == [8, 2], "training, validation"
    last_x = [float(line.get("points").split()[-1].split(",")[0]) for line in lines]
    assert last_x[0] == last_x[1], "both end after two epochs"
    assert "<b>" not in html
    assert "a &lt;note&gt;" in html
    assert "0.75 (epoch 2, 4 s)" in html


def test_steps_taken_again_after_a_crash_count_once(tmp_path):
    # Killed before the second epoch was told; the checkpoint is of step 4.
    first = list(list_epochs(2, [0.5, 0.1]))[:-2]
    again = [started(first_step=4), *list_epochs(2, [0.5, 0.75], first=5, seconds=0.25), ended(8)]
    run = read_training(write_run(tmp_path / "r", [started(), *first, *again]))
    assert [interval.step for interval in run.intervals] == list(range(1, 9))
    assert run.training_seconds == pytest.approx(4 * 0.5 + 4 * 0.25)
    assert [at.metrics["accuracy"] for at in run.evaluations] == [0.5, 0.75]
    assert run.n_attempts == 2
    assert "after 2 starts" in build_training_html([run])


def test_a_run_that_was_killed_or_lost_its_loss_is_drawn_and_streaming_data_has_no_epoch_axis(tmp_path):
    first = started(steps_per_epoch=None, n_samples=None)
    events = [first, steps_done(1), steps_done(2, loss=float("nan")), steps_done(3)]
    html = build_training_html([read_training(write_run(tmp_path / "r", events))])
    assert "under way, or killed" in html
    assert len(next(read_charts(html)["Loss", "step"].iter("polyline")).get("points").split()) == 2
    assert 'id="by-epoch"' not in html
    assert 'id="by-step" checked' in html


def test_two_runs_share_their_charts_and_what_differs_is_named(run_a, tmp_path, capsys):
    changed = started(config={"optim": {"lr": 0.2}, "data": {"batch_size": 64}, "run": {"name": "other"}})
    write_run(tmp_path / "b", [changed, *list_epochs(2, [0.75, 0.7], seconds=0.3), ended(8)])
    out = tmp_path / "both.html"
    assert run_command(["report", str(run_a), str(tmp_path / "b"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    events = run_a / "events.jsonl"
    kept = events.read_text()
    assert run_command(["report", str(run_a), "--out", str(events)]) == 2
    assert (events.read_text(), run_command(["report", str(run_a), "--out", str(out)])) == (kept, 0)
    assert run_command(["report", str(run_a), str(tmp_path / "b"), "--out", str(out)]) == 0
    html = out.read_text()
    titles = list_titles(read_charts(html)["Validation accuracy", "seconds"])
    assert titles[0].startswith("A: 0.5 at step 4")
    assert titles[2].startswith("B: 0.75 at step 4")
    assert "<td>accuracy 0.75</td><td>4 s</td><td>1.2 s</td>" in html
    assert "<td>optim.lr</td><td>0.1</td><td>0.2</td>" in html
    assert "run.name" not in html
    assert 'id="by-seconds" checked' in html


@pytest.mark.parametrize(
    ("config", "plans", "said"),
    [
        (
            {"speed": {"precision": "auto"}, "data": {"batch_size": 64}},
            [{"precision": "fp32", "batch_size": 64}, {"precision": "bf16", "batch_size": 64}],
            "<td>speed.precision</td><td>fp32 (set to auto)</td><td>bf16 (set to auto)</td>",
        ),
        (  # memory made the micro-batch smaller
            {"data": {"batch_size": 64}},
            [{"batch_size": 64}, {"batch_size": 32, "accumulate": 2}],
            "<td>data.batch_size</td><td>64</td><td>32 (set to 64)</td>",
        ),
        ({}, [{"batch_size": 64}] * 2, "repetitions of each other"),
    ],
)
def test_a_lever_that_ran_with_other_values_than_asked_for_is_named_with_both(tmp_path, config, plans, said):
    runs = []
    for number, plan in enumerate(plans):
        events = [started(config=config, plan=plan), *list_epochs(1, [0.5]), ended(4)]
        runs.append(read_training(write_run(tmp_path / str(number), events)))
    html = build_training_html(runs)
    assert said in html
    assert ("data.batch_size" in html) == ("data.batch_size" in said)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (None, "holds no events.jsonl"),
        ([], "holds no step yet"),
        ([started()], "holds no step yet"),
        ('{"some": "thing"}\n', "events.jsonl is not the event log of a training; name the folder of one\n"),
        ("[]\n", "events.jsonl is not the event log of a training; name the folder of one\n"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, capsys, log, said):
    if isinstance(log, list):
        write_run(tmp_path, log)
    if log is not None:
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(log if isinstance(log, str) else "")
    assert run_command(["report", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_who_names_a_search_hears_where_its_page_is(tmp_path, capsys):
    (tmp_path / "report.html").touch()
    assert run_command(["report", str(tmp_path)]) == 2
    assert f"has its page already ({tmp_path}/report.html)" in capsys.readouterr().err.replace("\n", "")


def test_a_long_curve_is_joined_without_losing_a_sample(tmp_path):
    events = [started(), *map(steps_done, range(1, 1001))]
    intervals = read_training(write_run(tmp_path / "r", events)).intervals
    joined, size = join_intervals(intervals, 200)
    assert (len(joined), size, joined[-1].step) == (200, 5, 1000)
    assert sum(i.n_samples for i in joined) == sum(i.n_samples for i in intervals)
    assert joined[0].loss == pytest.approx(sum(1 / step for step in range(1, 6)) / 5)
    assert joined[0].samples_per_s == pytest.approx(128.0)


def test_a_replan_is_no_start_of_its_own(tmp_path):
    replanned = Replanned(step=1, n_steps_lost=0, batch_size=32, accumulate=2, val_batch_size=None, reason="memory")
    events = [started(), steps_done(1), replanned, started(first_step=1), steps_done(2)]
    assert read_training(write_run(tmp_path / "r", events)).n_attempts == 1
    events += [started(first_step=2), steps_done(3), replanned, started(first_step=3), steps_done(4)]
    assert read_training(write_run(tmp_path / "s", events)).n_attempts == 2


def test_a_dense_line_hides_its_marks_and_keeps_its_figures():
    line = [Point(x=x, y=1.0 + x, label=f"p{x}") for x in range(MAX_MARKS + 1)]
    circles = list(read_svg(build_curve_chart({"a": [line]}, x_title="x", y_title="y")).iter("circle"))
    assert {circle.get("fill") for circle in circles} == {"transparent"}
    assert len(circles) == len(line)


@given(st.floats(1e-12, 1e6), st.floats(1.0, 1e9))
def test_a_logarithmic_axis_holds_both_ends_and_has_equal_factors_equally_far_apart(low, ratio):
    ticks = compute_log_ticks(low, low * ratio)
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= low * ratio * (1 - 1e-6)
    assert 2 <= len(ticks) <= 24
    line = [Point(x=i, y=low * ratio ** (i / 2)) for i in range(3)]
    chart = read_svg(build_curve_chart({"a": [line]}, x_title="x", y_title="loss", is_log=True))
    first, second, third = (float(circle.get("cy")) for circle in chart.iter("circle"))
    assert second - first == pytest.approx(third - second, abs=0.21)


def test_quality_is_that_of_the_worst_best_in_the_direction_that_the_name_of_a_metric_tells():
    rising, falling = {"accuracy", "binary_accuracy", "knn_top1"}, {"loss", "accuracy_loss", "perplexity"}
    for direction, metrics in {"rising": rising, "falling": falling, None: {"temperature", "lossless"}}.items():
        assert {find_direction(metric) for metric in metrics} == {direction}
    runs = [[(1.0, 0.5), (2.0, 0.9), (3.0, 0.8)], [(2.0, 0.6), (4.0, 0.85)]]
    assert find_times_to_common_quality(runs, is_rising=True) == (0.85, [2.0, 4.0])
    assert find_times_to_common_quality(runs, is_rising=False) == (0.6, [1.0, 2.0])
