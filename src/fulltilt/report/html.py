"""Build the page of a search from its JSON document: one file, nothing fetched; its script only sorts the table."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from fulltilt.records import format_bytes, format_gib
from fulltilt.report.gain import say_speedup
from fulltilt.report.summary import (
    Document,
    count,
    describe_advice,
    describe_hints,
    describe_marks,
    describe_plan,
    describe_search,
    describe_verification,
    list_picks,
    name_picks,
    read_recommended,
)
from fulltilt.report.table import (
    Column,
    Row,
    build_columns,
    describe_busy,
    format_throughput,
    mark_busy,
    read_memory_gib,
)
from fulltilt.report.tune_charts import FIGURES, draw_finalists, draw_verification
from fulltilt.report.turns import list_finalists, list_settings, name_sides
from fulltilt.report.verdict import (
    describe_epoch,
    describe_learning_rate,
    describe_noise,
    describe_saving,
    describe_verdict,
    is_worth_taking,
    list_next,
)

FIRST_COLUMNS = ("samples/s", "memory GiB")  # of the table: where the screen is narrow, the rest is scrolled to


def build_tune_html(document: Document) -> str:
    """Build the report page of ``fulltilt tune``."""
    rows, name = document["trials"], (document.get("workload") or {}).get("name") or "workload"
    figures = [build_figure(title, chart) for title, draw in FIGURES.items() if (chart := draw(document))]
    sections = [
        f"<h1>{escape(str(name))}</h1>",
        f'<p class="note">{escape(describe_machine(document.get("machine") or {}))}</p>',
        _build_first_part(document),
        _build_verification(document),
        f'<h2>What was measured</h2><div class="charts">{"".join(figures)}</div>' if figures else "",
        f"<h2>All {count(len(rows), 'row')}, the fastest first</h2>",
        _build_rows(rows, document),
        build_fold(
            "Picks and their rules", [f"{title}: {id}, {'; '.join(said)}" for title, id, said in list_picks(document)]
        ),
        build_fold("Notes", [*describe_hints(document), *document.get("notes", ())]),
        build_fold("What would make it faster still", describe_advice(document, in_full=True)),
        build_fold("How the search went", [describe_search(document), *describe_epoch(document)]),
        _build_probes(document),
    ]
    script = f"<script>{_read_part('page.js')}</script>"
    return build_page(f"fulltilt tune: {name}", [*sections, script])


def build_tune_summary(document: Document) -> str:
    """Build the first part of the page, for a notebook."""
    return f'<style>{_read_part("page.css")}</style><div class="fulltilt">{_build_first_part(document)}</div>'


def _build_first_part(document: Document) -> str:
    *run, payback = describe_saving(document) or [""]
    said = [
        *(f"saves {line}" for line in run),
        *filter(None, [payback]),
        *describe_learning_rate(document),
        *describe_noise(document["search"]),
        *(f"next: {line}" for line in list_next(document)),
    ]
    lines = f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in said)}</ul>" if said else ""
    chart = draw_finalists(document)
    figure = (
        build_figure("In turns with your settings: estimate, 98 % interval (99 % of three groups), each group", chart)
        if chart
        else ""
    )
    return f'<p class="verdict">{escape(describe_verdict(document))}</p>{lines}{figure}{_build_diff(document)}'


def _build_diff(document: Document) -> str:
    """Show what the plan that came out ahead has other than the user's, as lines of a configuration."""
    pick = document["picks"].get("unproven") or read_recommended(document)
    own = document.get("user_plan")
    lines = [
        f"<del>- {escape(f'{key}: {before}')}</del><ins>+ {escape(f'{key}: {after}')}</ins>"
        for key, before, after in (list_settings(own, pick.get("plan") or {}) if own else ())
    ]
    if not lines:
        return ""
    changes = pick.get("changes") or {}
    said = "; ".join(f"{kind}: {'; '.join(changes[kind])}" for kind in changes if changes[kind])
    title = "The change" if is_worth_taking(document) else "The change, not recommended"
    return build_figure(title, f'<pre class="diff">{"".join(lines)}</pre>{_note(said)}')


