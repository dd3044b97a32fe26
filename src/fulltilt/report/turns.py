"""Read from a document how plans did in turns: their speeds by group, and their ratios to the user's own."""

from collections.abc import Mapping
from typing import Any


def read_turns(document: Mapping[str, Any], plan: Mapping[str, Any] | None) -> dict[int, float]:
    """Map each group that a plan took turns in to its samples/s; one in which a plan failed counts for none."""
    rows = [row for row in document.get("repeats") or () if row.get("group") is not None]
    failed = {row["group"] for row in rows if row["status"] != "ok"}
    return {row["group"]: row["samples_per_s"] for row in rows if row["plan"] == plan and row["group"] not in failed}


def list_ratios(document: Mapping[str, Any], plan: Mapping[str, Any]) -> list[float]:
    """List the ratios of a plan's samples/s to the user's own, group by group."""
    own = read_turns(document, document.get("user_plan"))
    return [rate / own[group] for group, rate in read_turns(document, plan).items() if group in own]
