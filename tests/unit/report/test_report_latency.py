"""The distribution of latencies, in a terminal and as a page."""

from fulltilt.report.latency import build_latency_page, draw_histogram

BINS = ((1.0, 2.0, 50), (2.0, 4.0, 1), (4.0, 8.0, 0), (8.0, 16.0, 100))


def test_each_range_is_a_line_as_long_as_its_share_and_the_limit_has_its_place():
    lines = list(draw_histogram(BINS, limit=5.0))
    assert [line.count("█") for line in lines] == [22, 1, 0, 44]
    assert lines[0].startswith(" 1 to 2 ms  ██")
    assert [("limit 5 ms" in line) for line in lines] == [False, False, True, False]
    assert max(map(len, lines)) <= 100
    assert list(draw_histogram(())) == []


def test_the_page_holds_every_percentile_to_the_slowest_and_no_code_of_a_name():
    page = build_latency_page("check: <b>", {"response_s": [float(i) for i in range(1, 1001)], "one": [3.0]})
    assert "response_s: 100 % within 1000 ms" in page
    assert "response_s: 99.9 % within 999 ms" in page
    assert "one: 100 % within 3 ms" in page
    assert "<b>" not in page
