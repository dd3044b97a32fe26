"""A comparison in words and as a table, from its document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulltilt.report.table import format_value

MOST_PCT = 9_900.0  # a factor of 100: larger bounds say nothing by their digits
STYLES = {"better": "green", "worse": "red", "higher": "yellow", "lower": "yellow", "tie": "", "too_noisy": "dim"}
VERDICTS = {"too_noisy": "too noisy to tell"}


def describe_sides(document: Mapping[str, Any]) -> list[str]:
    """``A  runs/tune/digits/tune.json (digits)`` and the like, with what each file says of its own noise."""
    lines = []
    for key in ("a", "b"):
        side = document[key]
        lines.append(f"{key.upper()}  {side['path']} ({document['kind']}: {side['name']})")
        lines += [f"   {note}" for note in side["notes"]]
    return lines


def describe_refusal(document: Mapping[str, Any]) -> str | None:
    """Why no figure of one side can be held against the other's, if that is so."""
    refusal = document["refusal"]
    return None if refusal is None else f"These two cannot be held against each other: {refusal}."


def describe_statistics(document: Mapping[str, Any]) -> str:
    """What the columns A and B hold, and what the intervals are of."""
    rows = document["figures"]
    many = [row for row in rows if max(row["n_a"], row["n_b"]) > 1]
    if not many:
        return "one value on either side"
    units = " or ".join(dict.fromkeys(_put_article(row["unit_of_replication"]) for row in many))
    medians = any("median" in (row["statistic_a"], row["statistic_b"]) for row in many)
    text = f"A and B: geometric means over n repetitions, each {units}"
    text += "; medians where a value is not above 0" if medians else ""
    if all(row["ci_pct"] is None for row in rows):
        return text
    if document["kind"] == "train":
        return f"{text}; intervals, each by itself in 95 %, are of how epochs vary and not of how runs do"
    return f"{text}; intervals hold for all figures together in 95 %"


def describe_shown(document: Mapping[str, Any]) -> str | None:
    """The figures that the searches themselves show, where those here are others: a mean beside a median run."""
    parts: dict[tuple[str, str], list[str]] = {}
    for row in document["figures"]:
        shown = (row["shown_a"], row["shown_b"])
        if None not in shown and any(f"{x:.3g}" != f"{row[side]:.3g}" for x, side in zip(shown, "ab", strict=True)):
            pick, _, figure = row["name"].partition(": ")
            parts.setdefault((figure, " and ".join(map(_format_number, shown))), []).append(pick)
    if not parts:
        return None
    said = "; ".join(f"{figure} {values} ({', '.join(picks)})" for (figure, values), picks in parts.items())
    return (
        f"tune itself shows the median run of a plan, of two the slower: {said}. A and B are, as where tune chooses, "
        "geometric means of a plan's runs side by side"
    )


def describe_differences(document: Mapping[str, Any]) -> list[str]:
    """One line for each thing that differs; a line that says so where nothing does."""
    lines = []
    for section, found in document["differences"].items():
        if found:
            lines.append(f"{section}: {_join(found)}")
    for pick in document["picks"]:
        if pick["same_as"]:
            lines.append(f"{pick['name']}: on both sides the plan of {pick['same_as']}")
        else:
            lines.append(f"{pick['name']}: {_join(pick['levers']) if pick['changed'] else 'the same plan'}")
    return lines or ["nothing that the files name"]


def describe_control(document: Mapping[str, Any]) -> str | None:
    """How plans that ran in both searches compare."""
    control = document["control"]
    if control is None:
        return None
    return (
        f"{control['n_plans']} plans that ran in both: {control['change_pct']:+.1f} % samples/s in B "
        f"({_format_interval(control['ci_pct'])}): {VERDICTS.get(control['verdict'], control['verdict'])}"
    )


def describe_reasons(document: Mapping[str, Any]) -> list[str]:
    """Why single figures have no verdict, each reason once, and which figures stand on one side only."""
    reasons: dict[str, list[str]] = {}
    for row in document["figures"]:
        if row["verdict"] is None and row["reason"] != document["refusal"]:
            reasons.setdefault(row["reason"], []).append(row["name"])
    lines = []
    for reason, names in reasons.items():
        which = "any figure" if len(names) == len(document["figures"]) else _shorten(names)
        lines.append(f"no verdict on {which}: {reason}")
    for key, names in document["only_in"].items():
        if names:
            lines.append(f"only in {key.upper()}: {_shorten(names)}")
    return lines


def build_figures_table(document: Mapping[str, Any]) -> Any:
    """A rich Table: a figure a row."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("figure", "A", "B", "B − A", "interval", "could detect", "n", "verdict"):
        table.add_column(
            title, justify="left" if title in ("figure", "verdict") else "right", no_wrap=title != "figure"
        )
    for row in document["figures"]:
        verdict = row["verdict"]
        cells = [
            row["name"],
            _format_number(row["a"]),
            _format_number(row["b"]),
            "" if row["change_pct"] is None else f"{_format_pct(row['change_pct'])} %",
            "" if row["ci_pct"] is None else _format_interval(row["ci_pct"]),
            "" if row["detectable_pct"] is None else f"{_format_pct(row['detectable_pct']).replace('+', '')} %",
            f"{row['n_a']}, {row['n_b']}",
            "–" if verdict is None else VERDICTS.get(verdict, verdict),
        ]
        table.add_row(*map(Text, cells), style=STYLES.get(verdict or "", "dim"))
    return table


def _put_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _join(differences: list[dict[str, Any]]) -> str:
    return ", ".join(_say_difference(difference) for difference in differences)


def _say_difference(difference: Mapping[str, Any]) -> str:
    return f"{difference['name']} {format_value(difference['a'])} → {format_value(difference['b'])}"


def _shorten(names: list[str], n_shown: int = 4) -> str:
    rest = len(names) - n_shown
    return ", ".join(names[:n_shown]) + (f" and {rest} more" if rest > 0 else "")


def _format_interval(interval: list[float] | tuple[float, float] | None) -> str:
    if interval is None:
        return "no interval"
    low, high = interval
    return f"{_format_pct(low)} to {_format_pct(high)} %"


def _format_pct(value: float) -> str:
    if value > MOST_PCT:
        return f"more than +{MOST_PCT:,.0f}"
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.1f}"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
