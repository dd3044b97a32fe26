"""Draw experiments as lines across their settings and results: what the good ones share is seen at once."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fulltilt.lab.listing import Entry
from fulltilt.report.training_curves import LOG_RATIO

WIDTH, HEIGHT, TOP, BOTTOM, SIDE = 900, 260, 28, 30, 60
GOOD_HUE, BAD_HUE = 150, 10

Axes = Mapping[tuple[str, str], Sequence[Any]]
"""A value an entry, by (point or metrics, name)."""


def list_axes(entries: Sequence[Entry]) -> Axes:
    """List the settings in which entries differ, and their metrics."""
    names = {kind: list(dict.fromkeys(key for each in entries for key in each[kind])) for kind in ("point", "metrics")}
    axes = {(kind, name): [each[kind].get(name) for each in entries] for kind in names for name in names[kind]}
    return {at: values for at, values in axes.items() if (_varies(values) if at[0] == "point" else "/" not in at[1])}


def draw_parallel(entries: Sequence[Entry]) -> str:
    """Draw the entries that have a result; empty with fewer than two, or where nothing varies."""
    done = [entry for entry in entries if entry["metrics"]]
    axes = {at: values for at, values in list_axes(done).items() if _varies(values)}
    if len(done) < 2 or len(axes) < 2:
        return ""
    places = {at: _place(values) for at, values in axes.items()}
    step = (WIDTH - 2 * SIDE) / (len(axes) - 1)
    best = places.get(("metrics", "loss"))
    lines = "".join(
        _draw_line(entry, [places[at][index] for at in axes], step, 1.0 - best[index] if best else 0.5)
        for index, entry in enumerate(done)
    )
    heads = "".join(
        _draw_axis(name, values, SIDE + number * step) for number, ((_, name), values) in enumerate(axes.items())
    )
    said = "Settings and results: a line an experiment" + (", the greener the lower its loss" if best else "")
    return (
        f'<figure class="parallel"><figcaption>{said}</figcaption><div class="scroll" tabindex="0" role="region" '
        f'aria-label="settings and results"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="settings and results of {len(done)} experiments">{heads}{lines}</svg></div></figure>'
    )


def _varies(values: Sequence[Any]) -> bool:
    return len(set(map(str, values))) > 1


def _draw_line(entry: Entry, places: Sequence[float], step: float, goodness: float) -> str:
    points = " ".join(f"{SIDE + n * step:.1f},{_y(place):.1f}" for n, place in enumerate(places))
    hue = BAD_HUE + (GOOD_HUE - BAD_HUE) * goodness
    said = ", ".join(f"{key} {value}" for key, value in {**entry["point"], **entry["metrics"]}.items())
    return (
        f'<polyline points="{points}" fill="none" stroke="hsl({hue:.0f} 60% 45%)" stroke-width="2" '
        f'opacity="0.7"><title>{escape(entry["id"])}: {escape(said)}</title></polyline>'
    )


def _draw_axis(name: str, values: Sequence[Any], x: float) -> str:
    known = [value for value in values if value is not None]
    low, high = (min(known), max(known)) if _is_numeric(known) else (known[0], known[-1])
    title = name.rpartition(".")[2] + (" (log)" if _is_wide(known) else "")
    text = 'text-anchor="middle" font-size="12" fill="currentColor"'
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="currentColor" opacity="0.3"/>'
        f'<text x="{x:.1f}" y="{HEIGHT - 4}" {text}>{escape(title)}</text>'
        f'<text x="{x:.1f}" y="{TOP - 8}" {text}>{escape(_show(high))}</text>'
        f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 13}" {text}>{escape(_show(low))}</text>'
    )


def _place(values: Sequence[Any]) -> list[float]:
    """Place values from 0 to 1: numbers by size, texts in their order, what is missing below."""
    known = [value for value in values if value is not None]
    if not _is_numeric(known):
        order: Mapping[str, int] = {text: n for n, text in enumerate(dict.fromkeys(map(str, known)))}
        return [order.get(str(value), 0) / max(1, len(order) - 1) for value in values]
    scale = math.log if _is_wide(known) else float
    low, high = scale(min(known)), scale(max(known))
    return [0.0 if value is None else (scale(value) - low) / ((high - low) or 1) for value in values]


def _is_wide(values: Sequence[Any]) -> bool:
    """Whether figures span so much that their logarithms are placed."""
    return _is_numeric(values) and min(values) > 0 and max(values) > LOG_RATIO * min(values)


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:24]
