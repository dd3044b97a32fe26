"""The page of a search: its figures, the change, the rows, and what a notebook shows of it."""

import itertools
import re

import pytest
from tests.unit.report.report_documents import (
    OWN,
    RATES,
    Page,
    build_document,
    build_effect,
    build_pick,
    build_row,
    build_turns,
    compare,
    compute_savings,
)

from fulltilt.report.html import build_tune_html, build_tune_summary
from fulltilt.report.tune_charts import (
    draw_finalists,
    draw_levers,
    draw_memory,
    draw_phases,
    draw_predictions,
    draw_runs,
)
from fulltilt.report.turns import name_sides
from fulltilt.report.verdict import describe_verdict

FASTER = compare(32.0, 24.0, 41.0)


def list_rows(chart):
    """Label, words and drawing of each row of a chart of dots or bars."""
    found = re.findall(r"<b>(.*?)</b> <span>(.*?)</span></div><em>(.*?)</em>(<svg.*?</svg>)", chart)
    return [(label, f"{detail} | {figure}", svg) for label, detail, figure, svg in found]


def read_places(svg):
    return [float(x) for x in re.findall(r'<circle cx="([\d.]+)%"', svg)]


def test_yours_the_pick_and_the_finalists_are_drawn_with_intervals_and_every_group():
    rival = build_row("t3", samples_per_s=20_000.0, threads=1)  # fast in one run, and not in turns
    noisy = [rate * factor for rate, factor in zip(RATES, (1.1, 1.3, 1.0, 1.2), strict=False)]
    document = build_document(FASTER)
    document |= {
        "trials": [*document["trials"], rival],
        "repeats": [*document["repeats"], *build_turns({"threads": 1}, noisy, first_id=40)],
    }
    yours, pick, third = list_rows(draw_finalists(document))
    assert [row[0] for row in (yours, pick, third)] == ["yours t1", "pick t2", "t3"]
    assert pick[1] == "num_workers 2, fused_optimizer yes | 1.32 × (1.24 to 1.41)"
    assert third[1] == "threads 1 | 1.14 × (0.89 to 1.48)"
    assert [len(read_places(row[2])) for row in (yours, pick, third)] == [1, 1 + len(RATES), 1 + len(noisy)]
    assert read_places(yours[2])[-1] < read_places(third[2])[-1] < read_places(pick[2])[-1]
    assert 'class="reach"' in third[2]
    assert draw_finalists(build_document()) == "", "no other plan took turns"


def test_the_pick_is_drawn_with_the_gain_of_the_sentence_whatever_groups_of_another_search_the_folder_holds():
    """The sentence said 1.32 ×, and the dot beside it 1.17 ×: rows were drawn that the search had not decided by."""
    document = build_document(FASTER)
    others = [row | {"group": row["group"] + 10} for row in build_turns({}, RATES, first_id=50)]
    others += [
        row | {"group": row["group"] + 10} for row in build_turns(document["trials"][1]["plan"], RATES, first_id=60)
    ]
    document["repeats"] = [*document["repeats"], *others]
    _, (_, words, svg) = list_rows(draw_finalists(document))
    assert words.endswith("| 1.32 × (1.24 to 1.41)")
    assert "1.32 × as fast as your settings (1.24 to 1.41)" in describe_verdict(document)
    assert "1.32 × (1.24 to 1.41)" in Page(build_tune_html(document)).cells
    assert len(read_places(svg)) == 1 + 2 * len(RATES)


def test_what_is_saved_is_said_as_a_saving():
    """ "1 min 01 s of this run's 1 min 03 s of training" stood under the verdict."""
    assert "<li>saves 8 min 58 s of this run's 37 min" in build_tune_html(build_document(FASTER)).replace("&#x27;", "'")
    endless = build_tune_html(build_document(FASTER, savings={"before_s": None, "after_s": None}))
    assert "<li>the search took 4 min 00 s: paid back" in endless
    assert "<li></li>" not in build_tune_html(build_document(compare(3.0, -4.0, 11.0)))


def test_two_groups_give_no_interval():
    """ "27 × (0.00 to 10,015,561)" stood on the page."""
    document, plan = build_document(FASTER), {"num_workers": 4}
    raced = build_turns(plan, (18_420.0, 18_200.0), first_id=70)
    document["trials"] = [*document["trials"], build_row("t3", **plan)]
    document["repeats"] = [*document["repeats"], *raced]
    assert list_rows(draw_finalists(document))[2][1].endswith("| 2.00 ×, 2 groups")
    assert "2.00 ×, 2 groups" in Page(build_tune_html(document)).cells


def test_a_learning_rate_goes_with_a_recommended_plan_alone():
    """The page wrote "learning rate 0.1 → 0.14142" under "Keep your settings", and the screen did not."""
    rate = {"learning_rate": {"rule": "sqrt", "from": 0.1, "to": 0.14142}}
    assert "learning rate 0.1 → 0.14142" in build_tune_html(build_document(FASTER, **rate))
    assert "learning rate" not in build_tune_html(build_document(compare(3.0, -4.0, 11.0), **rate))


