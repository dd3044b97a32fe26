"""Read from a document how plans did in turns, which of them stands against the user's own, and what it changes."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from fulltilt.levers import list_changed, load_catalogue
from fulltilt.records import encode
from fulltilt.report.summary import Document, read_recommended
from fulltilt.report.table import Row
from fulltilt.stats.alternation import STALLED_PCT, compare_pairs

MIN_GROUPS = 3  # an interval over two groups is 14 times as wide as what they differ by


def read_turns(document: Document, plan: Mapping[str, Any] | None) -> dict[int, float]:
    """Map each group that a plan took turns in to its samples/s; one in which a plan failed counts for none."""
    rows = [row for row in document.get("repeats") or () if row.get("group") is not None]
    failed = {row["group"] for row in rows if row["status"] != "ok"}
    return {row["group"]: row["samples_per_s"] for row in rows if row["plan"] == plan and row["group"] not in failed}


def has_stalled(stalled_pct: float | None) -> bool:
    """Return whether so much of the time went into stalled steps that the machine counts as busy."""
    return (stalled_pct or 0.0) >= STALLED_PCT


def list_finalists(document: Document) -> list[Row]:
    """List the rows that took turns with the user's own, the fastest first.

    Each has its ``gain``, without an interval where two groups alone speak for it, and ``gains_pct`` group by group:
    those of the way in which both ran last. The gain of a pick is the one that decided: the folder may hold groups of
    another search.
    """
    own_plan, found = document.get("user_plan"), []
    own = read_turns(document, own_plan)
    ways = {row.get("group"): row.get("turns") for row in document.get("repeats") or ()}
    decided = {pick["id"]: pick.get("gain") for pick in document["picks"].values() if pick}
    for row in document["trials"]:
        rates = {group: rate for group, rate in read_turns(document, row["plan"]).items() if group in own}
        ratios = [rate / own[group] for group, rate in rates.items() if ways[group] == ways[[*rates][-1]]]
        if row["status"] == "ok" and row["plan"] != own_plan and len(ratios) > 1:
            gain = decided.get(row["id"], encode(compare_pairs([math.log(ratio) for ratio in ratios])))
            if gain and gain["n_groups"] < MIN_GROUPS:
                gain = gain | {"ci_pct": None}
            found += [row | {"gain": gain, "gains_pct": [100 * (ratio - 1) for ratio in ratios]}] if gain else []
    return sorted(found, key=lambda row: -row["gain"]["gain_pct"])


def find_other(document: Document) -> Row | None:
    """Find the row of the plan that the user's own is shown against; None where no other took turns with it.

    Where none came out ahead it is the one that came nearest.
    """
    row = document["picks"].get("unproven") or read_recommended(document)
    if row.get("plan") != document.get("user_plan"):
        return row
    return next(iter(list_finalists(document)), None)


def name_sides(document: Document) -> dict[str, str]:
    """Map row ids to what they are: ``yours``, and ``pick`` or, where it is not recommended, ``other``."""
    own, other = document.get("baseline") or {}, find_other(document) or {}
    is_pick = other.get("id") == read_recommended(document).get("id")
    sides = {other.get("id"): "pick" if is_pick else "other", own.get("id"): "yours"}
    return {id: name for id, name in sides.items() if id}


def list_settings(own: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """List what a plan changes as a configuration has it: dotted key, value before, value after."""
    for name in (name for names in list_changed(own, plan) for name in names):
        before, after = (v if isinstance(v, str) else json.dumps(v) for v in (own.get(name), plan[name]))
        yield load_catalogue()[name].key, before, after
