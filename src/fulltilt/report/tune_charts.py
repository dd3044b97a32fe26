"""Draw what a search found from its JSON document; a figure that cannot be drawn from it is empty."""

import statistics
from collections.abc import Callable, Mapping

from fulltilt.levers import list_changed
from fulltilt.records import format_gib, format_rate
from fulltilt.report.charts import (
    Bar,
    Dot,
    Point,
    build_bar_chart,
    build_curve_chart,
    build_dot_chart,
    build_scatter_chart,
)
from fulltilt.report.gain import MANY, format_gain, say_speedup
from fulltilt.report.summary import Document, describe_plan, name_picks
from fulltilt.report.table import Row, format_throughput, format_value, read_memory_gib
from fulltilt.report.turns import list_finalists, name_sides, read_turns

NOISY = 1.1  # times as fast as another run of the same plan: then the runs are drawn
MAX_LIMIT_SHARE = 3  # of the largest memory: a limit further away would press the points together
MAX_FINALISTS = 8
PICK_NAMES = {
    "recommended": "pick",
    "throughput": "fastest",
    "efficiency": "most per GiB",
    "memory": "least memory",
    "unproven": "other",
}
PHASE_COLOURS = {
    "data_wait": "var(--c1)",
    "h2d": "var(--c4)",
    "forward": "var(--c0)",
    "backward": "var(--c2)",
    "optimizer": "var(--c3)",
    "other": "var(--muted)",
}


def draw_finalists(document: Document) -> str:
    """Draw each plan that took turns with the user's own by how much faster it was."""
    names, base, finalists = name_sides(document), document.get("baseline") or {}, list_finalists(document)
    if not base or not finalists:
        return ""
    dots = [Dot(label=f"yours {base['id']}", figure="1 ×", value=0.0, detail=describe_plan(base["plan"]))]
    finalists.sort(key=lambda row: row["id"] not in names)
    for row in finalists[:MAX_FINALISTS]:
        name, changed = names.get(row["id"], ""), sum(list_changed(base["plan"], row["plan"]), ())
        dots.append(
            Dot(
                label=f"{name} {row['id']}".strip(),
                figure=say_speedup(row["gain"]),
                value=row["gain"]["gain_pct"],
                detail=", ".join(f"{lever} {format_value(row['plan'][lever])}" for lever in changed),
                interval=row["gain"]["ci_pct"],
                runs=row["gains_pct"],
                marked=bool(name),
            )
        )
    return build_dot_chart(dots, x_title="samples/s over your settings", rule=0.0, floor=-100.0, format_tick=format_pct)


def format_pct(pct: float) -> str:
    return "0" if abs(pct) < 1e-9 else f"{'−' if pct < 0 else '+'}{abs(pct):,.6g} %"


def draw_levers(document: Document) -> str:
    """Draw what each change of the fastest plan is worth: the plan against itself without it."""
    effects: list[Row] = list(document.get("levers") or ())
    dots = []
    for effect in sorted(effects, key=lambda effect: -effect["gain"]["gain_pct"]):
        gain, pairs = effect["gain"], zip(effect["names"], effect["before"], effect["after"], strict=True)
        low, high = gain["ci_pct"]
        said = f"{format_gain(gain['gain_pct'])} ({low:+.0f} to {high:+.0f} %)"
        dots.append(
            Dot(
                label=", ".join(f"{name}: {format_value(a)} → {format_value(b)}" for name, a, b in pairs),
                figure=say_speedup(gain) if gain["gain_pct"] >= 100 * (MANY - 1) else said.replace("-", "−"),
                value=gain["gain_pct"],
                detail="kept" if effect["is_kept"] else "taken back",
                interval=(low, high),
                marked=effect["is_kept"],
            )
        )
    return (
        build_dot_chart(dots, x_title="samples/s, with it over without", rule=0.0, floor=-100.0, format_tick=format_pct)
        if dots
        else ""
    )


