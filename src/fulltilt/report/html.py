"""Build the page of a search from its JSON document: one file, no script, nothing fetched."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from fulltilt.records import format_bytes, format_gib
from fulltilt.report.charts import MAX_SERIES, Bar, Point, build_bar_chart, build_curve_chart, build_line_chart
from fulltilt.report.outcome import describe_outcome
from fulltilt.report.summary import (
    PICK_TITLES,
    Document,
    count,
    describe_advice,
    describe_hints,
    describe_marks,
    describe_pick,
    describe_plan,
    describe_same_pick,
    describe_search,
    describe_verification,
    name_picks,
    read_recommended,
)
from fulltilt.report.table import (
    SHORT_NAMES,
    Row,
    build_columns,
    describe_busy,
    format_throughput,
    format_value,
    mark_busy,
    read_memory_gib,
    select_levers,
)

MAX_BARS = 24

PHASE_COLOURS = {
    "data_wait": "var(--c1)",
    "h2d": "var(--c4)",
    "forward": "var(--c0)",
    "backward": "var(--c2)",
    "optimizer": "var(--c3)",
    "other": "var(--muted)",
}


def build_tune_html(document: Document) -> str:
    """Build the report page of ``fulltilt tune``."""
    rows = document["trials"]
    machine, workload = document.get("machine") or {}, document.get("workload") or {}
    name = workload.get("name") or "workload"
    sections = [
        f"<h1>{escape(str(name))}</h1>",
        f'<p class="sub">{escape(describe_machine(machine))}<br>{escape(describe_search(document))}</p>',
        build_list("What it comes to", describe_outcome(document)),
        _cards(document),
        build_list("Notes", [*describe_hints(document), *document.get("notes", ())]),
        build_list("What would make it faster still", describe_advice(document, in_full=True)),
        _verification(document),
        "<h2>What was measured</h2>",
        _charts(rows, document),
        f"<h2>All {len(rows)} rows</h2>",
        _table(rows, document),
        _probes(document),
    ]
    return build_page(f"fulltilt tune: {name}", sections)


def build_page(title: str, sections: Sequence[str]) -> str:
    """Build a whole page of sections that are HTML already."""
    style = (resources.files("fulltilt.report") / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def build_list(title: str, lines: Sequence[str]) -> str:
    """Build a titled list; nothing where there are no lines."""
    if not lines:
        return ""
    return f"<h2>{escape(title)}</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def build_figure(title: str, chart: str) -> str:
    """Build a chart, HTML already, under its title."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def build_table(titles: Sequence[str], lines: Sequence[str], *, attributes: str = "") -> str:
    """Build a table that scrolls sideways; its lines are HTML already."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table{attributes}>{body}</table></div>'


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


def _cards(document: Document) -> str:
    cards: list[str] = []
    shown: dict[str, str] = {}
    for key, title in PICK_TITLES.items():
        pick = document["picks"].get(key)
        if not pick:
            continue
        plan, _, *notes = describe_pick(pick, document["trials"])
        if (first := shown.setdefault(pick["id"], key)) != key:
            plan = f"the same plan as {PICK_TITLES[first].lower()}"
            notes = [describe_same_pick(pick, document["picks"][first])]
        rate = escape(mark_busy(format_throughput(pick), pick))
        kind = " main" if key == "recommended" else ""
        cards.append(
            f'<div class="card{kind}"><h3>{title}</h3><p class="big">{rate}</p>'
            f'<p class="note">samples/s</p><p>{escape(plan)}</p>{"".join(map(_note, notes))}</div>'
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _note(said: str | None) -> str:
    return f'<p class="note">{escape(said)}</p>' if said else ""


def _verification(document: Document) -> str:
    """Draw quality over training time, one line a training, one colour a plan."""
    said = describe_verification(document)
    if said is None:
        return ""
    verification = document["verification"]
    curves: dict[str, list[list[Point]]] = {}
    for run in verification["runs"]:
        label = f"{run['arm']}, seed {run['seed']}"
        points = [Point(x=x, y=y, label=f"{label}: {y:.4g} after {x:.3g} s") for x, y in run["curve"]]
        curves.setdefault(run["arm"], []).append(points)
    title = f"validation {verification['metric']}"
    chart = build_curve_chart(curves, x_title="seconds of training", y_title=title)
    figure = build_figure(f"{title.capitalize()} while training", chart)
    return f'<h2>Does it learn as well?</h2><p>{escape(said)}</p><div class="charts">{figure}</div>'


def _probes(document: Document) -> str:
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


def _charts(rows: Sequence[Row], document: Document) -> str:
    measured = [row for row in rows if row["status"] == "ok"]
    recommended = read_recommended(document).get("id")
    figures = []
    if len({row["plan"]["batch_size"] for row in measured}) != 1:  # else all points lie above one another
        memory_limit_gib = (document.get("search") or {}).get("memory_limit_gib")
        series = _group_series(measured)
        is_whole = len(measured) == sum(map(len, series.values()))
        dropped = "" if is_whole else f" (best {MAX_SERIES} combinations)"
        for title, unit, limit in (("Throughput", "samples/s", None), ("Peak memory", "GiB", memory_limit_gib)):
            points = {
                name: [point for row in line if (point := _build_point(row, unit, recommended))]
                for name, line in series.items()
            }
            chart = build_line_chart(points, x_title="batch size", y_title=unit, limit=limit)
            figures.append(build_figure(f"{title} by batch{dropped}", chart))
    figures.append(build_figure("Where a step's time goes", _phase_bars(measured, recommended)))
    return f'<div class="charts">{"".join(figures)}</div>'


def _group_series(measured: Sequence[Row]) -> dict[str, list[Row]]:
    """Make one line per combination of the other levers; the fastest few where there are more than colours."""
    names = [name for name in select_levers(measured) if name != "batch_size"]
    names = [name for name in names if len({repr(row["plan"].get(name)) for row in measured}) > 1]
    groups: dict[str, list[Row]] = {}
    for row in measured:
        label = ", ".join(f"{SHORT_NAMES.get(n, n)} {format_value(row['plan'].get(n))}" for n in names)
        groups.setdefault(label, []).append(row)
    best = sorted(groups, key=lambda label: -max(row["samples_per_s"] or 0 for row in groups[label]))
    return {label: groups[label] for label in best[:MAX_SERIES]}


def _build_point(row: Row, unit: str, recommended: str | None) -> Point | None:
    """Place a row's speed or memory above its batch size; None where its memory was not read."""
    batch, is_recommended = row["plan"]["batch_size"], row["id"] == recommended
    if unit == "samples/s":
        value, said = row["samples_per_s"], f"{format_throughput(row)} samples/s"
        low, high = row.get("samples_per_s_ci95") or (None, None)
    elif (value := read_memory_gib(row)) is None:
        return None
    else:
        low = high = None
        said = format_gib(value) + (f" ({part})" if (part := row.get("memory_peak_part")) else "")
    return Point(x=batch, y=value, low=low, high=high, label=f"batch {batch}: {said}", marked=is_recommended)


