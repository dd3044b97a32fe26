import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.report.report_documents import read_svg

from fulltilt.report.charts import (
    HEIGHT,
    Bar,
    Dot,
    Point,
    build_bar_chart,
    build_curve_chart,
    build_dot_chart,
    build_scatter_chart,
    compute_ticks,
    compute_ticks_between,
)


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_ticks_reach_the_top_and_no_further_than_needed(top):
    ticks = compute_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top * (1 - 1e-6)
    assert len(ticks) <= 7
    step = ticks[1] / 10 ** math.floor(math.log10(ticks[1]) + 1e-9)
    assert min(abs(step - nice) for nice in (1, 2, 5, 10)) < 1e-6


def read_marks(html):
    """Title → (place across in percent, place down in pixels) of the marks of a chart."""
    found = re.findall(r'<circle cx="([-\d.]+)%" cy="([-\d.]+)"[^>]*><title>(.*?)</title>', html)
    return {title: (float(x), float(y)) for x, y, title in found}


def test_what_is_faster_lies_higher_and_what_takes_more_memory_further_right():
    points = [Point(x=32, y=100.0, label="slow", name="yours"), Point(x=128, y=300.0, label="fast", name="pick")]
    chart = build_scatter_chart(points, x_title="GiB", y_title="samples/s", limits={"limit": 200.0})
    places = read_marks(chart)
    assert places["fast"][0] > places["slow"][0]
    assert places["fast"][1] < places["slow"][1]
    assert all(0 <= x <= 100 and 0 <= y <= HEIGHT for x, y in places.values())
    (limit,) = (line for line in read_svg(chart).iter("line") if line.get("class") == "limit")
    assert float(limit.get("x1").rstrip("%")) > places["fast"][0]
    assert [text.text for text in read_svg(chart).iter("text") if "name" in text.get("class")] == ["yours", "pick"]


def test_a_prediction_that_came_true_lies_on_the_line():
    chart = build_scatter_chart(
        [Point(x=100.0, y=100.0, label="true"), Point(x=300.0, y=200.0, label="short")],
        x_title="predicted", y_title="measured", is_equal=True,
    )  # fmt: skip
    places = read_marks(chart)
    assert places["true"][1] == pytest.approx(HEIGHT * (1 - places["true"][0] / 100), abs=0.1)
    assert places["short"][1] > HEIGHT * (1 - places["short"][0] / 100) + 1, "below it"
    assert any(line.get("class") == "same" for line in read_svg(chart).iter("line"))


def test_a_dot_lies_inside_its_interval_and_one_without_end_does_not_press_the_others_together():
    dots = [
        Dot(label="a", figure="1", value=0.0),
        Dot(label="b", figure="1.2", value=20.0, interval=(10.0, 30.0), runs=(15.0, 25.0), marked=True),
        Dot(label="c", figure="1.4", value=40.0, interval=(-90.0, 40_000.0)),
    ]
    chart = build_dot_chart(dots, x_title="gain", rule=0.0)
    rows = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", chart)][:3]
    places = [x for x, _ in read_marks(chart).values()]
    assert places == sorted(places)
    assert places[1] - places[0] > 5, "percent of the width"
    low, high = (
        float(line.get(end).rstrip("%")) for line in rows[1].iter("line") if line.get("class") == "reach"
        for end in ("x1", "x2")
    )  # fmt: skip
    assert low < places[1] < high
    runs = [float(dot.get("cx").rstrip("%")) for dot in rows[1].iter("circle") if dot.get("class") == "run"]
    assert low < runs[0] < places[1] < runs[1] < high
    (zero,) = (float(line.get("x1").rstrip("%")) for line in rows[2].iter("line") if line.get("class") == "zero")
    assert zero == pytest.approx(places[0])
    assert "40,000" not in chart
    assert "40 k" not in chart


