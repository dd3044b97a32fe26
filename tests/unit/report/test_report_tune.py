"""The table, the words and the page of a search, from a synthetic document in the shape of the JSON contract."""

import csv
import io

import pytest
from rich.console import Console
from tests.unit.report.report_documents import (
    ADVICE,
    BUSY,
    DOCUMENT,
    PICK,
    ROWS,
    VERIFICATION,
    Page,
    build_row,
    compare,
    with_savings,
)

from fulltilt.levers import default_plan
from fulltilt.report.html import build_tune_html
from fulltilt.report.summary import (
    describe_advice,
    describe_hints,
    describe_marks,
    describe_pick,
    describe_same_pick,
    describe_search,
    format_duration,
)
from fulltilt.report.table import build_trials_table, describe_busy, format_throughput
from fulltilt.report.trials_csv import build_trials_csv


def test_the_page_is_well_formed_fetches_nothing_and_holds_every_row_and_reason():
    html = build_tune_html(DOCUMENT)
    page = Page(html)
    assert page.open == []
    assert [word for word in ("http", "src=", "<link", "@import", "url(") if word in html] == []
    assert "1,500 ± 2.0 %" in page.cells
    assert any("used 2.1 GiB, the limit is <2.0 GiB>" in cell for cell in page.cells)
    assert "digits & <co>" in page.text
    text = " ".join(page.text)
    assert text.count("the same plan as recommended for training") == 1
    assert text.count("changes the recipe: effective batch 32 → 64") == 1


def test_the_table_shows_what_differs_and_hides_what_nobody_read():
    table = build_trials_table(ROWS, marked={"t2": "recommended"})
    titles = [column.header for column in table.columns]
    assert titles[:3] == ["batch", "workers", "precision"]
    assert {"h2d ms", "GPU %", "pin"}.isdisjoint(titles)
    assert [cell.plain for cell in table.columns[-1].cells] == ["ok", "ok ← recommended", "OOM"]
    pinned = build_trials_table([build_row("t1"), build_row("t3", pin_memory=True)])
    assert "pin" in [column.header for column in pinned.columns]


def test_a_pick_says_what_it_changes_and_names_its_ties_by_their_levers():
    first, *lines = describe_pick(PICK, ROWS)
    assert first.startswith("batch_size 64")
    tie, changes = "tied with: batch_size 32", "changes the recipe: effective batch 32 → 64"
    assert {tie, changes, "512 MiB; 3,000 samples/s per GiB"} <= {*lines}
    for n_ties, more in ((7, "; and 2 others"), (5, "")):
        rows = [build_row(f"t{n}", batch_size=64, threads=n) for n in range(10, 10 + n_ties)]
        tied = describe_pick(PICK | {"tied_with": [row["id"] for row in rows]}, rows)
        assert f"tied with: threads 10; threads 11; threads 12; threads 13; threads 14{more}" in tied
    gained = describe_pick(PICK | {"gain": compare(32, 24, 41)}, ROWS)
    (gain,) = (line for line in gained if "over the settings" in line)
    assert gain == "+32 % samples/s over the settings as they were (+24.0 to +41.0 %, 6 groups in turns): faster"


@pytest.mark.parametrize(
    ("format_it", "given", "text"),
    [
        (format_throughput, {"samples_per_s": 1234.0, "samples_per_s_ci95": [1200.0, 1268.0]}, "1,234 ± 2.8 %"),
        (format_throughput, {"samples_per_s": 3.217, "samples_per_s_ci95": None}, "3.22"),
        (format_throughput, {"samples_per_s": None}, ""),
        *[(format_duration, *pair) for pair in ((0.42, "0.42 s"), (17.4, "17 s"), (59.7, "60 s"))],
        *[(format_duration, *pair) for pair in ((185, "3 min 05 s"), (7800, "2 h 10 min"))],
    ],
)
def test_throughput_is_written_with_its_interval_and_durations_as_people_say_them(format_it, given, text):
    assert format_it(given) == text


