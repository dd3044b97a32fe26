"""Say what a search found: the same lines for the terminal and for the page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records import format_gib, format_rate
from fulltilt.report.gain import format_gain
from fulltilt.report.table import (
    BUSY_MARK,
    describe_busy,
    format_throughput,
    format_value,
    is_busy,
    mark_busy,
    read_memory_gib,
)

Document = Mapping[str, Any]  # the JSON contract of `fulltilt tune`

PICK_TITLES = {
    "recommended": "Recommended for training",
    "throughput": "Highest throughput",
    "efficiency": "Best efficiency (samples/s per GiB)",
    "memory": "Least memory at an acceptable speed",
    "unproven": "Best other plan, not recommended",
}
MAX_TIES = 5  # that are named; the document has them all
SAID_IN_SHORT = ("not in the space", "failed")  # of the levers: not what the search had before it and passed over


def read_recommended(document: Document) -> Mapping[str, Any]:
    """Read the recommended pick; empty where there is none."""
    return document["picks"].get("recommended") or {}


def name_picks(document: Document) -> dict[str, list[str]]:
    """Map the id of each picked row to the picks it is."""
    names: dict[str, list[str]] = {}
    for key in PICK_TITLES:
        if pick := document["picks"].get(key):
            names.setdefault(pick["id"], []).append(key)
    return names


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Name what differs from PyTorch's defaults: ``batch_size 128, num_workers 2, precision bf16``."""
    parts = [
        f"{name} {format_value(plan.get(name))}"
        for name, lever in load_catalogue().items()
        if name in ("batch_size", "num_workers") or plan.get(name) != lever.default
    ]
    return ", ".join(sorted(parts, key=lambda part: not part.startswith("batch_size")))