@pytest.mark.parametrize(("gain", "has_room"), [(450.0, False), (140.0, True)])
def test_one_disturbed_run_neither_presses_the_others_together_nor_shows_a_speed_below_zero(gain, has_room):
    dots = [
        Dot(label="yours", figure="1", value=0.0, runs=(-160.0, 5.0)),
        Dot(label="pick", figure="5.5", value=gain, runs=(gain - 10, 9_000.0)),
    ]
    chart = build_dot_chart(dots, x_title="gain", rule=0.0, floor=-100.0)
    yours, pick = (x for x, _ in read_marks(chart).values())
    assert pick - yours > 30, "percent of the width"
    assert ("−100<" in chart.replace("-", "−")) == has_room, "beside the tick at 0 its figure would stand over that one"
    assert not re.search(r"[-−](?!100<)[1-9]00<", chart)


def test_the_length_of_a_bar_is_the_sum_of_its_phases():
    bars = [
        Bar(label="t1", figure="6 ms", parts={"forward": 2.0, "backward": 4.0}),
        Bar(label="t2", figure="3 ms", parts={"forward": 3.0}),
    ]
    chart = build_bar_chart(bars, x_title="ms", colours={"forward": "red", "backward": "blue"})
    rects = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%" [^>]*fill="(\w+)"', chart)
    widths = [float(width) for _, width, _ in rects]
    assert sum(widths[:2]) == pytest.approx(2 * widths[2], abs=0.1)
    assert float(rects[1][0]) == pytest.approx(widths[0], abs=0.1), "one behind the other"
    assert [colour for _, _, colour in rects] == ["red", "blue", "red"]


def test_text_from_a_configuration_cannot_become_markup_and_nothing_measured_is_said():
    assert "nothing was measured" in build_curve_chart({}, x_title="x", y_title="y")
    for build, nothing in ((build_scatter_chart, {"y_title": "y"}), (build_dot_chart, {})):
        assert "nothing was measured" in build([], x_title="x", **nothing)
    html = "".join(
        (
            build_curve_chart({"<script>": [[Point(x=1, y=1.0, label="<b>")]], "b": []}, x_title="x", y_title="<i>"),
            build_scatter_chart([Point(x=1, y=1.0, name="<u>")], x_title="<s>", y_title="y", limits={"<q>": 1.0}),
            build_dot_chart([Dot(label="<a>", figure="<em >", value=1.0, detail="<p >")], x_title="<h1>"),
        )
    )
    tags = ("<script>", "<b>", "<i>", "<u>", "<s>", "<q>", "<a>", "<em >", "<p >", "<h1>")
    assert [tag for tag in tags if tag in html.replace("<b>&lt;a", "")] == []


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
@example(1.3e-300, 0.0)
def test_ticks_between_two_figures_hold_both(low, span):
    ticks = compute_ticks_between(low, low + span)
    assert ticks[0] <= low + 1e-6 * max(span, 1.0)
    assert ticks[-1] >= low + span - 1e-6 * max(span, 1.0)
    assert 2 <= len(ticks) <= 8


def test_curves_of_one_group_share_a_colour_and_time_runs_to_the_right():
    groups = {
        "before": [[Point(x=1.0, y=0.90, label="a1"), Point(x=2.0, y=0.95, label="a2")], [Point(x=1.5, y=0.91)]],
        "after": [[Point(x=0.5, y=0.90, label="b1"), Point(x=1.0, y=0.96, label="b2")]],
    }
    html = build_curve_chart(groups, x_title="seconds", y_title="accuracy")
    chart = read_svg(html)
    colours = [line.get("stroke") for line in chart.iter("polyline")]
    assert colours[0] == colours[1] != colours[2]
    places = read_marks(html)
    assert places["b1"][0] < places["a1"][0] == places["b2"][0] < places["a2"][0]
    assert places["b2"][1] < places["a2"][1] < places["a1"][1] == places["b1"][1]
    assert all(0 <= x <= 100 and 0 <= y <= HEIGHT for x, y in places.values())
    assert "before" in html
    assert "after" in html