def test_a_narrow_terminal_wraps_the_picks_and_drops_columns_and_cuts_no_figure():
    marks = {"t2": "recommended, throughput, efficiency, memory"}
    console = Console(file=io.StringIO(), width=100)
    console.print(build_trials_table(ROWS, marked=marks, width=100))
    said = console.file.getvalue()
    assert "…" not in said
    words = ["workers", "precision", "recommended,", "efficiency,", "memory", *map(format_throughput, ROWS)]
    assert [word for word in words if word not in said] == []
    wide, narrow = ({column.header for column in build_trials_table(ROWS, width=n).columns} for n in (160, 100))
    assert "fwd ms" in wide - narrow
    assert {"data ms", "step ms", "samples/s", "status"} <= narrow


def test_a_busy_machine_is_said_once_and_marked_elsewhere():
    hints = [{"rule": "contention", "text": "tasks waited"}, {"rule": "memory", "text": "a larger batch fits"}]
    document = DOCUMENT | {"picks": {"recommended": PICK | BUSY}, "hints": hints}
    assert describe_hints(document) == ["a larger batch fits"]
    stolen = document | {"picks": {"recommended": PICK | BUSY | {"steal_pct": 12.0}}}
    assert len(describe_hints(stolen)) == 2, "the host's share stands nowhere else"


def test_the_legend_counts_the_probes_that_advice_rests_on():
    probes = [build_row(f"t{number}") | BUSY | {"kind": "loader"} for number in (9, 10, 11)]  # no advice rests on t11
    ceilings = [{"text": "the loader alone reaches 9,000 samples/s (t9)", "busy_ids": ["t9"]}]
    levers = [{"state": "probed alone", "text": "compile yes gains", "busy_ids": ["t10"]}]
    document = DOCUMENT | {"probes": probes, "advice": ADVICE | {"ceilings": ceilings, "levers": levers}}
    assert describe_marks(DOCUMENT | {"probes": probes}) is None
    assert describe_marks(document).startswith("* a busy machine's figure (1 probe):")
    assert describe_advice(document)[-1] == "the loader alone reaches 9,000 samples/s (t9) *"
    assert describe_marks(document, in_full=True).startswith("* a busy machine's figure (2 probes):")
    assert describe_advice(document, in_full=True)[-1] == "compile yes gains *"
    assert "* a busy machine's figure (3 probes)" in "".join(Page(build_tune_html(document)).text)


@pytest.mark.parametrize(("pressure_pct", "is_marked"), [(83.0, True), (50.0, False)])
def test_a_row_of_a_busy_machine_is_marked_with_a_legend_wherever_rows_are_shown(pressure_pct, is_marked):
    first = ROWS[0] | {"cpu_pressure_pct": pressure_pct, "notes": ["a", "b"], "memory_peak_part": "largest samples"}
    document = DOCUMENT | {"trials": [first, *ROWS[1:]], "probes": []}
    columns = build_trials_table(document["trials"]).columns
    [rates] = [column.cells for column in columns if column.header == "samples/s"]
    marked = "1,000 ± 2.0 % *" if is_marked else "1,000 ± 2.0 %"
    assert [cell.plain for cell in rates] == [marked, "1,500 ± 2.0 %", ""]
    html = build_tune_html(document)
    page = Page(html)
    assert {marked, "1,500 ± 2.0 %"} <= set(page.cells)
    said = "* a busy machine's figure (1 row): some task waited for a core more than 50 % of the time"
    assert (describe_busy(document["trials"]) or "").startswith(said) == is_marked
    assert any("busy machine" in text for text in page.text) == is_marked
    assert 'title="fullest: largest samples"' in html
    lines = list(csv.DictReader(io.StringIO(build_trials_csv(document))))
    assert [line["busy_machine"] for line in lines] == ["yes" if is_marked else "", "", ""]
    assert [line["memory_peak_part"] for line in lines] == ["largest samples", "", ""]
    assert lines[0]["notes"] == "a; b"


def test_advice_in_short_leaves_out_levers_that_were_tried():
    document = DOCUMENT | {"advice": ADVICE, "null_reasons": {"advice.roof": "no roof was measured"}}
    assert describe_advice(document) == [
        "80 % of the step is forward and backward",
        "the loader alone reaches 9,000 samples/s (t9)",
        "MFU and roof: not known, no roof was measured",
        "compile yes: was not run",
    ]
    assert describe_advice(document, in_full=True)[-1] == "channels_last yes (t3) was 4 % slower"
    assert describe_advice(DOCUMENT) == []


