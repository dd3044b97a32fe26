"""The table, the words and the page of a search, from a synthetic document in the shape of the JSON contract."""

import copy
from html.parser import HTMLParser

import pytest

from fulltilt.levers import default_plan
from fulltilt.report import (
    build_trials_table,
    build_tune_html,
    describe_gain,
    describe_pick,
    format_duration,
    format_throughput,
)


def build_row(trial_id, *, status="ok", samples_per_s=1000.0, reason=None, **plan):
    ok = status == "ok"
    phases = {"data_wait": 1.0, "h2d": None, "forward": 3.0, "backward": 5.0, "optimizer": 0.5, "other": 0.5}
    return {
        "id": trial_id,
        "plan": dict(default_plan()) | {"batch_size": 32, "num_workers": 0, "precision": "fp32"} | plan,
        "status": status,
        "reason": reason,
        "phases_ms": {**phases, "step": 10.0} if ok else None,
        "samples_per_s": samples_per_s if ok else None,
        "samples_per_s_ci95": [samples_per_s * 0.98, samples_per_s * 1.02] if ok else None,
        "gpu_utilization_pct": None,
        "memory_reserved_peak_gib": None,
        "memory_rss_peak_gib": 0.5 if ok else None,
    }


ROWS = [
    build_row("t1"),
    build_row("t2", batch_size=64, samples_per_s=1500.0),
    build_row("t3", batch_size=128, status="out_of_memory", reason="used 2.1 GiB, the limit is <2.0 GiB>"),
]
PICK = {**ROWS[1], "rule": "fastest", "tied_with": ["t1"], "changes": {"recipe": ["effective batch 32 → 64"]}}
DOCUMENT = {
    "machine": {"cpu_model": "Some CPU", "n_cores_usable": 2, "packages": {"torch": "2.13.0"}},
    "workload": {"name": "digits & <co>"},
    "trials": ROWS,
    "picks": {"recommended": PICK, "throughput": PICK, "efficiency": None},
    "search": {"strategy": "exhaustive", "grid_size": 3, "n_trials": 3, "n_out_of_memory": 1, "seconds": 12.0},
    "learning_rate": {"rule": "sqrt", "from": 0.1, "to": 0.14142},
    "epoch_seconds": {"estimate": 1.2, "ci95": [1.1, 1.3]},
    "hints": ["data wait is 10 % of the step"],
}


class Page(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.open, self.cells, self.text = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "line", "circle", "rect", "polyline"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag not in ("line", "circle", "rect", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.open:
            self.cells[-1] += data


def test_the_page_is_well_formed_and_holds_every_row_and_reason():
    page = Page(build_tune_html(DOCUMENT))
    assert page.open == []
    assert "1,500 ± 2.0 %" in page.cells
    assert any("used 2.1 GiB, the limit is <2.0 GiB>" in cell for cell in page.cells)
    assert "digits & <co>" in page.text
    assert any("learning rate 0.1 → 0.14142 by the sqrt rule" in text for text in page.text)


def test_the_page_fetches_nothing():
    html = build_tune_html(DOCUMENT)
    assert "http" not in html
    assert "<script" not in html


def test_a_page_without_one_measured_row_still_says_why():
    document = copy.deepcopy(DOCUMENT) | {"trials": [ROWS[2]], "picks": {}}
    assert "the limit is" in build_tune_html(document)


def test_the_table_shows_what_differs_and_hides_what_nobody_read():
    table = build_trials_table(ROWS, marked={"t2": "recommended"})
    titles = [column.header for column in table.columns]
    assert titles[:3] == ["batch", "workers", "precision"]
    assert "h2d ms" not in titles
    assert "GPU %" not in titles
    assert "pin" not in titles
    status = [cell.plain for cell in table.columns[-1].cells]
    assert status == ["ok", "ok ← recommended", "OOM"]


def test_a_lever_that_varies_gets_a_column():
    rows = [build_row("t1"), build_row("t2", num_workers=1), build_row("t3", pin_memory=True)]
    assert "pin" in [column.header for column in build_trials_table(rows).columns]


def test_a_pick_says_what_it_changes_and_what_it_ties_with():
    lines = describe_pick(PICK)
    assert lines[0].startswith("batch_size 64")
    assert "tied with: t1" in lines
    assert "changes the recipe: effective batch 32 → 64" in lines
    assert "0.50 GiB; 3,000 samples/s per GiB" in lines


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"samples_per_s": 1234.0, "samples_per_s_ci95": [1200.0, 1268.0]}, "1,234 ± 2.8 %"),
        ({"samples_per_s": 3.217, "samples_per_s_ci95": None}, "3.22"),
        ({"samples_per_s": None}, ""),
    ],
)
def test_throughput_is_written_with_its_interval(row, text):
    assert format_throughput(row) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.42 s"), (17.4, "17 s"), (185, "3 min 05 s"), (7800, "2 h 10 min"), (59.7, "60 s")]
)
def test_durations_read_as_people_say_them(seconds, text):
    assert format_duration(seconds) == text


def test_a_gain_within_the_noise_is_not_claimed():
    baseline = build_row("t1", samples_per_s=1400.0)
    document = DOCUMENT | {"baseline": baseline}
    assert describe_gain(document).startswith("1.07 × the throughput")
    noisy = document | {"search": DOCUMENT["search"] | {"noise_pct": 8.0}}
    assert describe_gain(noisy) == "no difference from the settings as they were: runs of one plan lay 8 % apart"


def test_a_pick_that_is_the_baseline_gains_nothing():
    assert describe_gain(DOCUMENT | {"baseline": PICK}) is None


def test_a_narrow_terminal_gets_fewer_columns_instead_of_cut_off_figures():
    wide = [column.header for column in build_trials_table(ROWS, width=160).columns]
    narrow = [column.header for column in build_trials_table(ROWS, width=100).columns]
    assert "fwd ms" in wide
    assert "fwd ms" not in narrow
    assert {"data ms", "step ms", "samples/s", "status"} <= set(narrow)
