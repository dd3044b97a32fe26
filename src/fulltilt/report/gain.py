"""Say and draw how much faster one setting is than another: the same words and bars for every command."""

from collections.abc import Mapping, Sequence
from typing import Any

BAR_WIDTH = 36
MANY = 2.0  # from twice as fast on, a factor says more than a percentage


def say_gain(comparison: Mapping[str, Any], what: str, base: str) -> str:
    """Say in one sentence what a comparison found: ``B is 1.22 × as fast as A (1.16 to 1.28)``."""
    verdict, low_pct, high_pct = comparison["verdict"], *comparison["ci_pct"]
    if verdict == "faster":
        return f"{what} is {say_speedup(comparison, f'as fast as {base}')}"
    if verdict == "slower":
        return f"{what} is {-comparison['gain_pct']:.0f} % slower than {base} ({-high_pct:.0f} to {-low_pct:.0f} %)"
    if verdict == "equal":
        return f"{what} is as fast as {base}, within {max(-low_pct, high_pct):.1f} %"
    return f"not decided whether {what} is faster than {base}: between {_say_side(low_pct)} and {_say_side(high_pct)}"


def say_speedup(gain: Mapping[str, Any], what: str = "") -> str:
    """Say how many times as fast something is, with the interval: ``1.22 × as fast (1.16 to 1.28)``."""
    if gain["ci_pct"] is None:
        return f"{format_factor(1 + gain['gain_pct'] / 100)} × {what}".rstrip() + f", {gain['n_groups']} groups"
    factor, low, high = (format_factor(1 + pct / 100) for pct in (gain["gain_pct"], *gain["ci_pct"]))
    return f"{factor} × {what} ({low} to {high})" if what else f"{factor} × ({low} to {high})"


def format_gain(gain_pct: float) -> str:
    """Format a gain with its sign: ``+22 %``, ``+0.4 %``, ``−3 %``; from twice on as a factor."""
    if 1 + gain_pct / 100 >= MANY:
        return f"{format_factor(1 + gain_pct / 100)} ×"
    size = abs(gain_pct)
    return (
        f"{'−' if gain_pct < 0 else '+'}{size:.0f} %" if size >= 9.95 else f"{'−' if gain_pct < 0 else '+'}{size:.1f} %"
    )


def format_factor(factor: float) -> str:
    """Format how many times as fast something is: ``1.22``, ``48``, ``1,234``."""
    return f"{factor:.2f}" if factor < 10 else f"{factor:,.0f}"


def _say_side(pct: float) -> str:
    if 1 + pct / 100 >= MANY:
        return f"{format_factor(1 + pct / 100)} × as fast"
    return f"{abs(pct):.0f} % {'slower' if pct < 0 else 'faster'}"


def draw_bar(value: float, scale: float, interval: Sequence[float] = (), width: int = BAR_WIDTH) -> str:
    """Draw a figure as a solid bar, and from there on light to the high end of its interval."""
    n_solid, n_all = (round(width * min(max(end, 0.0), scale) / scale) for end in (value, max((value, *interval))))
    return ("█" * n_solid + "░" * (n_all - n_solid)).ljust(width)
