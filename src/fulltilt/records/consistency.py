"""Whether what ``trials.jsonl`` and ``tune.json`` say agrees with the rows they hold.

A figure of the document is computed from its rows, so where it is another one, somebody changed the file, or it is
damaged. Only arithmetic that every release shares is held against the rows: which plan a rule would pick is not, since
rules change. Keys that a document does not have are not asked for.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fulltilt.records.trial import WHOLE_RUNS

Row = Mapping[str, Any]

STEPPED = (*WHOLE_RUNS, "device")
"""Kinds whose rate and step time are of the same blocks."""

OF_A_PICK = ("rule", "tied_with", "changes", "runs_samples_per_s")
"""What a pick says beyond its row."""

LEAST_GIB, MOST = 1e-9, 1e15

TOLERANCE = 1e-6  # of a figure computed from others: they are written with all their digits


def find_row_contradictions(row: Row) -> list[str]:
    """What a row says of itself that cannot be, with the values."""
    checks = (_check_sizes, _check_observed, _check_plan, _check_rate, _check_steps)
    return [f"{row['id']}: {problem}" for check in checks for problem in check(row)]


def find_contradictions(document: Mapping[str, Any]) -> list[str]:
    """What the document of a search says that its rows do not give, with both values.

    Raises:
        KeyError, TypeError, AttributeError: it is not whole.
    """
    baseline = document.get("baseline")
    rows = [*document["trials"], *(document.get("repeats") or ()), *(document.get("probes") or ())]
    by_id = {row["id"]: row for row in rows}
    problems = [problem for row in rows for problem in find_row_contradictions(row)]
    problems += [f"{n} rows are called {id}" for id, n in Counter(row["id"] for row in rows).items() if n > 1]
    if baseline and by_id.setdefault(baseline["id"], baseline) is baseline:
        problems += find_row_contradictions(baseline)
    elif baseline:
        problems += _compare_row("baseline", baseline, by_id[baseline["id"]])
    for name, pick in document["picks"].items():
        problems += _check_pick(f"picks.{name}", pick, by_id, document["trials"]) if pick else ()
    problems += _check_counts(document, list(by_id.values()))
    problems += _check_epoch(document)
    problems += _check_savings(document, by_id)
    return problems


def describe_contradictions(problems: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"it contradicts its own rows: {problems[0]}{more}"


def _check_sizes(row: Row) -> Iterator[str]:
    """A model is fitted to these, which ends at a size that nothing has."""
    for name, value in row.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        is_memory = name.startswith("memory_") and name.endswith("_gib")
        least = 0.0 if not is_memory or name == "memory_allocated_peak_gib" else LEAST_GIB
        if (is_memory or name in ("seconds", "samples_per_s")) and not least <= value <= MOST:
            yield f"{name} is {value:g}, which nothing takes or reaches"


def _check_observed(row: Row) -> Iterator[str]:
    if row["status"] != "ok" or row.get("kind", WHOLE_RUNS[0]) not in WHOLE_RUNS:
        return
    if "observed" in row and not row["observed"]:
        yield "observed is empty, and levers are read back inside a run before it counts"


def _check_plan(row: Row) -> Iterator[str]:
    plan, n_devices = row["plan"], row.get("n_devices") or 1
    if "batch_size" not in plan:
        return
    due = {
        "effective_batch_size": plan["batch_size"] * plan.get("accumulate", 1),
        "batch_size_per_device": -(-plan["batch_size"] // n_devices),
    }
    for name, value in due.items():
        if row.get(name) and row[name] != value:
            yield f"{name} is {row[name]}, its plan on {n_devices} device(s) gives {value}"
    if row["status"] != "ok" or n_devices > 1:  # a rank sees its share
        return
    for name, found in (row.get("observed") or {}).items():
        if plan.get(name) is not None and found != plan[name]:  # such a run ends with an error
            yield f"its plan has {name} {plan[name]}, observed in the run was {found}"


def _check_rate(row: Row) -> Iterator[str]:
    rate, blocks, interval = row.get("samples_per_s"), row.get("block_samples_per_s"), row.get("samples_per_s_ci95")
    if row["status"] != "ok" and rate is not None:
        yield f"status is {row['status']}, and only a run that ended well has samples_per_s ({rate:g})"
    if row["status"] == "ok" and not rate and row.get("kind") != "memory":
        yield f"status is ok, and samples_per_s is {rate}"
    if not rate:
        return
    if blocks and not (_is_at_most(min(blocks), rate) and _is_at_most(rate, max(blocks))):
        yield f"samples_per_s is {rate:g}, its blocks lie between {min(blocks):g} and {max(blocks):g}"
    if interval and not (_is_at_most(interval[0], rate) and _is_at_most(rate, interval[1])):
        yield f"samples_per_s is {rate:g}, outside of its samples_per_s_ci95 {interval[0]:g} to {interval[1]:g}"


def _check_steps(row: Row) -> Iterator[str]:
    """Rate and step time are of the same samples: their product is how many there were."""
    rate, step_ms, n_steps = row.get("samples_per_s"), (row.get("phases_ms") or {}).get("step"), row.get("n_steps")
    if not (rate and step_ms and n_steps) or row.get("kind", WHOLE_RUNS[0]) not in STEPPED:
        return
    n_samples = rate * step_ms / 1000 * n_steps
    if abs(n_samples - round(n_samples)) > 1e-4 + 1e-9 * n_samples:
        yield (
            f"samples_per_s {rate:g} at phases_ms.step {step_ms:g} over n_steps {n_steps} is {n_samples:.2f} samples, "
            "no whole number"
        )


def _compare_row(name: str, copy: Row, row: Row) -> list[str]:
    """``copy`` holds a row once more: every figure of the row is the same there."""
    return [
        f"{name}.{key} is {copy.get(key)}, that of its row {row['id']} is {row[key]}"
        for key in row
        if key not in OF_A_PICK and copy.get(key) != row[key]
    ]


def _check_pick(name: str, pick: Row, by_id: Mapping[str, Row], table: Sequence[Row]) -> list[str]:
    row = by_id.get(pick["id"])
    if row is None or row not in table:
        return [f"{name} is {pick['id']}, which is no row of trials"]
    problems = _compare_row(name, pick, row)
    if row["status"] != "ok":
        problems.append(f"{name} is {row['id']}, which ended with {row['status']}")
    problems += [f"{name} is tied with {id}, which is no row" for id in pick.get("tied_with") or () if id not in by_id]
    rates = [run.get("samples_per_s") for run in by_id.values() if run["plan"] == row["plan"]]
    strange = [rate for rate in pick.get("runs_samples_per_s") or () if rate not in rates]
    return problems + [f"{name}: no run of its plan showed {rate:g} samples/s" for rate in strange]


def _check_counts(document: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    table, search = document["trials"], document["search"]
    recommended = document["picks"].get("recommended") or {}
    whole = [row for row in rows if row.get("kind", WHOLE_RUNS[0]) in WHOLE_RUNS]
    due = {
        "n_trials": len(table),
        "n_end_to_end": sum(row["status"] != "skipped" for row in whole),
        "n_out_of_memory": sum(row["status"] == "out_of_memory" for row in table),
        "n_skipped": sum(row["status"] == "skipped" for row in table),
        "n_repeats": len(document.get("repeats") or ()),
        "n_probes": sum(row.get("kind") != "memory" for row in document.get("probes") or ()),
        "n_undecided": len(recommended.get("tied_with") or ()),
    }
    for name, value in due.items():
        if name in search and search[name] != value:
            yield f"search.{name} is {search[name]}, the rows give {value}"


def _check_epoch(document: Mapping[str, Any]) -> Iterator[str]:
    said, n_samples = document.get("epoch_seconds") or {}, document["workload"].get("n_samples")
    pick = document["picks"].get("recommended") or {}
    rate, runs = pick.get("samples_per_s"), pick.get("runs_samples_per_s") or ()
    if said.get("estimate") is None or not n_samples or not rate:
        return
    if math.isclose(said["estimate"], n_samples / rate, rel_tol=TOLERANCE):  # what releases before this one wrote
        return
    mean = statistics.geometric_mean(runs) if len(runs) > 1 else rate
    yield from _compare_figures({"epoch_seconds.estimate": (said["estimate"], n_samples / mean)})


def _check_savings(document: Mapping[str, Any], by_id: Mapping[str, Row]) -> Iterator[str]:
    savings = document.get("savings")
    if not savings:
        return
    ends = {"baseline": document.get("baseline") or {}, "recommended": document["picks"].get("recommended") or {}}
    for name, row in ends.items():
        if savings[f"{name}_id"] != row.get("id"):
            yield f"savings.{name}_id is {savings[f'{name}_id']}, {name} is {row.get('id')}"
            return
    figures = {"savings.search_s": (savings["search_s"], _add_times(document["search"]))}
    ids = savings.get("compared_ids") or ()
    if ids:
        sides = [_list_rates(ids, by_id, row["plan"]) for row in ends.values()]
        if any(len(rates) != savings["n_pairs"] for rates in sides) or sum(map(len, sides)) != len(ids):
            yield f"savings.compared_ids {', '.join(ids)} are not {savings['n_pairs']} runs each of both plans"
            return
        before, after = map(statistics.geometric_mean, sides)
        figures |= _compute_savings(savings, before, after)
    yield from _compare_figures(figures)
    if savings.get("gain_ci95_pct") and savings["verdict"] != (due := _decide(*savings["gain_ci95_pct"])):
        yield f"savings.verdict is {savings['verdict']}, its gain_ci95_pct {savings['gain_ci95_pct']} gives {due}"


def _add_times(search: Mapping[str, Any]) -> float | None:
    return search["seconds"] + (search.get("earlier_s") or 0.0) if "seconds" in search else None


def _list_rates(ids: Sequence[str], by_id: Mapping[str, Row], plan: Mapping[str, Any]) -> list[float]:
    rows = [by_id[id] for id in ids if id in by_id]
    return [row["samples_per_s"] for row in rows if row["plan"] == plan and row.get("samples_per_s")]


def _compute_savings(savings: Mapping[str, Any], before: float, after: float) -> dict[str, tuple[Any, float | None]]:
    """Figure → what is said and what the compared runs give."""
    figures: dict[str, tuple[Any, float | None]] = {
        "savings.gain_pct": (savings.get("gain_pct"), 100 * (1 - before / after))
    }
    if savings.get("payback_s") is not None:
        figures["savings.payback_s"] = (savings["payback_s"], savings["search_s"] / (after / before - 1))
    if savings.get("before_s") is not None:
        n_total = savings["n_samples"] * savings["n_epochs"]
        figures["savings.before_s"] = (savings["before_s"], n_total / before)
        figures["savings.after_s"] = (savings["after_s"], n_total / after)
        figures["savings.saved_s"] = (savings["saved_s"], n_total / before - n_total / after)
    return figures


def _decide(low_pct: float, high_pct: float) -> str:
    if low_pct <= 0 <= high_pct:
        return "no gain"
    return "faster" if low_pct > 0 else "slower"


def _compare_figures(figures: Mapping[str, tuple[Any, float | None]]) -> Iterator[str]:
    for name, (said, due) in figures.items():
        if due is not None and (said is None or not math.isclose(said, due, rel_tol=TOLERANCE, abs_tol=TOLERANCE)):
            yield f"{name} is {said}, the rows give {due:.6g}"


def _is_at_most(low: float, high: float) -> bool:
    return low <= high * (1 + TOLERANCE)