def test_a_group_in_which_a_plan_failed_counts_for_none():
    document = build_document(FASTER)
    failed = [row | {"status": "error", "samples_per_s": None} if row["id"] == "t10" else row
              for row in document["repeats"]]  # fmt: skip
    _, pick = list_rows(draw_finalists(document | {"repeats": failed}))
    assert len(read_places(pick[2])) == 1 + len(RATES) - 1


def test_groups_of_another_way_than_the_last_are_not_drawn():
    document = build_document(FASTER)
    first = document["repeats"][0]["group"]
    repeats = [row | {"turns": "usual" if row["group"] == first else "pinned"} for row in document["repeats"]]
    _, pick = list_rows(draw_finalists(document | {"repeats": repeats}))
    assert len(read_places(pick[2])) == 1 + len(RATES) - 1


def test_sides_are_named_by_what_was_decided():
    assert name_sides(build_document(FASTER)) == {"t1": "yours", "t2": "pick"}
    assert name_sides(build_document(compare(3.0, -4.0, 11.0))) == {"t1": "yours", "t2": "other"}
    assert name_sides(build_document(compare(-8.0, -9.0, -7.0), is_rival=True)) == {"t1": "yours", "t2": "other"}
    assert name_sides(build_document()) == {"t1": "yours"}


def test_the_change_is_shown_as_lines_of_a_configuration():
    html = build_tune_html(build_document(FASTER, plan={"precision": "bf16"}, numerics=["precision fp32 → bf16"]))
    (diff,) = re.findall(r'<pre class="diff">(.*?)</pre>', html)
    assert re.findall(r"<(del|ins)>(.*?)</", diff)[:2] == [
        ("del", "- data.num_workers: 0"), ("ins", "+ data.num_workers: 2"),
    ]  # fmt: skip
    assert "+ speed.precision: bf16" in diff
    assert "+ speed.fused_optimizer: true" in diff
    assert "numerics: precision fp32 → bf16" in html
    assert "not recommended" not in html
    assert "The change, not recommended" in build_tune_html(build_document(compare(3.0, -4.0, 11.0)))
    assert 'class="diff"' not in build_tune_html(build_document())


def test_the_bars_of_a_step_have_yours_above_the_pick_and_count_a_sample_where_batches_differ():
    yours, pick = list_rows(draw_phases(build_document(FASTER)))
    assert (yours[0], pick[0]) == ("yours t1", "pick t2")
    assert yours[1].endswith(f"{10 * OWN['samples_per_s'] / RATES[0]:.3g} ms a step"), "as long as in turns"
    yours, pick = list_rows(draw_phases(build_document(FASTER, plan={"batch_size": 64})))
    assert yours[1].endswith(f"{1e6 / RATES[0]:.3g} µs a sample")
    assert pick[1].endswith(f"{1e6 / compute_savings(FASTER)['after_samples_per_s']:.3g} µs a sample"), "as in turns"
    gain = compare(3.0, -4.0, 11.0)
    yours, other = list_rows(draw_phases(build_document(gain, plan={"batch_size": 64})))
    assert other[1].endswith(f"{1e6 / compute_savings(gain)['after_samples_per_s']:.3g} µs a sample"), "unproven, too"


def test_each_change_is_drawn_with_what_it_is_worth_the_most_useful_first():
    effects = [
        build_effect("threads", None, 1, compare(-0.4, -1.5, 0.7), is_kept=False),
        build_effect("num_workers", 0, 2, compare(21.0, 15.0, 27.0)),
    ]
    first, second = list_rows(draw_levers(build_document(FASTER, levers=effects)))
    assert first[:2] == ("num_workers: 0 → 2", "kept | +21 % (+15 to +27 %)")
    assert second[:2] == ("threads: – → 1", "taken back | −0.4 % (−2 to +1 %)")
    assert draw_levers(build_document(FASTER)) == ""
    many = build_effect("threads", None, 1, compare(2400.0, 314.0, 14_800.0))
    ((_, words, _),) = list_rows(draw_levers(build_document(FASTER, levers=[many])))
    assert words == "kept | 25 × (4.14 to 149)", "as on the screen"


@pytest.mark.parametrize(
    ("limit_gib", "limits", "axis"),
    [
        (0.9, ["limit 922 MiB", "80 %"], "peak memory, GiB"),
        (64.0, [], "peak memory, GiB; the limit is 64.00 GiB, further right"),
        (None, [], "peak memory, GiB"),
    ],
)
def test_speed_is_drawn_against_memory_with_the_limit_or_where_it_is(limit_gib, limits, axis):
    search = {"memory_limit_gib": limit_gib, "memory_safety_pct": 80.0}
    chart = draw_memory(build_document(FASTER, search=search))
    assert re.findall(r'class="tick end" dx="-6">(.*?)<', chart) == limits
    assert chart.count('class="limit"') == len(limits)
    assert re.findall(r'class="axis mid">(.*?)<', chart) == [axis]
    assert re.findall(r'class="name[^>]*>(.*?)<', chart) == ["yours", "pick"]
    assert "t2: 13,000 ± 2.0 % samples/s, 512 MiB, batch_size 32, num_workers 2" in chart


