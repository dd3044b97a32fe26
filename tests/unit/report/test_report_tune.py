"""The table, the words and the page of a search, from a synthetic document in the shape of the JSON contract."""

import copy
import csv
import io
from html.parser import HTMLParser

import pytest
from rich.console import Console

from fulltilt.levers import default_plan
from fulltilt.report import (
    build_trials_csv,
    build_trials_table,
    build_tune_html,
    describe_advice,
    describe_busy,
    describe_epoch,
    describe_gain,
    describe_hints,
    describe_marks,
    describe_outcome,
    describe_pick,
    describe_resolution,
    describe_same_pick,
    describe_savings,
    describe_search,
    describe_verification,
    format_duration,
    format_throughput,
)
from fulltilt.report.table import BUSY_MARK


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
    lines = describe_pick(PICK, ROWS)
    assert lines[0].startswith("batch_size 64")
    assert "tied with: t1 (batch_size 32)" in lines
    assert "changes the recipe: effective batch 32 → 64" in lines
    assert "512 MiB; 3,000 samples/s per GiB" in lines


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


def test_a_narrow_terminal_wraps_the_picks_and_cuts_no_figure():
    marks = {"t2": "recommended, throughput, efficiency, memory"}
    console = Console(file=io.StringIO(), width=100)
    console.print(build_trials_table(ROWS, marked=marks, width=100))
    said = console.file.getvalue()
    assert "…" not in said
    for row in ROWS:
        assert format_throughput(row) in said
    for word in ("workers", "precision", "recommended,", "efficiency,", "memory"):
        assert word in said


def test_a_narrow_terminal_gets_fewer_columns_instead_of_cut_off_figures():
    wide = [column.header for column in build_trials_table(ROWS, width=160).columns]
    narrow = [column.header for column in build_trials_table(ROWS, width=100).columns]
    assert "fwd ms" in wide
    assert "fwd ms" not in narrow
    assert {"data ms", "step ms", "samples/s", "status"} <= set(narrow)


SAVINGS = {
    "verdict": "faster", "baseline_id": "t1", "recommended_id": "t2", "search_s": 240.0, "n_pairs": 3,
    "n_samples": 50_000, "n_epochs": 30, "before_s": 11_400.0, "after_s": 7_320.0, "saved_s": 4_080.0,
    "saved_s_ci95": [3_600.0, 4_500.0], "gain_pct": 35.8, "gain_ci95_pct": [31.6, 39.5], "payback_s": 431.0,
    "payback_s_ci95": [370.0, 520.0],
}  # fmt: skip


def with_savings(**changes):
    return DOCUMENT | {"savings": SAVINGS | changes}


def test_savings_are_said_in_hours_of_this_run():
    run, payback = describe_savings(with_savings())
    assert run.startswith("this run, 30 epochs of 50,000 samples: 3 h 10 min → 2 h 02 min; 35.8 % (31.6 to 39.5 %;")
    assert payback == (
        "the search took 4 min 00 s and has paid for itself after 7 min 11 s of training (6 min 10 s to 8 min 40 s)"
    )


def test_a_search_that_stays_with_the_users_settings_says_what_it_left_open():
    """``no gain`` was said where all other plans were undecided."""
    document = with_savings(verdict="same plan")
    document["search"] = document["search"] | {"n_undecided": 2}
    (said,) = describe_savings(document)
    assert said == "no gain was found: the settings as they were are recommended, and 2 other plans left undecided"


def test_a_search_that_costs_more_than_the_run_saves_says_so():
    lines = describe_savings(with_savings(before_s=60.0, after_s=40.0, saved_s=20.0))
    assert lines[1].endswith("longer than this run, which saves 20 s")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verdict": "same plan"}, "no gain: the settings as they were are the recommended ones"),
        ({"verdict": "no gain", "gain_pct": 0.2, "gain_ci95_pct": [-0.9, 1.3]}, "no gain over the settings"),
        (
            {"verdict": "no gain", "gain_pct": 30.0, "gain_ci95_pct": [-9.0, 50.0]},
            "no gain that this search could prove",
        ),
        ({"verdict": "slower", "gain_pct": -8.0, "gain_ci95_pct": [-9.0, -7.0]}, "slower than the settings"),
    ],
)
def test_what_is_no_gain_is_not_called_one(changes, words):
    document = with_savings(payback_s=None, payback_s_ci95=None, **changes)
    lines = describe_savings(document)
    assert len(lines) == 1
    assert words in lines[0]
    if changes["verdict"] != "slower":
        assert describe_gain(document | {"baseline": ROWS[0]}) is None