def draw_phases(document: Document) -> str:
    """Draw where the time of a step goes, the user's above the pick's; of a sample where batches differ.

    The parts are those of each plan's whole run, and together as long as its step in turns: single runs may contradict
    what was compared.
    """
    names, savings = name_sides(document), document.get("savings") or {}
    before, after = savings.get("before_samples_per_s"), savings.get("after_samples_per_s")
    rows = [row for row in document["trials"] if row["id"] in names and row.get("phases_ms")]
    is_same = len({(row["plan"]["batch_size"], row["plan"].get("accumulate")) for row in rows}) < 2
    unit, bars = "ms a step" if is_same else "µs a sample", []
    for row in sorted(rows, key=lambda row: names[row["id"]] != "yours"):
        parts = {name: row["phases_ms"][name] for name in PHASE_COLOURS if row["phases_ms"].get(name) is not None}
        factor = 1.0 if is_same else 1e6 / row["samples_per_s"] / (sum(parts.values()) or 1.0)
        in_turns = before if names[row["id"]] == "yours" else after
        factor *= row["samples_per_s"] / (in_turns or row["samples_per_s"])
        parts = {name: value * factor for name, value in parts.items()}
        bars.append(
            Bar(label=f"{names[row['id']]} {row['id']}", figure=f"{sum(parts.values()):.3g} {unit}", parts=parts)
        )
    shown = {name: colour for name, colour in PHASE_COLOURS.items() if any(name in bar.parts for bar in bars)}
    return (
        build_bar_chart(bars, x_title=f"{unit}; parts as in a whole run, length as in turns", colours=shown)
        if bars
        else ""
    )


def draw_memory(document: Document) -> str:
    """Draw the speed of whole runs against their memory, the picks marked, with the limit where that is near."""
    picks, sides, points = name_picks(document), name_sides(document), []
    for row in document["trials"]:
        memory_gib = read_memory_gib(row)
        if row["status"] == "ok" and memory_gib is not None:
            label = f"{row['id']}: {format_throughput(row)} samples/s, {format_gib(memory_gib)}"
            label += f", {describe_plan(row['plan'])}"
            name = sides.get(row["id"]) or ", ".join(PICK_NAMES[pick] for pick in picks.get(row["id"], ()))
            points.append(Point(x=memory_gib, y=row["samples_per_s"], label=label, name=name))
    if not points:
        return ""
    limit_gib, limits, title = document["search"].get("memory_limit_gib"), {}, "peak memory, GiB"
    if limit_gib and limit_gib > MAX_LIMIT_SHARE * max(point.x for point in points):
        title += f"; the limit is {format_gib(limit_gib)}, further right"
    elif limit_gib:
        safety_pct = document["search"].get("memory_safety_pct") or 100.0
        limits = {f"limit {format_gib(limit_gib)}": limit_gib, f"{safety_pct:g} %": limit_gib * safety_pct / 100}
    return build_scatter_chart(points, x_title=title, y_title="samples/s", limits=limits)


def draw_predictions(document: Document) -> str:
    """Draw what the models predicted of whole runs against what these came to."""
    names, points = name_sides(document), []
    for row in document["trials"]:
        predicted = row.get("predicted_samples_per_s")
        if predicted and row["status"] == "ok":
            label = f"{row['id']}: {format_rate(predicted)} predicted, {format_throughput(row)} measured"
            points.append(Point(x=predicted, y=row["samples_per_s"], label=label, name=names.get(row["id"], "")))
    if not points:
        return ""
    return build_scatter_chart(points, x_title="samples/s predicted", y_title="samples/s measured", is_equal=True)


def draw_runs(document: Document) -> str:
    """Draw the runs of each plan in turns, where the same plan was not always as fast."""
    names, dots = name_sides(document), []
    for row in sorted(document["trials"], key=lambda row: row["id"] not in names):
        rates = list(read_turns(document, row["plan"]).values())
        if len(rates) > 1:
            dots.append(
                Dot(
                    label=f"{names.get(row['id'], '')} {row['id']}".strip(),
                    figure=f"{format_rate(min(rates))} to {format_rate(max(rates))} in {len(rates)} runs",
                    value=statistics.geometric_mean(rates),
                    runs=rates,
                    marked=row["id"] in names,
                )
            )
    is_noisy = any(max(dot.runs) > NOISY * min(dot.runs) for dot in dots)
    return build_dot_chart(dots, x_title="samples/s of each run in turns") if is_noisy else ""


def draw_verification(document: Document) -> str:
    """Draw quality over training time, one line a training, one colour a plan."""
    verification, curves = document["verification"], {}
    for run in verification["runs"]:
        label = f"{run['arm']}, seed {run['seed']}"
        points = [Point(x=x, y=y, label=f"{label}: {y:.4g} after {x:.3g} s") for x, y in run["curve"]]
        curves.setdefault(run["arm"], []).append(points)
    return build_curve_chart(curves, x_title="seconds of training", y_title=f"validation {verification['metric']}")


FIGURES: Mapping[str, Callable[[Document], str]] = {
    "What each change is worth": draw_levers,
    "Where a step's time goes": draw_phases,
    "Speed against memory": draw_memory,
    "Predicted against measured": draw_predictions,
    "Runs of the same plan": draw_runs,
}
"""Title → what draws it, in the order of the page."""