def test_the_page_shows_every_part_that_was_asked_for():
    probe = build_row("t8") | {"kind": "device", "why": "the step alone"}
    more = {"advice": ADVICE, "verification": VERIFICATION, "probes": [probe], "null_reasons": {}}
    page = Page(build_tune_html(with_savings() | more))
    assert page.open == []
    wanted = [
        *("1 h 08 min of this run's 3 h 10 min", "channels_last yes (t3) was 4 % slower", "Does it learn as well?"),
        *(VERIFICATION["text"], "recommended, seed 1: 0.94 after 1 s", "1 probe of parts of the step", "t8 device"),
    ]
    assert [words for words in wanted if words not in " ".join(page.text)] == []
    assert "Does it learn" not in build_tune_html(DOCUMENT)


@pytest.mark.parametrize(
    ("tied", "said"),
    [
        (["t1"], ""),
        (["t1", "t3"], "; by it tied with: batch_size 32; batch_size 128"),
        ([], "; by it tied with: none"),
    ],
)
def test_a_plan_that_is_picked_twice_names_its_ties_where_they_are_others(tied, said):
    again = PICK | {"rule": "highest of 3 per GiB; tied with some, which these runs cannot tell", "tied_with": tied}
    assert describe_same_pick(again, PICK | {"tied_with": ["t1"]}, ROWS) == f"rule: highest of 3 per GiB{said}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"n_probes": 7, "n_skipped": 1, "n_groups": 4},
            "2 plans run of a grid of 3, 1 skipped, 4 groups in turns, 7 probes, 2 estimates of memory, 1 out of "
            "memory, 12 s",
        ),
        (
            {"seconds": 19.2, "earlier_s": 72.0},
            "3 plans run of a grid of 3, 1 out of memory, 19 s in this run, 1 min 12 s in trials of earlier ones in "
            "this folder",
        ),
    ],
)
def test_a_search_says_what_it_took(changes, said):
    probes = [{"kind": kind} for kind in ("memory", "memory", "device")] if "n_probes" in changes else []
    document = DOCUMENT | {"search": DOCUMENT["search"] | changes, "probes": probes}
    assert describe_search(document) == f"exhaustive: {said}"


def test_the_csv_holds_every_row_once_in_the_order_they_ran():
    repeat = build_row("t10", samples_per_s=990.0) | {"kind": "repeat"}
    probe = build_row("t9") | {"kind": "loader", "why": "a, b"}
    picks = DOCUMENT["picks"] | {"memory": {**ROWS[0], "rule": "least memory", "tied_with": []}}
    document = DOCUMENT | {"repeats": [repeat], "probes": [probe], "baseline": ROWS[0], "picks": picks}
    assert "Least memory at an acceptable speed" in build_tune_html(document), "a card of its own"
    rows = list(csv.DictReader(io.StringIO(build_trials_csv(document))))
    assert [row["id"] for row in rows] == ["t1", "t2", "t3", "t9", "t10"]
    _, second, failed, probed, _ = rows
    assert (second["picked"], second["batch_size"]) == ("recommended throughput", "64")
    figures = [float(second[name]) for name in ("samples_per_s", "samples_per_s_low", "backward_ms")]
    assert figures == pytest.approx([1500.0, 1470.0, 5.0])
    assert (failed["status"], failed["samples_per_s"], failed["reason"]) == ("out_of_memory", "", ROWS[2]["reason"])
    assert (probed["kind"], probed["why"]) == ("loader", "a, b")
    assert set(default_plan()) <= set(rows[0])


@pytest.mark.parametrize(("gib", "text"), [(12.345, "12.35"), (0.1, "0.10"), (0.00468, "0.0047"), (None, "")])
def test_small_memory_keeps_its_figures_in_the_table(gib, text):
    rows = [{**ROWS[0], "memory_reserved_peak_gib": None, "memory_rss_peak_gib": gib}]
    column = build_trials_table(rows).columns[-2]
    assert (column.header, [cell.plain for cell in column.cells]) == ("memory GiB", [text])