@pytest.mark.parametrize(
    ("gain", "ci95", "said"),
    [
        (
            76.3,
            [-22.0, 95.4],
            "76.3 % less training time was measured (saved: -22.0 to 95.4 %, an interval that holds 0; 3 pairs",
        ),
        (
            -0.4,
            [-1.5, 0.7],
            "0.4 % more training time was measured (saved: -1.5 to 0.7 %, an interval that holds 0; 3 pairs",
        ),
        (-0.01, [-1.5, 1.4], "the same training time was measured (saved: -1.5 to 1.4 %"),
    ],
)
def test_time_that_may_not_be_saved_does_not_read_as_what_is_left_of_it(gain, ci95, said):
    """``no gain …: 76.3 % of the training time`` read as if the training took 76 % of its time."""
    document = with_savings(verdict="no gain", gain_pct=gain, gain_ci95_pct=ci95, payback_s=None, payback_s_ci95=None)
    (line,) = describe_savings(document)
    assert f"over the settings as they were: {said}" in line


BUSY = {"cpu_pressure_pct": 83.0}


def with_runs(*busy, **changes):
    """A document that compares t1, t4 with t2, t5; those named ran on a busy machine, and so did t6 after them."""
    side = {"comparison": "abc"}
    rows = [ROWS[0] | side, ROWS[1] | side, ROWS[2]]
    repeats = [ROWS[0] | side | {"id": "t4"}, ROWS[1] | side | {"id": "t5"}, ROWS[1] | side | BUSY | {"id": "t6"}]

    def mark(row):
        return row | BUSY if row["id"] in busy else row

    pick = PICK | side
    return with_savings(compared_ids=["t1", "t2", "t4", "t5"], **changes) | {
        "trials": [mark(row) for row in rows],
        "repeats": [mark(row) for row in repeats],
        "baseline": mark(rows[0]),
        "picks": {"recommended": pick, "throughput": pick, "efficiency": None},
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "no gain", "gain_pct": 0.2, "gain_ci95_pct": [-0.9, 1.3]},
        {"verdict": "no gain", "gain_pct": 30.0, "gain_ci95_pct": [-9.0, 90.0]},
        {"verdict": "slower", "gain_pct": -8.0, "gain_ci95_pct": [-9.0, -7.0], "payback_s": None},
        {},
    ],
)
def test_a_verdict_that_rests_on_a_busy_machine_says_on_which_rows(changes):
    """``no gain`` was said of rows with ``this is a busy machine's figure`` among their notes, and nothing of that."""
    line = describe_savings(with_runs("t1", "t5", **changes))[0]
    assert "; of the 4 runs compared, 2 are a busy machine's (t1, t5)" in line
    assert line.count("search again on a quiet machine, with --out and a new folder") == 1
    assert "; all 4 runs compared are a busy machine's" in " ".join(
        describe_savings(with_runs("t1", "t2", "t4", "t5", **changes))
    )
    assert "busy" not in " ".join(describe_savings(with_runs(**changes))), "t6 had no partner"


def set_rates(document, **rates):
    """The document with other samples/s in these rows."""
    document = copy.deepcopy(document)
    for row in (*document["trials"], *document["repeats"]):
        row["samples_per_s"] = rates.get(row["id"], row["samples_per_s"])
    return document


def test_a_multiple_is_the_quotient_of_the_figures_beside_it():
    """``6.4 ×`` of the runs side by side stood beside rows whose quotient is 8.4."""
    assert describe_gain(set_rates(with_runs(), t1=500.0, t4=2000.0, t2=4000.0, t5=9000.0)) == (
        "6.00 × the throughput of the settings as they were, by the geometric mean of 2 runs each side by side: "
        "1,000 → 6,000 samples/s (before: batch_size 32, num_workers 0)"
    )
    alone = with_runs() | {"savings": None, "null_reasons": {"savings": "they ran once"}}
    assert "1.50 × the throughput of the settings as they were, by their rows in the table: " in describe_gain(alone)