def build_page(title: str, sections: Sequence[str]) -> str:
    """Build a whole page of sections that are HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_read_part('page.css')}</style></head>"
        f'<body class="fulltilt"><main>{"".join(sections)}</main></body></html>\n'
    )


def _read_part(name: str) -> str:
    return (resources.files("fulltilt.report") / name).read_text(encoding="utf-8")


def build_figure(title: str, chart: str) -> str:
    """Build a chart, HTML already, under its title."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def build_table(titles: Sequence[str], lines: Sequence[str], *, kind: str = "plain") -> str:
    """Build a table that scrolls sideways, by keys too; its lines are HTML already."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table"><table class="{kind}">{body}</table></div>'
    )


def build_fold(title: str, lines: Sequence[str]) -> str:
    """Build a list that is folded away; nothing where there are no lines."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<details><summary>{escape(title)}</summary><ul>{items}</ul></details>" if lines else ""


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Describe in one line: processor, usable cores, memory, accelerators, torch."""
    parts = []
    if machine.get("cpu_model"):
        parts.append(f"{machine['cpu_model']}, {machine.get('n_cores_usable', '?')} usable cores")
    if machine.get("memory_total_bytes"):
        parts.append(format_bytes(machine["memory_total_bytes"]))
    parts += [device["name"] for device in machine.get("devices") or ()]
    if torch := (machine.get("packages") or {}).get("torch"):
        parts.append(f"torch {torch}")
    return " · ".join(parts) or "machine unknown"


def _note(said: str | None) -> str:
    return f'<p class="note">{escape(said)}</p>' if said else ""


def _build_verification(document: Document) -> str:
    said = describe_verification(document)
    if said is None:
        return ""
    figure = build_figure("Quality while training", draw_verification(document))
    return f'<h2>Does it learn as well?</h2><p>{escape(said)}</p><div class="charts">{figure}</div>'


def _build_probes(document: Document) -> str:
    """List parts of the step that were run alone: what the search predicted from, never what it picked."""
    probes = document.get("probes") or ()
    if not probes:
        return ""
    lines = "".join(f"<li>{escape(_describe_probe(probe))}</li>" for probe in probes)
    summary = f"{count(len(probes), 'probe')} of parts of the step: what whole runs were chosen by, never picked"
    legend = _note(describe_busy((), probes=probes))
    return f"<details><summary>{escape(summary)} themselves</summary><ul>{lines}</ul>{legend}</details>"


def _describe_probe(probe: Row) -> str:
    is_estimate = probe["kind"] == "memory"
    figure = f"{mark_busy(format_throughput(probe), probe)} samples/s" if probe.get("samples_per_s") else ""
    memory = probe.get("memory_allocated_peak_gib") if is_estimate else read_memory_gib(probe)
    size = "" if memory is None else format_gib(memory) + (" of tensors, estimated" if is_estimate else "")
    end = probe["status"] if probe["status"] == "ok" else f"{probe['status']}: {probe.get('reason')}"
    parts = (f"{probe['id']} {probe['kind']}", describe_plan(probe["plan"]), figure, size, probe.get("why") or "", end)
    return " · ".join(part for part in parts if part)


def _build_rows(rows: Sequence[Row], document: Document) -> str:
    """Build the table: the fastest first, then what did not run, in the order they ran."""
    picked, sides = name_picks(document), name_sides(document)
    gains = {row["id"]: say_speedup(row["gain"]) for row in list_finalists(document)}
    columns = [Column(title="id", cell=lambda row: f"{row['id']} {sides.get(row['id'], '')}".strip())]
    if gains:
        columns.append(Column(title="× yours, in turns", cell=lambda row: gains.get(row["id"], "")))
    columns += sorted(build_columns(rows), key=lambda column: column.title not in FIRST_COLUMNS)
    body = []
    for row in sorted(rows, key=lambda row: -(row.get("samples_per_s") or 0.0)):
        notes, is_ok = " · ".join(picked.get(row["id"], ())), row["status"] == "ok"
        cells = [escape(column.cell(row)) for column in columns]
        if notes:
            cells[-1] += f" · {escape(notes)}"
        elif not is_ok and row.get("reason"):
            cells[-1] += f": {escape(row['reason'])}"
        marks = [f' title="{escape(tip)}"' if (tip := column.tip(row)) else "" for column in columns]
        tds = "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, cells, strict=True))
        body.append(f'<tr class="{sides.get(row["id"], "" if is_ok else "bad")}">{tds}</tr>')
    legend = _note(describe_marks(document, in_full=True))
    return legend + build_table([column.title for column in columns], body, kind="rows")
