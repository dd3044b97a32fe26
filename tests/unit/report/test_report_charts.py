import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.report.report_documents import read_svg

from fulltilt.report.charts import (
    HEIGHT,
    WIDTH,
    Bar,
    Point,
    build_bar_chart,
    build_curve_chart,
    build_line_chart,
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


def test_a_faster_plan_is_drawn_higher_and_a_larger_batch_further_right():
    points = [Point(x=32, y=100.0, label="slow"), Point(x=128, y=300.0, low=280.0, high=320.0, label="fast")]
    chart = read_svg(build_line_chart({"a": points}, x_title="batch size", y_title="samples/s"))
    places = {c.find("title").text: (float(c.get("cx")), float(c.get("cy"))) for c in chart.iter("circle")}
    assert places["fast"][0] > places["slow"][0]
    assert places["fast"][1] < places["slow"][1]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places.values())


def test_the_length_of_a_bar_is_the_sum_of_its_phases():
    bars = [Bar(label="t1", parts={"forward": 2.0, "backward": 4.0}), Bar(label="t2", parts={"forward": 3.0})]
    chart = read_svg(build_bar_chart(bars, x_title="ms", colours={"forward": "red", "backward": "blue"}))
    widths = [float(r.get("width")) for r in chart.iter("rect")]
    assert sum(widths[:2]) == pytest.approx(2 * widths[2], abs=0.3)
    assert [r.get("fill") for r in chart.iter("rect")] == ["red", "blue", "red"]


def test_text_from_a_configuration_cannot_become_markup_and_nothing_measured_is_said():
    for build_chart in (build_curve_chart, build_line_chart):
        assert "nothing was measured" in build_chart({}, x_title="x", y_title="y")
    chart = build_line_chart({"<script>": [Point(x=1, y=1.0, label="<b>")], "b": []}, x_title="x", y_title="<i>")
    assert [tag for tag in ("<script>", "<b>", "<i>") if tag in chart] == []


@pytest.mark.parametrize(("limit", "is_drawn"), [(12.0, True), (500.0, False)])
def test_a_limit_is_drawn_where_it_is_near(limit, is_drawn):
    chart = read_svg(build_line_chart({"a": [Point(x=1, y=10.0)]}, x_title="x", y_title="GiB", limit=limit))
    assert any(line.get("class") == "limit" for line in chart.iter("line")) is is_drawn


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
    places = {c.find("title").text: (float(c.get("cx")), float(c.get("cy"))) for c in chart.iter("circle")}
    assert places["b1"][0] < places["a1"][0] == places["b2"][0] < places["a2"][0]
    assert places["b2"][1] < places["a2"][1] < places["a1"][1] == places["b1"][1]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places.values())
    assert "before" in html
    assert "after" in html