def test_what_was_decided_is_said_before_the_picks():
    """``no gain that this search could prove`` stood below four picks and every rule of theirs."""
    document = with_runs("t1", verdict="no gain", gain_pct=30.0, gain_ci95_pct=[-9.0, 50.0])
    assert describe_outcome(document)[0].startswith("no gain that this search could prove")
    html = build_tune_html(document)
    assert html.index("no gain that this search could prove") < html.index("Recommended for training")
    faster = describe_outcome(with_runs())
    assert faster[0].startswith("this run, 30 epochs")
    assert faster[1] == describe_gain(with_runs())


def test_a_busy_machine_is_said_once_and_marked_elsewhere():
    note = "some task waited for a core 83 % of the time: this is a busy machine's figure"
    pick = PICK | BUSY | {"notes": [note, "other"]}
    assert [line for line in describe_pick(pick, ROWS) if "note" in line] == ["note: other"]
    assert f"note: {note}" in describe_pick(PICK | {"notes": [note]}, ROWS), "without a mark nothing else says it"
    hints = [{"rule": "contention", "text": "tasks waited"}, {"rule": "memory", "text": "a larger batch fits"}]
    document = DOCUMENT | {"picks": {"recommended": pick}, "hints": hints}
    assert describe_hints(document) == ["a larger batch fits"]
    stolen = document | {"picks": {"recommended": pick | {"steal_pct": 12.0}}}
    assert len(describe_hints(stolen)) == 2, "the host's share stands nowhere else"
    text = "80 % of the step is forward; a busy machine's figure (some task waited for a core: t1 83 % of the time)"
    advice = {"bound": {"text": text}, "roof": None, "ceilings": [], "levers": []}
    assert describe_advice(DOCUMENT | {"advice": advice}) == ["80 % of the step is forward *"]


def test_of_many_ties_five_are_named_and_the_others_counted():
    ids = [f"t{number}" for number in range(10, 17)]
    line = next(line for line in describe_pick(PICK | {"tied_with": ids}, ROWS) if line.startswith("tied"))
    assert line == "tied with: t10; t11; t12; t13; t14; and 2 others"
    line = next(line for line in describe_pick(PICK | {"tied_with": ids[:5]}, ROWS) if line.startswith("tied"))
    assert line == "tied with: t10; t11; t12; t13; t14"


def test_a_saving_of_a_busy_machine_is_no_promise_for_a_quiet_one():
    """``112.67 ×``, ``99.1 % is saved`` and ``paid for itself after 0.34 s`` were a minute of contention."""
    document = set_rates(with_runs("t1", "t5", gain_pct=99.1124, gain_ci95_pct=[98.5, 99.5]), t2=1e5, t5=126900.0)
    (line,) = describe_savings(document)
    assert line.startswith("on a machine as busy as this one was, which is no claim for a quiet one: this run")
    assert "saved" not in line
    gain = describe_gain(document)
    assert gain.startswith("about 113 × * the throughput of the settings as they were, by the geometric mean of 2 runs")
    assert describe_gain(with_runs("t1")).startswith("about 1.5 × *")
    assert describe_gain(with_runs()).startswith("1.50 × the throughput")
    assert len(describe_savings(with_runs())) == 2


@pytest.mark.parametrize(
    ("ci95", "words"),
    [
        ([-250.0, 99.2], "34 % less training time to the same quality (saved: -250 to 99 %, an interval that holds 0)"),
        ([2.0, 20.0], "(saved: 2 to 20 %, an interval apart from the search's)"),
        ([30.0, 50.0], None),
    ],
)
def test_a_saving_that_verify_did_not_confirm_says_so_beside_it(ci95, words):
    made = {"time_saved_pct": 34.0, "time_saved_ci95_pct": ci95, "n_pairs": 2}
    line = describe_savings(with_savings() | {"verification": made})[0]
    assert ("--verify's trainings of 2 pairs did not confirm it: " in line) == (words is not None)
    assert (words or "35.8 %") in line


