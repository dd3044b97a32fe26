"""Draw charts that are as wide as the page: inline SVG whose places across are percentages, so text keeps its size.

No script, no font, no file beside the page; colours come from the page's CSS variables. Every mark carries a
``<title>``, so that a pointer resting on it shows the exact figure.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

HEIGHT = 280  # of a plot, in pixels; titles and ticks stand outside of it
ROW_HEIGHT = 22  # of the drawing in a row of dots or bars
MAX_SERIES = 6  # more lines than colours cannot be told apart
MAX_MARKS = 40  # points of a line; with more the marks hide it
MAX_OVER = 2.0  # times the largest figure: intervals and single runs that reach further are cut there
N_TICKS = 5
NAME_HEIGHT, NAME_REACH = 14, 0.3  # of a name beside a point: in pixels, and of an axis
LABEL_WIDTH = 0.1  # of an axis: figures that are closer stand over each other
EMPTY = '<p class="note">nothing was measured</p>'
COLOURS = tuple(f"var(--c{i})" for i in range(MAX_SERIES))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A point of a plot; one that has a name is ringed, and the name stands beside it."""

    x: float
    y: float
    label: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A row of a dot chart: a figure with its interval, and the single runs it comes from."""

    label: str
    figure: str  # in words
    value: float
    detail: str = ""
    interval: tuple[float, float] | None = None
    runs: Sequence[float] = ()
    marked: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A stacked bar."""

    label: str
    figure: str
    parts: Mapping[str, float]  # name → value, in drawing order


class Axis:
    """Places figures between round ticks."""

    def __init__(self, values: Sequence[float], *, is_log: bool = False, floor: float = -math.inf):
        self._place: Callable[[float], float] = math.log if is_log else float
        compute = compute_log_ticks if is_log else compute_ticks_between
        ticks = self.ticks = compute(max(min(values), floor), max(values))
        is_cut, ticks[0] = ticks[0] < floor, max(ticks[0], floor)
        self._low, self._high = self._place(ticks[0]), self._place(ticks[-1])
        if is_cut and self.share(ticks[1]) < LABEL_WIDTH:
            del ticks[0]

    def share(self, value: float) -> float:
        """Return 0 at the first tick, 1 at the last; a figure beyond them lies at the edge."""
        return min(max((self._place(value) - self._low) / (self._high - self._low), 0.0), 1.0)

    def x(self, value: float) -> str:
        return f"{100 * self.share(value):.2f}%"

    def y(self, value: float) -> str:
        return f"{HEIGHT * (1 - self.share(value)):.1f}"


def build_curve_chart(
    groups: Mapping[str, Sequence[Sequence[Point]]], *, x_title: str, y_title: str, is_log: bool = False
) -> str:
    """Draw several lines a group, in the group's colour, from 0 on the x axis; the y axis spans what was measured.

    Args:
        is_log: A logarithmic y axis, where every figure is above 0.
    """
    points = [point for lines in groups.values() for line in lines for point in line]
    if not points:
        return EMPTY
    x, y = (
        Axis([0.0, *(p.x for p in points)]),
        Axis([p.y for p in points], is_log=is_log and min(p.y for p in points) > 0),
    )
    drawn = ""
    for colour, lines in zip(COLOURS, groups.values(), strict=False):
        drawn += "".join(_line(line, x, y, colour) + _marks(line, x, y, colour) for line in lines)
    return _plot(drawn, x, y, x_title, y_title) + _legend(list(groups))


def build_scatter_chart(
    points: Sequence[Point],
    *,
    x_title: str,
    y_title: str,
    limits: Mapping[str, float] | None = None,
    is_equal: bool = False,
) -> str:
    """Draw points, with vertical limits by name.

    Args:
        is_equal: Both axes are the same, and a line shows where x equals y.
    """
    if not points:
        return EMPTY
    both = [figure for p in points for figure in (p.x, p.y)] if is_equal else []
    x, y = Axis([*both, *(limits or {}).values(), *(p.x for p in points)]), Axis([*both, *(p.y for p in points)])
    under = f'<line x1="0%" y1="{HEIGHT}" x2="100%" y2="0" class="same"/>' if is_equal else ""
    for number, (name, limit) in enumerate((limits or {}).items()):
        under += _rule("limit", x.x(limit)) + _text("tick end", x.x(limit), 12 + 16 * number, name, ' dx="-6"')
    return _plot(under + _marks(points, x, y, COLOURS[0]), x, y, x_title, y_title)


def build_dot_chart(
    dots: Sequence[Dot],
    *,
    x_title: str,
    rule: float | None = None,
    floor: float = -math.inf,
    format_tick: Callable[[float], str] | None = None,
) -> str:
    """Draw figures on one scale, each in a row, with intervals as lines and single runs as dots.

    Args:
        rule: A figure that all are held against, drawn through all rows.
        floor: What no figure can be below: the axis begins there at the lowest.
    """
    if not dots:
        return EMPTY
    figures = [dot.value for dot in dots] + ([] if rule is None else [rule])
    reach = MAX_OVER * max(map(abs, figures))
    others = [min(max(end, -reach), reach) for dot in dots for end in (*(dot.interval or ()), *dot.runs)]
    x = Axis([*figures, *others], floor=floor)
    rows = []
    for dot in dots:
        drawn = "".join(_rule("grid", x.x(tick)) for tick in x.ticks) + (
            "" if rule is None else _rule("zero", x.x(rule))
        )
        if dot.interval:
            low, high = map(x.x, dot.interval)
            drawn += f'<line x1="{low}" x2="{high}" y1="11" y2="11" class="reach"/>'
        drawn += "".join(f'<circle cx="{x.x(run)}" cy="11" r="2.5" class="run"/>' for run in dot.runs)
        title = f"<title>{escape(f'{dot.label}: {dot.figure}')}</title>"
        drawn += f'<circle cx="{x.x(dot.value)}" cy="11" r="5.5" class="dot">{title}</circle>'
        rows.append(_row(dot.label, dot.figure, drawn, detail=dot.detail, marked=dot.marked))
    return _rows("dots", rows, x, x_title, format_tick or _number)


