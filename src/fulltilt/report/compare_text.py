"""Say a comparison in words and as a table, from its document."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fulltilt.report.summary import count
from fulltilt.report.table import format_value

Document = Mapping[str, Any]

MOST_PCT = 9_900.0  # a factor of 100: larger bounds say nothing by their digits
STYLES = {"better": "green", "worse": "red", "higher": "yellow", "lower": "yellow", "tie": "", "too_noisy": "dim"}
VERDICTS = {"too_noisy": "too noisy to tell", None: "–"}


def describe_result(document: Document) -> str:
    """Say in one sentence how B came out against A, or why that cannot be said."""
    if document["refusal"]:
        return f"These two cannot be held against each other: {document['refusal']}."
    rows = document["figures"]
    verdicts = Counter(VERDICTS.get(row["verdict"], row["verdict"]) for row in rows if row["verdict"])
    said = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()) or "none has a verdict"
    changed = [f"{row['name']} {_format_pct(row['change_pct'])} %" for row in rows if row["change_pct"] is not None]
    return f"B against A, of {count(len(rows), 'figure')}: {said}{'; ' if changed else ''}{', '.join(changed[:2])}."


def describe_sides(document: Document) -> list[str]:
    """Name both files, ``A  runs/tune/digits/tune.json (tune: digits)``, with what each says of its own noise."""
    lines = []
    for key in ("a", "b"):
        side = document[key]
        lines.append(f"{key.upper()}  {side['path']} ({document['kind']}: {side['name']})")
        lines += [f"   {note}" for note in side["notes"]]
    return lines


def describe_statistics(document: Document) -> str:
    """Say what the columns A and B hold, and what the intervals are of."""
    rows = document["figures"]
    many = [row for row in rows if max(row["n_a"], row["n_b"]) > 1]
    if not many:
        return "one value on either side"
    units = dict.fromkeys(row["unit_of_replication"] for row in many)
    each = " or ".join(f"{'an' if unit[0] in 'aeiou' else 'a'} {unit}" for unit in units)
    has_medians = any("median" in (row["statistic_a"], row["statistic_b"]) for row in many)
    text = f"A and B: geometric means over n repetitions, each {each}"
    text += "; medians where a value is not above 0" if has_medians else ""
    if all(row["ci_pct"] is None for row in rows):
        return text
    if document["kind"] == "train":
        return f"{text}; intervals, each by itself in 95 %, are of how epochs vary and not of how runs do"
    return f"{text}; intervals hold for all figures together in 95 %"


def describe_differences(document: Document) -> list[str]:
    """Give one line for each thing that differs, or one that says that nothing does."""
    lines = [f"{section}: {_join(found)}" for section, found in document["differences"].items() if found]
    for pick in document["picks"]:
        same = f"on both sides the plan of {pick['same_as']}" if pick["same_as"] else "the same plan"
        lines.append(f"{pick['name']}: {same if pick['same_as'] else _join(pick['levers']) or same}")
    return lines or ["nothing that the files name"]


def describe_remarks(document: Document) -> list[str]:
    """Say what a reader of the figures must know: what the search shows, common plans, batches, missing verdicts."""
    return [
        *_describe_shown(document["figures"]),
        *_describe_control(document["control"]),
        *document["notes"],
        *_describe_reasons(document),
    ]


def _describe_shown(figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Name the figures that the searches themselves show where those here are others: turns beside one run."""
    parts: dict[tuple[str, str], list[str]] = {}
    for row in figures:
        shown = (row["shown_a"], row["shown_b"])
        if None not in shown and any(f"{x:.3g}" != f"{row[side]:.3g}" for x, side in zip(shown, "ab", strict=True)):
            pick, _, figure = row["name"].partition(": ")
            parts.setdefault((figure, " and ".join(map(_format_number, shown))), []).append(pick)
    if parts:
        said = "; ".join(f"{figure} {values} ({', '.join(picks)})" for (figure, values), picks in parts.items())
        yield (
            f"the tables of tune show a plan's whole run: {said}. A and B are geometric means of its turns, by which "
            "tune decides"
        )


def _describe_control(control: Mapping[str, Any] | None) -> Iterator[str]:
    if control is not None:
        interval = _format_interval(control["ci_pct"]) or "no interval"
        yield (
            f"{control['n_plans']} plans that ran in both: {control['change_pct']:+.1f} % samples/s in B "
            f"({interval}): {VERDICTS.get(control['verdict'], control['verdict'])}"
        )


def _describe_reasons(document: Document) -> Iterator[str]:
    """Say why single figures have no verdict, each reason once, and which figures stand on one side only."""
    reasons: dict[str, list[str]] = {}
    for row in document["figures"]:
        if row["verdict"] is None and row["reason"] != document["refusal"]:
            reasons.setdefault(row["reason"], []).append(row["name"])
    for reason, names in reasons.items():
        which = "any figure" if len(names) == len(document["figures"]) else _shorten(names)
        yield f"no verdict on {which}: {reason}"
    for key, names in document["only_in"].items():
        if names:
            yield f"only in {key.upper()}: {_shorten(names)}"


def build_figures_table(document: Document, *, n_rows: int | None = None) -> Any:
    """Build a rich Table with a figure a row; with ``n_rows`` only what a screen holds."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = ["figure", "A", "B", "B − A", "interval", "n", "verdict", *(["could detect"] if n_rows is None else [])]
    for title in titles:
        is_text = title in ("figure", "verdict")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=title != "figure")
    for row in document["figures"][:n_rows]:
        verdict, detectable_pct = row["verdict"], row["detectable_pct"]
        cells = [
            row["name"],
            _format_number(row["a"]),
            _format_number(row["b"]),
            "" if row["change_pct"] is None else f"{_format_pct(row['change_pct'])} %",
            _format_interval(row["ci_pct"]),
            f"{row['n_a']}, {row['n_b']}",
            VERDICTS.get(verdict, verdict),
            "" if detectable_pct is None else f"{_format_pct(detectable_pct).replace('+', '')} %",
        ]
        table.add_row(*map(Text, cells[: len(titles)]), style=STYLES.get(verdict or "", "dim"))
    if n_rows is not None and (n_more := len(document["figures"]) - n_rows) > 0:
        table.add_row(f"{count(n_more, 'more figure')}: --verbose")
    return table


def _join(differences: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{each['name']} {format_value(each['a'])} → {format_value(each['b'])}" for each in differences)


def _shorten(names: Sequence[str], n_shown: int = 4) -> str:
    rest = len(names) - n_shown
    return ", ".join(names[:n_shown]) + (f" and {rest} more" if rest > 0 else "")


def _format_interval(interval: Sequence[float] | None) -> str:
    return f"{_format_pct(interval[0])} to {_format_pct(interval[1])} %" if interval else ""


def _format_pct(value: float) -> str:
    if value > MOST_PCT:
        return f"more than +{MOST_PCT:,.0f}"
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.1f}"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
