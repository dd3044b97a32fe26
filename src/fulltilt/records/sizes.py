"""Format sizes so that none is rounded to nothing."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_bytes(n_bytes: float) -> str:
    """Format in the largest unit of which it is, rounded, one at least: ``980 bytes``, ``15.3 KiB``, ``18.83 GiB``.

    Three figures below a GiB; two decimals from there on, as torch has them.
    """
    if round(abs(n_bytes)) < 1024:
        return f"{n_bytes:.0f} {'byte' if round(n_bytes) == 1 else 'bytes'}"
    size, unit = n_bytes / 1024, _UNITS[0]
    for unit in _UNITS:
        if round(abs(size)) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    if unit in ("GiB", "TiB"):
        return f"{size:,.2f} {unit}"
    return f"{size:,.0f} {unit}" if abs(size) >= 100 else f"{size:.3g} {unit}"


def format_gib(gib: float) -> str:
    """Format a figure in GiB as ``format_bytes`` does."""
    return format_bytes(gib * 2**30)