@pytest.mark.parametrize(
    ("saved", "ci95", "said"),
    [
        (-12.0, [-30.0, -2.0], "did not confirm it: 12 % more training time to the same quality (saved: -30 to -2 %"),
        (-0.3, [-9.0, 8.0], "did not confirm it: the same training time to the same quality (saved: -9 to 8 %"),
        (1.0, [-0.2, 2.0], "(saved: 0 to 2 %, an interval that holds 0)"),
        (
            60.0,
            [55.0, 65.0],
            "of 2 pairs saved more than the search says: 60 % less training time to the same quality ",
        ),
    ],
)
def test_what_verify_measured_is_said_as_what_it_is(saved, ci95, said):
    """More saved than promised was called not confirmed, and 12 % longer was ``-12 % less``."""
    made = {"time_saved_pct": saved, "time_saved_ci95_pct": ci95, "n_pairs": 2}
    assert said in describe_savings(with_savings() | {"verification": made})[0]


def test_the_figures_of_a_pick_of_a_busy_machine_are_marked():
    """Its row in the table was, and the large figure under its title was not."""
    busy = DOCUMENT | {"picks": {"recommended": PICK | BUSY}}
    assert describe_pick(PICK | BUSY, ROWS)[1] == "1,500 ± 2.0 % * samples/s"
    assert "1,500 ± 2.0 % *" in Page(build_tune_html(busy)).text
    assert describe_epoch(busy) == "one epoch takes about 1.2 s * (1.1 s to 1.3 s)"
    assert describe_epoch(DOCUMENT) == "one epoch takes about 1.2 s (1.1 s to 1.3 s)"


def test_a_gain_that_is_marked_for_a_repeat_has_its_legend():
    document = with_runs("t5")
    assert BUSY_MARK in describe_gain(document)
    legend = describe_marks(document)
    assert legend.startswith("* a busy machine's figure (1 compared run outside the table):")
    assert legend in Page(build_tune_html(document)).text
    assert describe_marks(with_runs("t1")).startswith("* a busy machine's figure (1 row)")  # also the baseline
    assert describe_marks(with_runs()) is None  # t6 is busy, and no figure of it is shown


def test_the_legend_counts_the_rows_of_the_table_that_is_shown():
    """``(15 rows)`` stood under a table of 12."""
    legend = describe_marks(with_runs("t1", "t2", "t4", "t5"))
    assert legend.startswith("* a busy machine's figure (2 rows, 2 compared runs outside the table):")


def test_a_row_of_a_busy_machine_is_marked_with_a_legend_wherever_rows_are_shown():
    document = DOCUMENT | {"trials": [ROWS[0] | BUSY | {"notes": ["a", "b"]}, *ROWS[1:]], "probes": []}
    table = build_trials_table(document["trials"])
    rates = next(list(column.cells) for column in table.columns if column.header == "samples/s")
    assert [cell.plain for cell in rates] == ["1,000 ± 2.0 % *", "1,500 ± 2.0 %", ""]
    page = Page(build_tune_html(document))
    assert "1,000 ± 2.0 % *" in page.cells
    assert "1,500 ± 2.0 %" in page.cells
    legend = describe_busy(document["trials"])
    assert legend is not None
    assert legend.startswith(
        "* a busy machine's figure (1 row): some task waited for a core more than 50 % of the time"
    )
    assert legend in page.text
    lines = list(csv.DictReader(io.StringIO(build_trials_csv(document))))
    assert [line["busy_machine"] for line in lines] == ["yes", "", ""]
    assert lines[0]["notes"] == "a; b"


def test_a_quiet_search_has_no_mark_and_no_legend():
    quiet = DOCUMENT | {"trials": [row | {"cpu_pressure_pct": 50.0} for row in ROWS]}
    assert describe_busy(quiet["trials"]) is None
    page = Page(build_tune_html(quiet))
    assert not any("*" in cell for cell in page.cells)
    assert not any("busy machine" in text for text in page.text)


def test_savings_that_are_not_known_give_the_reason():
    assert describe_savings(DOCUMENT | {"savings": None, "null_reasons": {"savings": "it was not run"}}) == [
        "time saved: not known, it was not run"
    ]
    assert describe_savings(DOCUMENT) == []


def test_a_ratio_of_too_few_runs_says_so():
    document = DOCUMENT | {"baseline": ROWS[0], "null_reasons": {"savings": "side by side in 1 round"}}
    assert describe_gain(document).endswith(", in too few runs to tell it from chance")
    assert "chance" not in describe_gain(with_savings() | {"baseline": ROWS[0]})