def describe_pick(pick: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the lines under a pick's title.

    Args:
        rows: Of the table; those that tie are told by what their plans have other than the pick.
    """
    lines = [describe_plan(pick["plan"]), f"{mark_busy(format_throughput(pick), pick)} samples/s"]
    if memory := read_memory_gib(pick):
        lines.append(f"{format_gib(memory)}; {format_rate(pick['samples_per_s'] / memory)} samples/s per GiB")
    if pick.get("gpu_utilization_pct") is not None:
        lines.append(f"GPU busy {pick['gpu_utilization_pct']:.0f} % of the time")
    if gain := pick.get("gain"):
        low, high = gain["ci_pct"]
        lines.append(
            f"{format_gain(gain['gain_pct'])} samples/s over the settings as they were ({low:+.1f} to {high:+.1f} %, "
            f"{count(gain['n_groups'], 'group')} in turns): {gain['verdict']}"
        )
    lines.append(f"rule: {pick['rule']}")
    if pick.get("tied_with"):
        lines.append(f"tied with: {_describe_ties(pick, rows)}")
    changes = pick.get("changes") or {}
    lines += [f"changes the {kind}: {'; '.join(changes[kind])}" for kind in changes if changes[kind]]
    return lines + [f"note: {note}" for note in pick.get("notes") or ()]


def list_picks(document: Document) -> Iterator[tuple[str, str, list[str]]]:
    """List title, row and lines of each pick; of one whose plan was listed before only what differs."""
    shown: dict[str, str] = {}
    for name, title in PICK_TITLES.items():
        if pick := document["picks"].get(name):
            first, lines = shown.setdefault(pick["id"], name), describe_pick(pick, document["trials"])
            if first != name:
                same = describe_same_pick(pick, document["picks"][first], document["trials"])
                lines = [f"the same plan as {PICK_TITLES[first].lower()}; {same}"]
            yield title, pick["id"], lines


def describe_same_pick(pick: Mapping[str, Any], shown: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Give the rule of a pick whose plan was ``shown`` already, in short, and its ties where they are others."""
    rule, tied = pick["rule"].partition("; ")[0], pick.get("tied_with") or ()
    if set(tied) == set(shown.get("tied_with") or ()):
        return f"rule: {rule}"
    return f"rule: {rule}; by it tied with: {_describe_ties(pick, rows)}"


def _describe_ties(pick: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Name plans that tie by what each has other than the pick: ``batch_size 64, compile yes; threads 1``."""
    plans, tied = {row["id"]: row["plan"] for row in rows}, pick.get("tied_with") or ()
    names = [
        ", ".join(
            f"{name} {format_value(value)}" for name, value in plans[id].items() if value != pick["plan"].get(name)
        )
        for id in tied
    ]
    more = [f"and {count(len(names) - MAX_TIES, 'other')}"] if len(names) > MAX_TIES else []
    return "; ".join([*names[:MAX_TIES], *more]) or "none"


def describe_marks(document: Document, *, in_full: bool = False) -> str | None:
    """Explain the mark of a busy machine; None where no figure has it.

    The probes that advice rests on are counted apart from the rows of the table.

    Args:
        in_full: The advice is shown so.
    """
    advised = {id for part in _list_advice(document, in_full=in_full) for id in part.get("busy_ids", ())}
    probes = [probe for probe in document.get("probes") or () if probe["id"] in advised]
    return describe_busy(document["trials"], probes=probes)


def describe_search(document: Document) -> str:
    """Say how many plans, runs and probes the search took, and how long."""
    search = document["search"]
    n_skipped, n_outside = search.get("n_skipped") or 0, search.get("n_off_grid") or 0
    n_estimates = sum(row["kind"] == "memory" for row in document.get("probes", ()))
    outside = f" and {n_outside} outside it" if n_outside else ""
    ran = count(search["n_trials"] - n_skipped - n_outside, "plan")
    parts = [f"{ran} run of a grid of {search['grid_size']}{outside}"]
    parts += [f"{n_skipped} skipped"] if n_skipped else []
    parts += [f"{count(search['n_groups'], 'group')} in turns"] if search.get("n_groups") else []
    parts += [count(search["n_probes"], "probe")] if search.get("n_probes") else []
    parts += [f"{count(n_estimates, 'estimate')} of memory"] if n_estimates else []
    parts += [f"{search['n_out_of_memory']} out of memory", format_duration(search["seconds"])]
    if search.get("earlier_s"):
        parts[-1] += f" in this run, {format_duration(search['earlier_s'])} in trials of earlier ones in this folder"
    return f"{search['strategy']}: " + ", ".join(parts)


def describe_hints(document: Document) -> list[str]:
    """List the hints, without one that says once more what the mark at the recommended plan's figures says."""
    pick = read_recommended(document)
    is_marked = bool(pick) and is_busy(pick) and (pick.get("steal_pct") or 0.0) < 1
    hints = document.get("hints") or ()
    return [hint["text"] for hint in hints if not (is_marked and hint["rule"] == "contention")]


def describe_advice(document: Document, *, in_full: bool = False) -> list[str]:
    """Say what would make the recommended plan faster; of levers those the search could not try, or all in full."""
    parts = _list_advice(document, in_full=in_full)
    return [f"{part['text']} {BUSY_MARK}" if part.get("busy_ids") else part["text"] for part in parts]


def _list_advice(document: Document, *, in_full: bool) -> list[Mapping[str, Any]]:
    """List the parts that are shown, in their order; one that is not known says why."""
    advice, reasons = document.get("advice"), document.get("null_reasons") or {}
    if not advice:
        return []
    parts: list[Mapping[str, Any]] = []
    for part, name in (("bound", "what bounds the step"), ("roof", "MFU and roof")):
        if advice[part]:
            parts.append(advice[part])
        elif f"advice.{part}" in reasons:
            parts.append({"text": f"{name}: not known, {reasons[f'advice.{part}']}"})
        if part == "bound":
            parts += advice["ceilings"]
    return parts + [lever for lever in advice["levers"] if in_full or lever["state"] in SAID_IN_SHORT]


def describe_verification(document: Document) -> str | None:
    """Give the verdict of ``--verify``; None when it was not asked for."""
    return (document.get("verification") or {}).get("text")


def count(n: int, what: str) -> str:
    """Count in words: ``1 plan``, ``3 plans``."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def format_duration(seconds: float) -> str:
    """Format seconds: ``0.42 s``, ``17 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
