"""Draw charts as inline SVG: no script, no font, no file beside the page. Colours come from the page's CSS variables.

Every mark carries a ``<title>``, so that a pointer resting on it shows the exact figure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Scale = Callable[[float], float]  # a figure → its place in the drawing

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 68, 16, 12, 44
MAX_LIMIT_SHARE = 3
MAX_SERIES = 6  # more lines than colours cannot be told apart
MAX_MARKS = 40  # points of a line; with more the marks hide it
BAR_PITCH = 24
N_TICKS = 5
EMPTY = '<p class="note">nothing was measured</p>'
_COLOURS = tuple(f"var(--c{i})" for i in range(MAX_SERIES))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A point of a line, with its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""
    marked: bool = False  # the recommended one


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A stacked bar."""

    label: str
    parts: Mapping[str, float]  # name → value, in drawing order
    marked: bool = False


def build_line_chart(
    series: Mapping[str, Sequence[Point]], *, x_title: str, y_title: str, limit: float | None = None
) -> str:
    """Draw lines over a base-2 logarithmic x axis, with intervals as whiskers and a limit where that is near."""
    points = [point for line in series.values() for point in line]
    if not points:
        return EMPTY
    top = max(point.y if point.high is None else point.high for point in points)
    if limit is not None and limit > MAX_LIMIT_SHARE * top:
        limit = None  # so far away that drawing it would press the lines flat
    ticks = compute_ticks(max(top, limit or 0.0))
    scale_y = _scale_y(0.0, ticks[-1])
    xs = sorted({point.x for point in points})
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    inner, is_one = WIDTH - LEFT - RIGHT - 32, low == high

    def scale_x(x: float) -> float:
        return (LEFT + WIDTH - RIGHT) / 2 if is_one else LEFT + 16 + (math.log2(x) - low) / (high - low) * inner

    out = [_grid(ticks, scale_y, y_title), _x_axis([(scale_x(x), f"{x:g}") for x in xs], x_title)]
    if limit is not None:
        y = scale_y(limit)
        out += [_rule("limit", LEFT, WIDTH - RIGHT, y, y), _text("tick end", WIDTH - RIGHT, y - 5, "limit")]
    for colour, line in zip(_COLOURS, series.values(), strict=False):
        out.append(_line(sorted(line, key=lambda p: p.x), scale_x, scale_y, colour))
    return _svg(out, f"{y_title} by {x_title}") + _legend(list(series))


def build_curve_chart(
    groups: Mapping[str, Sequence[Sequence[Point]]], *, x_title: str, y_title: str, is_log: bool = False
) -> str:
    """Draw several lines a group, in the group's colour, over a linear x axis; the y axis spans what was measured.

    Args:
        is_log: A logarithmic y axis, where every figure is above 0.
    """
    points = [point for lines in groups.values() for line in lines for point in line]
    if not points:
        return EMPTY
    x_max = max(point.x for point in points) or 1.0
    x_ticks = [tick for tick in compute_ticks(x_max) if tick <= x_max * (1 + 1e-9)]
    low, high = min(point.y for point in points), max(point.y for point in points)
    is_log = is_log and low > 0
    y_ticks = compute_log_ticks(low, high) if is_log else compute_ticks_between(low, high)
    scale_y = _scale_y(y_ticks[0], y_ticks[-1], is_log=is_log)
    inner = WIDTH - LEFT - RIGHT - 16

    def scale_x(x: float) -> float:
        return LEFT + x / x_max * inner

    out = [_grid(y_ticks, scale_y, y_title), _x_axis([(scale_x(x), _number(x)) for x in x_ticks], x_title)]
    for colour, lines in zip(_COLOURS, groups.values(), strict=False):
        out += [_line(line, scale_x, scale_y, colour) for line in lines]
    return _svg(out, f"{y_title} by {x_title}") + _legend(list(groups))