ADVICE = {
    "trial_id": "t2",
    "bound": {"text": "80 % of the step is forward and backward"},
    "roof": None,
    "ceilings": [{"text": "the loader alone reaches 9,000 samples/s (t9)"}],
    "levers": [
        {"state": "not in the space", "text": "compile yes: was not run"},
        {"state": "not reached", "text": "placement ram: was not run, though it is in the space"},
        {"state": "tried alone", "text": "channels_last yes (t3) was 4 % slower"},
    ],
}


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


VERIFICATION = {
    "text": "learns as well: validation accuracy",
    "metric": "accuracy",
    "runs": [
        {"arm": "as it was", "seed": 1, "curve": [[1.0, 0.9], [2.0, 0.95]]},
        {"arm": "recommended", "seed": 1, "curve": [[0.5, 0.9], [1.0, 0.94]]},
    ],
}


def test_the_page_shows_every_new_part():
    probe = build_row("t8") | {"kind": "device", "why": "the step alone"}
    page = Page(
        build_tune_html(
            with_savings() | {"advice": ADVICE, "verification": VERIFICATION, "probes": [probe], "null_reasons": {}}
        )
    )
    assert page.open == []
    text = " ".join(page.text)
    assert "3 h 10 min → 2 h 02 min" in text
    assert "channels_last yes (t3) was 4 % slower" in text
    assert "Does it learn as well?" in text
    assert "recommended, seed 1: 0.94 after 1 s" in text
    assert "1 probe of parts of the step" in text
    assert "t8 device" in text
    assert describe_verification({"verification": VERIFICATION}) == VERIFICATION["text"]
    assert describe_verification(DOCUMENT) is None


def test_the_memory_pick_is_a_card_of_its_own():
    document = DOCUMENT | {
        "picks": DOCUMENT["picks"] | {"memory": {**ROWS[0], "rule": "least memory", "tied_with": []}}
    }
    assert "Least memory at an acceptable speed" in " ".join(Page(build_tune_html(document)).text)


@pytest.mark.parametrize(
    ("tied", "said"),
    [
        (["t1"], "rule: highest of 3 per GiB"),
        (["t1", "t3"], "rule: highest of 3 per GiB; by it tied with t1, t3"),
        ([], "rule: highest of 3 per GiB; by it tied with none"),
    ],
)
def test_a_plan_that_is_picked_twice_names_its_ties_where_they_are_others(tied, said):
    again = PICK | {"rule": "highest of 3 per GiB; tied with some, which these runs cannot tell", "tied_with": tied}
    assert describe_same_pick(again, PICK | {"tied_with": ["t1"]}) == said


def test_an_epoch_whose_runs_say_nothing_has_no_interval():
    """0.00037 s to 1 min 41 s stood there."""
    epoch = {"estimate": 0.19, "ci95": [0.00037, 101.0]}
    said = describe_epoch(DOCUMENT | {"epoch_seconds": epoch})
    assert said == "one epoch takes about 0.19 s, and its runs differ too much for an interval"


def test_runs_that_tell_nothing_apart_are_said_to():
    """``plans that differ by a factor of 678.2 are told apart`` stood there."""
    search = DOCUMENT["search"] | {"detectable_pct": 67_720.0, "n_undecided": 1}
    said = describe_resolution(DOCUMENT | {"search": search})
    assert said.startswith("these runs tell no plans apart: runs of one plan differ too much; 1 of 1 other plan")


def test_a_plan_that_is_picked_twice_is_described_once():
    text = " ".join(Page(build_tune_html(DOCUMENT)).text)
    assert text.count("the same plan as recommended for training") == 1
    assert text.count("changes the recipe: effective batch 32 → 64") == 1


def test_a_search_says_how_many_probes_it_took():
    assert describe_search(DOCUMENT) == "exhaustive: 3 plans run of a grid of 3, 1 out of memory, 12 s"
    search = DOCUMENT["search"] | {"n_probes": 7, "n_skipped": 1, "n_repeats": 4}
    estimates = [{"kind": "memory"}, {"kind": "memory"}, {"kind": "device"}]
    said = describe_search(DOCUMENT | {"search": search, "probes": estimates})
    assert "2 plans run of a grid of 3, 1 skipped, 4 runs again, 7 probes, 2 estimates of memory, 1 out of" in said