def build_bar_chart(bars: Sequence[Bar], *, x_title: str, colours: Mapping[str, str]) -> str:
    """Draw stacked bars below one another; ``colours`` maps every part to a CSS colour."""
    if not bars:
        return EMPTY
    x = Axis([0.0, *(sum(bar.parts.values()) for bar in bars)])
    rows = []
    for bar in bars:
        drawn, begin = "", 0.0
        for name, value in bar.parts.items():
            title = escape(f"{bar.label}: {name.replace('_', ' ')} {value:.3g}")
            size = f'x="{x.x(begin)}" width="{100 * x.share(value):.2f}%" y="1" height="20"'
            drawn += f'<rect {size} fill="{colours[name]}"><title>{title}</title></rect>'
            begin += value
        rows.append(_row(bar.label, bar.figure, drawn))
    return _rows("bars", rows, x, x_title, _number) + _legend(
        [name.replace("_", " ") for name in colours], list(colours.values())
    )


def _row(label: str, figure: str, drawn: str, *, detail: str = "", marked: bool = False) -> str:
    said = f"<b>{escape(label)}</b> <span>{escape(detail)}</span>"
    kind = "row marked" if marked else "row"
    svg = f'<svg height="{ROW_HEIGHT}" aria-hidden="true">{drawn}</svg>'
    return f'<div class="{kind}"><div>{said}</div><em>{escape(figure)}</em>{svg}</div>'


def _rows(kind: str, rows: Sequence[str], x: Axis, x_title: str, format_tick: Callable[[float], str]) -> str:
    ticks = "".join(_text("tick mid", x.x(tick), 12, format_tick(tick)) for tick in x.ticks)
    ticks += _text("axis mid", "50%", 30, x_title)
    return f'<div class="{kind}">{"".join(rows)}<div class="row"><svg height="36">{ticks}</svg></div></div>'


def _plot(drawn: str, x: Axis, y: Axis, x_title: str, y_title: str) -> str:
    out = [_text("axis", "0", -10, y_title, ' dx="-48"')]
    for tick in y.ticks:
        at = y.y(tick)
        out.append(f'<line x1="0%" x2="100%" y1="{at}" y2="{at}" class="grid"/>')
        out.append(_text("tick end", "0", float(at) + 4, _number(tick), ' dx="-8"'))
    out += [_text("tick mid", x.x(tick), HEIGHT + 18, _number(tick)) for tick in x.ticks]
    out.append(_text("axis mid", "50%", HEIGHT + 36, x_title))
    label = escape(f"{y_title} by {x_title}")
    return f'<div class="plot"><svg height="{HEIGHT}" role="img" aria-label="{label}">{"".join(out)}{drawn}</svg></div>'


def _line(points: Sequence[Point], x: Axis, y: Axis, colour: str) -> str:
    """Draw a line in a square that is stretched to the plot: lines of several points know no percentages."""
    path = " ".join(f"{x.share(p.x):.4f},{1 - y.share(p.y):.4f}" for p in points)
    width = 1.5 if len(points) > MAX_MARKS else 2
    line = f'<polyline points="{path}" stroke="{colour}" stroke-width="{width}"/>'
    return f'<svg viewBox="0 0 1 1" preserveAspectRatio="none" width="100%" height="{HEIGHT}">{line}</svg>'


def _marks(points: Sequence[Point], x: Axis, y: Axis, colour: str) -> str:
    """Draw points; of a dense line invisibly, for the pointer to find the exact figure.

    The name of the first that has one stands on its left, and names of close points on lines of their own.
    """
    fill, out = "transparent" if len(points) > MAX_MARKS else colour, ""
    first, placed = next((p for p in points if p.name), None), list[tuple[float, float]]()
    for p in sorted(points, key=lambda p: bool(p.name)):
        at = f'cx="{x.x(p.x)}" cy="{y.y(p.y)}"'
        out += f'<circle {at} r="4.5" fill="{fill}"><title>{escape(p.label)}</title></circle>'
        if p.name:
            kind, dx = ("name end", -12) if x.share(p.x) > (0.2 if p is first else 0.8) else ("name", 12)
            line, near = float(y.y(p.y)) + 4, [at for share, at in placed if abs(x.share(p.x) - share) < NAME_REACH]
            while any(abs(line - other) < NAME_HEIGHT for other in near):
                line += NAME_HEIGHT if float(y.y(p.y)) < HEIGHT / 2 else -NAME_HEIGHT
            placed.append((x.share(p.x), line))
            out += f'<circle {at} r="9" class="ring"/>' + _text(kind, x.x(p.x), line, p.name, f' dx="{dx}"')
    return out


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


def _rule(kind: str, x: str) -> str:
    return f'<line x1="{x}" x2="{x}" y1="0" y2="100%" class="{kind}"/>'


def _text(kind: str, x: str, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y:.1f}" class="{kind}"{more}>{escape(text)}</text>'


def _legend(names: Sequence[str], colours: Sequence[str] = COLOURS) -> str:
    if len(names) < 2:
        return ""
    pairs = zip(names, colours, strict=False)
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in pairs)
    return f'<p class="legend">{"".join(items)}</p>'


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value / 1e3:g} k" if value >= 1e4 else f"{value:.6g}"
