"""What a search found, in words: the same lines for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.report.table import format_throughput, format_value, read_memory_gib

Document = Mapping[str, Any]  # the JSON contract of `fulltilt tune`

PICK_TITLES = {
    "recommended": "Recommended for training",
    "throughput": "Highest throughput",
    "efficiency": "Best efficiency (samples/s per GiB)",
}


def describe_plan(plan: Mapping[str, Any], *, base: Mapping[str, Any] | None = None) -> str:
    """``batch_size 128, num_workers 2, precision bf16``: what differs from PyTorch's defaults, and from ``base``."""
    parts = []
    for name, lever in load_catalogue().items():
        value = plan.get(name)
        asked_for = name in ("batch_size", "num_workers") or value != lever.default
        if asked_for or (base is not None and base.get(name) != value):
            parts.append(f"{name} {format_value(value)}")
    return ", ".join(sorted(parts, key=lambda part: not part.startswith("batch_size")))


def describe_pick(pick: Mapping[str, Any]) -> list[str]:
    """The lines under a pick's title."""
    lines = [describe_plan(pick["plan"]), f"{format_throughput(pick)} samples/s"]
    memory = read_memory_gib(pick)
    if memory:
        lines.append(f"{memory:.2f} GiB; {pick['samples_per_s'] / memory:,.0f} samples/s per GiB")
    if pick.get("gpu_utilization_pct") is not None:
        lines.append(f"GPU busy {pick['gpu_utilization_pct']:.0f} % of the time")
    lines.append(f"rule: {pick['rule']}")
    if pick.get("tied_with"):
        lines.append(f"tied with: {', '.join(pick['tied_with'])}")
    changes = pick.get("changes") or {}
    for kind in ("recipe", "numerics"):
        if changes.get(kind):
            said = changes[kind] if isinstance(changes[kind], str) else "; ".join(map(str, changes[kind]))
            lines.append(f"changes the {kind}: {said}")
    return [*lines, *(f"note: {note}" for note in pick.get("notes") or ())]


def describe_search(document: Document) -> str:
    search = document["search"]
    parts = [
        f"{search['n_trials']} trials of a grid of {search['grid_size']}",
        f"{search['n_out_of_memory']} out of memory",
        f"{format_duration(search['seconds'])}",
    ]
    return f"{search['strategy']}: " + ", ".join(parts)


def describe_gain(document: Document) -> str | None:
    """The recommended plan beside the user's own, where both were measured."""
    pick, baseline = document["picks"].get("recommended"), document.get("baseline")
    if not pick or not baseline or not baseline.get("samples_per_s") or pick.get("id") == baseline.get("id"):
        return None
    ratio = pick["samples_per_s"] / baseline["samples_per_s"]
    noise_pct = document["search"].get("noise_pct") or 0.0
    if 100 * abs(ratio - 1) <= noise_pct:
        return f"no difference from the settings as they were: runs of one plan lay {noise_pct:.0f} % apart"
    return (
        f"{ratio:.2f} × the throughput of the settings as they were "
        f"({format_throughput(baseline)} samples/s with {describe_plan(baseline['plan'])})"
    )


def describe_epoch(document: Document) -> str | None:
    epoch = document.get("epoch_seconds") or {}
    if not epoch.get("estimate"):
        return None
    text = f"one epoch takes about {format_duration(epoch['estimate'])}"
    if not epoch.get("ci95"):
        return text
    low, high = map(format_duration, epoch["ci95"])
    return f"{text} ({low} to {high})"


def describe_learning_rate(document: Document) -> str | None:
    rate = document.get("learning_rate") or {}
    if rate.get("from") is None or rate.get("to") is None or rate["from"] == rate["to"]:
        return None
    return f"learning rate {rate['from']:g} → {rate['to']:g} by the {rate['rule']} rule: the effective batch changed"


def format_duration(seconds: float) -> str:
    """``0.42 s``, ``17 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