def test_every_pick_is_marked_among_the_speeds_with_its_name_on_a_line_of_its_own():
    document = build_document(FASTER)
    small, thrifty = build_row("t3", samples_per_s=12_990.0, threads=1), build_row("t4", samples_per_s=12_980.0)
    document["trials"] = [*document["trials"], small, thrifty, build_row("t5")]
    document["picks"] = document["picks"] | {"memory": build_pick(small), "efficiency": build_pick(thrifty)}
    chart = draw_memory(document)
    names = re.findall(r'y="([\d.]+)" class="name[^>]*>(.*?)<', chart)
    assert [name for _, name in names] == ["yours", "pick", "least memory", "most per GiB"]
    assert chart.count('class="ring"') == 4
    lines = sorted(float(line) for line, _ in names)
    assert all(below - above >= 14 for above, below in itertools.pairwise(lines)), "they could not be read"


def test_what_was_predicted_is_drawn_against_what_was_measured():
    document = build_document(FASTER)
    assert draw_predictions(document) == "", "nothing was"
    own, other = document["trials"]
    chart = draw_predictions(document | {"trials": [own, other | {"predicted_samples_per_s": 12_000.0}]})
    assert re.findall(r"<title>(.*?)</title>", chart) == ["t2: 12,000 predicted, 13,000 ± 2.0 % measured"]


@pytest.mark.parametrize(("rates", "is_noisy"), [(RATES, False), ((9_000.0, 12_000.0), True)])
def test_runs_of_one_plan_are_drawn_where_they_differ(rates, is_noisy):
    document = build_document() | {"repeats": build_turns({}, rates, first_id=10)}
    rows = list_rows(draw_runs(document))
    assert bool(rows) == is_noisy
    for label, words, svg in rows:
        assert (label, words) == ("yours t1", " | 9,000 to 12,000 in 2 runs")
        assert len(read_places(svg)) == 3


def test_rows_are_sorted_with_ids_and_yours_marked_and_what_failed_last():
    document = build_document(FASTER)
    failed = build_row("t3", status="error", reason="a <reason>", threads=1)
    html = build_tune_html(document | {"trials": [failed, *document["trials"]]})
    table = html[html.index('<table class="rows">') :]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in re.findall(r"<tr class.*?</tr>", table)]
    assert [row[0] for row in cells] == ["t2 pick", "t1 yours", "t3"]
    assert [row[1] for row in cells] == ["1.32 × (1.24 to 1.41)", "", ""], "in turns, before the single run"
    assert cells[0][2] == "13,000 ± 2.0 %"
    assert cells[2][-1] == "error: a &lt;reason&gt;"
    assert '<tr class="yours">' in table
    assert '<div class="scroll" tabindex="0"' in html, "keys reach every column"


def test_the_verdict_comes_first_and_a_notebook_shows_as_much():
    document = build_document(FASTER)
    page, part = build_tune_html(document), build_tune_summary(document)
    assert Page(page).open == Page(part).open == []
    words = Page(page).text
    verdict = next(n for n, text in enumerate(words) if "1.32 × as fast as your settings" in text)
    first = next(n for n, text in enumerate(words) if "What was measured" in text)
    assert verdict < next(n for n, text in enumerate(words) if "In turns with your settings" in text) < first
    assert part.partition("</style>")[2].removeprefix('<div class="fulltilt">').removesuffix("</div>") in page
    assert "<table" not in part
    styles = re.findall(r"^[^ }@].*{", part.partition("</style>")[0].removeprefix("<style>"), re.M)
    assert styles == [".fulltilt {"], "no rule reaches the rest of the notebook"


def test_one_plan_of_four_picks_is_described_once():
    pick = build_pick(build_row("t2", samples_per_s=13_000.0, num_workers=2), proven=True, gain=FASTER)
    picks = dict.fromkeys(("recommended", "throughput", "efficiency", "memory"), pick) | {"unproven": None}
    html = build_tune_html(
        build_document(FASTER) | {"picks": picks, "savings": compute_savings(FASTER) | {"search_s": 9}}
    )
    assert html.count("the same plan as recommended for training") == 3
    assert html.count("over the settings as they were") == 1


@pytest.mark.parametrize(
    "rows", [[], [OWN | {"status": "error", "reason": "x", "samples_per_s": None, "phases_ms": None}]]
)
def test_a_search_in_which_nothing_ran_has_a_page(rows):
    document = build_document() | {"trials": rows, "repeats": [], "picks": {}, "savings": None, "baseline": None}
    assert Page(build_tune_html(document)).open == []