def _phase_bars(measured: Sequence[Row], recommended: str | None) -> str:
    rows = [row for row in measured if row.get("phases_ms")]
    bars = []
    for row in sorted(rows, key=lambda row: -(row["samples_per_s"] or 0))[:MAX_BARS]:
        parts = {name: row["phases_ms"][name] for name in PHASE_COLOURS if row["phases_ms"].get(name) is not None}
        label = f"{row['id']} · batch {row['plan']['batch_size']}"
        bars.append(Bar(label=label, parts=parts, marked=row["id"] == recommended))
    shown = {name: colour for name, colour in PHASE_COLOURS.items() if any(name in bar.parts for bar in bars)}
    return build_bar_chart(bars, x_title="ms per step, fastest plan first", colours=shown)


def _table(rows: Sequence[Row], document: Document) -> str:
    picked, columns = name_picks(document), build_columns(rows)
    body = []
    for row in rows:
        notes, is_ok = " · ".join(picked.get(row["id"], ())), row["status"] == "ok"
        cells = [escape(column.cell(row)) for column in columns]
        if notes:
            cells[-1] += f" · {escape(notes)}"
        elif not is_ok and row.get("reason"):
            cells[-1] += f": {escape(row['reason'])}"
        marks = [f' title="{escape(tip)}"' if (tip := column.tip(row)) else "" for column in columns]
        tds = "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, cells, strict=True))
        body.append(f'<tr class="{"pick" if notes else "" if is_ok else "bad"}">{tds}</tr>')
    return _note(describe_marks(document, in_full=True)) + build_table([column.title for column in columns], body)