def build_bar_chart(bars: Sequence[Bar], *, x_title: str, colours: Mapping[str, str]) -> str:
    """Draw horizontal stacked bars, one a row of the table; ``colours`` maps every part to a CSS colour."""
    if not bars:
        return EMPTY
    ticks = compute_ticks(max(sum(bar.parts.values()) for bar in bars))
    left = 16 + max(7 * max(len(bar.label) for bar in bars), 40)
    height = TOP + BAR_PITCH * len(bars) + BOTTOM
    scale = (WIDTH - left - RIGHT) / ticks[-1]
    out = []
    for tick in ticks:
        x = left + tick * scale
        out.append(_rule("grid", x, x, TOP, height - BOTTOM))
        out.append(_text("tick mid", x, height - BOTTOM + 16, _number(tick)))
    for row, bar in enumerate(bars):
        y, x = TOP + BAR_PITCH * row + 4, float(left)
        out.append(_text("tick end strong" if bar.marked else "tick end", left - 8, y + 12, bar.label))
        for name, value in bar.parts.items():
            title = escape(f"{bar.label}: {name} {value:.3g} ms")
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(value * scale, 0):.1f}" height="16" '
                f'fill="{colours[name]}"><title>{title}</title></rect>'
            )
            x += value * scale
    out.append(_text("axis mid", (left + WIDTH - RIGHT) / 2, height - 8, x_title))
    return _svg(out, x_title, height=height) + _legend(list(colours), list(colours.values()))


SMALLEST = 1e-300  # below it a fifth of a figure may be 0


def compute_ticks(top: float) -> list[float]:
    """Compute round figures from 0 to at least ``top``: steps of 1, 2 or 5 times a power of ten."""
    if top <= SMALLEST or not math.isfinite(top):
        return [0.0, 1.0]
    raw = top / N_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def compute_ticks_between(low: float, high: float) -> list[float]:
    """Compute round figures from at most ``low`` to at least ``high``."""
    if not high - low > max(SMALLEST, 1e-12 * abs(low)):
        room = 0.05 * (abs(low) if abs(low) > 100 * SMALLEST else 1.0)
        low, high = low - room, high + room
    step = compute_ticks(high - low)[1]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def compute_log_ticks(low: float, high: float) -> list[float]:
    """Compute round figures around ``low`` and ``high``, both above 0: the wider the span, the fewer of each power."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(max(high, low)) - 1e-9)
    factors = (1, 2, 5) if last - first <= 3 else (1, 3) if last - first <= 5 else (1,)
    ticks = [factor * 10.0**power for power in range(first, max(last, first + 1) + 1) for factor in factors]
    begin = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    end = min((index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9)), default=len(ticks) - 1)
    return ticks[begin : max(end, begin + 1) + 1]


def _line(points: Sequence[Point], scale_x: Scale, scale_y: Scale, colour: str) -> str:
    path = " ".join(f"{scale_x(p.x):.1f},{scale_y(p.y):.1f}" for p in points)
    is_dense = len(points) > MAX_MARKS  # then a mark is only where the pointer finds the exact figure
    width, fill = (1.5, "transparent") if is_dense else (2, colour)
    out = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>']
    for p in points:
        x, y = scale_x(p.x), scale_y(p.y)
        if p.low is not None and p.high is not None:
            ends = f'y1="{scale_y(p.low):.1f}" y2="{scale_y(p.high):.1f}"'
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{colour}" stroke-width="1.5" opacity=".6"/>')
        ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" class="ring"/>' if p.marked else ""
        title = f"<title>{escape(p.label)}</title>"
        out.append(f'{ring}<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}">{title}</circle>')
    return "".join(out)


def _scale_y(bottom: float, top: float, *, is_log: bool = False) -> Scale:
    place: Scale = math.log if is_log else float
    low, high = place(bottom), place(top)
    return lambda value: HEIGHT - BOTTOM - (place(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _grid(ticks: Sequence[float], scale_y: Scale, title: str) -> str:
    out = []
    for tick in ticks:
        y = scale_y(tick)
        out += [_rule("grid", LEFT, WIDTH - RIGHT, y, y), _text("tick end", LEFT - 8, y + 4, _number(tick))]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return "".join(out) + _text("axis mid", 14, middle, title, f' transform="rotate(-90 14 {middle:.0f})"')


def _x_axis(ticks: Sequence[tuple[float, str]], title: str) -> str:
    out, last = [], -math.inf
    for x, text in ticks:
        if x - last > 8 * len(text) + 6:  # labels that would touch are left out
            out.append(_text("tick mid", x, HEIGHT - BOTTOM + 18, text))
            last = x
    return "".join(out) + _text("axis mid", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, title)


def _rule(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _text(kind: str, x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{escape(text)}</text>'


def _legend(names: Sequence[str], colours: Sequence[str] = _COLOURS) -> str:
    if len(names) < 2:
        return ""
    pairs = zip(names, colours, strict=False)
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in pairs)
    return f'<p class="legend">{"".join(items)}</p>'


def _svg(parts: Sequence[str], label: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value / 1e3:g} k" if value >= 1e4 else f"{value:.6g}"
