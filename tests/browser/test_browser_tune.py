"""The page of a search in a real Chromium: at a desk, on a phone, in the dark, by keyboard and on paper."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.chromium import PROGRAM, start_chromium
from tests.unit.report.report_documents import (
    ADVICE,
    VERIFICATION,
    build_document,
    build_effect,
    build_pick,
    build_row,
    build_turns,
    compare,
)

from fulltilt.report.html import build_tune_html

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]

PHONE, TABLET, DESK = 390, 768, 1280
AUDIT = Path(__file__).with_name("audit.js").read_text()
TITLES = [
    "In turns with your settings",
    "The change",
    "Quality while training",
    "What each change is worth",
    "Where a step's time goes",
    "Speed against memory",
    "Predicted against measured",
    "Runs of the same plan",
]
COLUMNS = (
    "threads",
    "wait_policy",
    "compile",
    "prefetch_factor",
    "persistent_workers",
    "thread_affinity",
    "pin_memory",
)


def build_full_document():
    """A document with everything that a page can show, whose plans vary in more levers than a screen has room for."""
    gain, spread = compare(32.0, 24.0, 41.0), (1.0, 1.3, 0.9, 1.2, 1.1, 1.0)
    values = (1, "passive", "max-autotune", 4, True, True, True)
    rows = [
        build_row(f"t{n}", samples_per_s=9_000.0 + 400 * n, **{name: value})
        | {"predicted_samples_per_s": 9_100.0 + 380 * n, "memory_rss_peak_gib": 0.3 + 0.05 * n}
        for n, (name, value) in enumerate(zip(COLUMNS, values, strict=True), start=3)
    ]
    rows.append(build_row("t20", status="error", reason="RuntimeError: a long reason " * 6, num_workers=8))
    levers = [build_effect("num_workers", 0, 2, gain), build_effect("compile", False, "max-autotune", gain)]
    document = build_document(
        gain,
        plan={"precision": "bf16", "channels_last": True},
        numerics=["precision fp32 → bf16"],
        levers=levers,
        search={"memory_limit_gib": 0.9, "memory_safety_pct": 80.0},
        verification=VERIFICATION,
        advice=ADVICE | {"levers": [each | {"value": True} for each in ADVICE["levers"]]},
        notes=["a note"],
        probes=[build_row("t30") | {"kind": "device"}],
    )
    document["trials"] = [*document["trials"], *rows]
    document["picks"] |= {"memory": build_pick(rows[0]), "efficiency": build_pick(rows[1])}
    document["repeats"] = [
        *document["repeats"],
        *build_turns({"threads": 1}, [9_000 * factor for factor in spread], first_id=60),
    ]
    return document


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    (folder / "report.html").write_text(build_tune_html(build_full_document()), encoding="utf-8")
    with start_chromium(folder / "profile") as browser:
        page = browser.open()
        page.url = (folder / "report.html").as_uri()
        yield page


@pytest.mark.parametrize(("width", "is_dark"), [(DESK, False), (DESK, True), (TABLET, False), (PHONE, True)])
def test_all_parts_fit_and_every_column_is_reached_at_any_width(page, width, is_dark):
    page.show_as(width=width, is_dark=is_dark)
    page.go(page.url)
    page.evaluate(AUDIT)
    shown = page.evaluate("[...document.querySelectorAll('figcaption')].map((each) => each.innerText)")
    assert [each for each in TITLES if not any(title.startswith(each) for title in shown)] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("findFaint()") == []
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == is_dark
    assert page.evaluate("document.querySelectorAll('details[open]').length") == 0
    reach = """(() => {
        const box = document.querySelector(".scroll"), heads = [...box.querySelectorAll("th")], seen = [];
        for (const head of heads) {
            head.scrollIntoView({ inline: "end", block: "nearest" });
            const [at, frame] = [head.getBoundingClientRect(), box.getBoundingClientRect()];
            if (at.left < frame.left - 1 || at.right > frame.right + 1) seen.push(head.innerText);
        }
        return [heads.length, seen];
    })()"""
    n_columns, hidden = page.evaluate(reach)
    assert n_columns > len(COLUMNS) + 8
    assert hidden == []
    assert page.errors == []


def test_the_table_is_sorted_by_keyboard_and_yours_stays_marked(page):
    page.show_as(width=DESK)
    page.go(page.url)
    heads = "[...document.querySelectorAll('table.rows th button')]"
    page.evaluate(f"{heads}.find((each) => each.innerText.includes('memory')).focus()")
    column = page.evaluate("document.activeElement.parentElement.cellIndex")
    read = f"[...document.querySelectorAll('table.rows tbody tr')].map((row) => row.cells[{column}].innerText)"
    for sign in (-1, 1):
        page.press("Enter")
        figures = [float(text) for text in page.evaluate(read) if text]
        assert figures == sorted(figures, reverse=sign < 0)
        assert len(figures) > 5
    assert page.evaluate("document.querySelector('tr.yours').cells[0].innerText").strip() == "t1 yours"


def test_on_paper_nothing_is_folded_or_cut(page):
    page.show_as(width=1000)
    page.go(page.url)
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert page.evaluate("[...document.querySelectorAll('details li')].every((each) => each.checkVisibility())")
        assert page.evaluate("[...document.querySelectorAll('details li')].every((each) => each.offsetHeight > 0)")
        assert page.evaluate("document.querySelector('.scroll').scrollWidth") <= 1000
    finally:
        page.call("Emulation.setEmulatedMedia", media="")