def test_what_the_runs_could_have_told_apart_is_said_with_what_they_did_not():
    assert describe_resolution(DOCUMENT) is None, "nothing ran side by side"
    search = DOCUMENT["search"] | {"detectable_pct": 6.08, "n_undecided": 1}
    said = (
        "plans that differ by 6.1 % are told apart by these runs in 80 of 100 cases; 1 of 1 other plan left undecided"
    )
    assert describe_resolution(DOCUMENT | {"search": search}) == said
    assert said in build_tune_html(DOCUMENT | {"search": search})


@pytest.mark.parametrize(
    ("detectable_pct", "said"),
    [
        (0.42, "by 0.4 %"),
        (9.94, "by 9.9 %"),
        (9.96, "by 10 %"),
        (62.3, "by 62 %"),
        (100.0, "by 100 %"),
        (110.0, "by a factor of 2.1"),
    ],
)
def test_a_gap_that_runs_tell_apart_is_said_in_plain_figures(detectable_pct, said):
    """``plans that differ by 1.1e+02 %`` was printed of a noisy machine."""
    search = DOCUMENT["search"] | {"detectable_pct": detectable_pct, "n_undecided": 1}
    line = describe_resolution(DOCUMENT | {"search": search})
    assert line is not None
    assert line.startswith(f"plans that differ {said} are told apart")


def test_seconds_of_this_run_and_those_of_earlier_ones_stand_apart():
    """One figure, the run's wall time plus the rows that it had found, was neither of the two."""
    search = DOCUMENT["search"] | {"seconds": 19.2, "earlier_s": 72.0}
    said = "19 s in this run, 1 min 12 s in trials of earlier ones in this folder"
    assert describe_search(DOCUMENT | {"search": search}).endswith(said)


def test_the_csv_holds_every_row_once_in_the_order_they_ran():
    repeat = build_row("t10", samples_per_s=990.0) | {"kind": "repeat"}
    probe = build_row("t9") | {"kind": "loader", "why": "a, b"}
    document = DOCUMENT | {"repeats": [repeat], "probes": [probe], "baseline": ROWS[0]}
    rows = list(csv.DictReader(io.StringIO(build_trials_csv(document))))
    assert [row["id"] for row in rows] == ["t1", "t2", "t3", "t9", "t10"]
    by_id = {row["id"]: row for row in rows}
    assert by_id["t2"]["picked"] == "recommended throughput"
    assert (by_id["t2"]["batch_size"], float(by_id["t2"]["samples_per_s"])) == ("64", 1500.0)
    assert float(by_id["t2"]["samples_per_s_low"]) == pytest.approx(1470.0)
    assert float(by_id["t2"]["backward_ms"]) == 5.0
    assert (by_id["t3"]["status"], by_id["t3"]["samples_per_s"]) == ("out_of_memory", "")
    assert by_id["t3"]["reason"] == "used 2.1 GiB, the limit is <2.0 GiB>"
    assert (by_id["t9"]["kind"], by_id["t9"]["why"]) == ("loader", "a, b")
    assert set(default_plan()) <= set(rows[0])


@pytest.mark.parametrize(("gib", "text"), [(12.345, "12.35"), (0.1, "0.10"), (0.00468, "0.0047"), (None, "")])
def test_small_memory_keeps_its_figures_in_the_table(gib, text):
    rows = [{**ROWS[0], "memory_reserved_peak_gib": None, "memory_rss_peak_gib": gib}]
    column = build_trials_table(rows).columns[-2]
    assert (column.header, [cell.plain for cell in column.cells]) == ("memory GiB", [text])


def test_the_part_of_the_run_that_memory_is_of_is_in_the_csv_and_pointed_out_on_the_page():
    rows = [{**ROWS[0], "memory_peak_part": "largest samples"}, *ROWS[1:]]
    document = {**DOCUMENT, "trials": rows}
    lines = list(csv.DictReader(io.StringIO(build_trials_csv(document))))
    assert [line["memory_peak_part"] for line in lines] == ["largest samples", "", ""]
    assert 'title="fullest: largest samples"' in build_tune_html(document)


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([1000.0, 4000.0, 2000.0], "shown is the median one, compared is the geometric mean, 2,000"),
        ([1000.0, 4000.0], "shown is the slower one, compared is the geometric mean, 2,000"),
    ],
)
def test_the_mean_that_a_pick_was_compared_by_is_named_with_its_value(runs, text):
    assert any(line.endswith(text) for line in describe_pick({**PICK, "runs_samples_per_s": runs}))
