"""What came of a search, in words: what was decided, by how much, and what that is in time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fulltilt.records import format_rate
from fulltilt.report.summary import Document, count, describe_plan, format_duration
from fulltilt.report.table import BUSY_MARK, TELLING_PCT, is_busy

TIE_PCT = 2.0  # differences below it are none
REPEAT_WHEN_QUIET = "search again on a quiet machine, with --out and a new folder"
MAX_SPAN = 100.0  # of an interval that is shown, its upper end over its lower
TELLABLE_PCT = 900.0  # a gain of a factor of 10: runs that tell only larger ones apart tell nothing


def describe_outcome(document: Document) -> list[str]:
    """What comes of the search, before its picks: what was decided, then by how much, then what that means in time.

    A machine that was too busy decides nothing: a reader who saw the picks first took them for a result.
    """
    first, *rest = describe_savings(document) or [None]
    lines = [first, describe_gain(document), *rest, describe_resolution(document), describe_epoch(document)]
    return [line for line in (*lines, describe_learning_rate(document)) if line]


def describe_gain(document: Document) -> str | None:
    """The recommended plan beside the user's own, where both were measured."""
    pick, baseline = document["picks"].get("recommended"), document.get("baseline")
    if not pick or not baseline or not baseline.get("samples_per_s") or pick.get("id") == baseline.get("id"):
        return None
    savings = document.get("savings") or {}
    verdict = savings.get("verdict")
    if verdict in ("no gain", "same plan"):
        return None  # what was saved says so
    after, before, base = pick["samples_per_s"], baseline["samples_per_s"], "by their rows in the table"
    if (sides := _list_sides(document)) is not None:
        before, after = map(statistics.geometric_mean, sides)
        base = f"by the geometric mean of {count(len(sides[0]), 'run')} each side by side"
    ratio = after / before
    noise_pct = document["search"].get("noise_pct") or 0.0
    if verdict is None and 100 * abs(ratio - 1) <= noise_pct:
        return f"no difference from the settings as they were: runs of one plan lay {noise_pct:.0f} % apart"
    is_alone = "savings" in (document.get("null_reasons") or {})
    times = f"{ratio:.2f} ×"
    if is_busy(pick) or is_busy(baseline) or _describe_busy_runs(document):
        times = f"about {f'{ratio:.0f}' if ratio >= 10 else f'{ratio:.2g}'} × {BUSY_MARK}"
    return (
        f"{times} the throughput of the settings as they were, {base}: {format_rate(before)} → {format_rate(after)} "
        f"samples/s (before: {describe_plan(baseline['plan'])})"
        f"{', in too few runs to tell it from chance' if is_alone else ''}"
    )


def _list_sides(document: Document) -> tuple[list[float], list[float]] | None:
    """Of the runs that the saving was computed from, samples/s of the settings as they were and of the pick."""
    savings, baseline = document.get("savings") or {}, document.get("baseline")
    ids, pick = savings.get("compared_ids", ()), document["picks"].get("recommended")
    if savings.get("gain_pct") is None or not baseline or not pick:
        return None
    found = {row["id"]: row for row in (*document["trials"], *document.get("repeats", ()), baseline)}
    rows = [found[id] for id in ids if id in found]
    before, after = ([r["samples_per_s"] for r in rows if r["plan"] == own["plan"]] for own in (baseline, pick))
    return (before, after) if before and after else None


def describe_savings(document: Document) -> list[str]:
    """Time of the user's own run before and after, and when the search has paid for itself.

    What a busy machine showed is no promise for a quiet one: a minute of contention once made 112 × of what was no
    clear gain 24 minutes later. It is said first, and nothing is paid back by it.
    """
    lines = _describe_verdict(document)
    if not lines:
        return []
    said = "; ".join(filter(None, [lines[0], _describe_unconfirmed(document)]))
    busy = _describe_busy_runs(document)
    if busy is None:
        return [said, *lines[1:]]
    remedy = "" if REPEAT_WHEN_QUIET in said else f": {REPEAT_WHEN_QUIET}"
    is_claim = document["savings"]["verdict"] in ("faster", "slower")
    holds = "on a machine as busy as this one was, which is no claim for a quiet one: " if is_claim else ""
    return [f"{holds}{said}; {busy}{remedy}"]


def _describe_verdict(document: Document) -> list[str]:
    savings = document.get("savings")
    if not savings:
        reason = (document.get("null_reasons") or {}).get("savings")
        return [f"time saved: not known, {reason}"] if reason else []
    if savings["verdict"] == "same plan":
        n_undecided = document["search"].get("n_undecided") or 0
        if n_undecided:
            others = "1 other plan" if n_undecided == 1 else f"{n_undecided} other plans"
            return [f"no gain was found: the settings as they were are recommended, and {others} left undecided"]
        return ["no gain: the settings as they were are the recommended ones"]
    low, high = savings["gain_ci95_pct"]
    if savings["verdict"] == "no gain" and high - low > 2 * TELLING_PCT:
        return [
            "too noisy to tell the recommended plan from the settings as they were: runs of one plan differ as much as "
            f"the two do ({savings['n_pairs']} pairs of runs side by side); {REPEAT_WHEN_QUIET}"
        ]
    pairs = f"{savings['n_pairs']} pairs of runs side by side"
    if savings["verdict"] == "no gain":
        shown = "no gain" if max(abs(low), abs(high)) <= TIE_PCT else "no gain that this search could prove"
        measured = _describe_time_saved(savings["gain_pct"], n_digits=1)
        return [
            f"{shown} over the settings as they were: {measured} was measured "
            f"(saved: {low:z.1f} to {high:z.1f} %, an interval that holds 0; {pairs})"
        ]
    gain = f"{savings['gain_pct']:.1f} % ({low:.1f} to {high:.1f} %; {pairs})"
    slower = f"slower than the settings as they were: the share of the training time saved is {gain}"
    faster = f"{gain} less training time" if _describe_busy_runs(document) else f"{gain} of the training time is saved"
    share = faster if savings["verdict"] == "faster" else slower
    if savings["before_s"] is None:
        return [share, *_describe_payback(savings)]
    run = f"this run, {savings['n_epochs']} epochs of {savings['n_samples']:,} samples"
    before, after = format_duration(savings["before_s"]), format_duration(savings["after_s"])
    return [f"{run}: {before} → {after}; {share}", *_describe_payback(savings)]


def _describe_unconfirmed(document: Document) -> str | None:
    """What the trainings of ``--verify`` took, where it does not bear out the time that the search says is saved."""
    savings, verification = document.get("savings") or {}, document.get("verification") or {}
    interval = verification.get("time_saved_ci95_pct")
    if savings.get("verdict") != "faster" or not interval:
        return None
    (low, high), (least, most) = interval, savings["gain_ci95_pct"]
    verdict = "did not confirm it"
    if low <= 0 <= high:
        why = ", an interval that holds 0"
    elif high < least:
        why = ", an interval apart from the search's"
    elif low > most:
        verdict, why = "saved more than the search says", ""
    else:
        return None
    return (
        f"--verify's trainings of {verification['n_pairs']} pairs {verdict}: "
        f"{_describe_time_saved(verification['time_saved_pct'])} to the same quality "
        f"(saved: {low:z.0f} to {high:z.0f} %{why})"
    )


def _describe_time_saved(saved_pct: float, *, n_digits: int = 0) -> str:
    """``34 % less training time``, ``12 % more training time``, ``the same training time``."""
    shown = f"{abs(saved_pct):.{n_digits}f}"
    if not float(shown):
        return "the same training time"
    return f"{shown} % {'less' if saved_pct > 0 else 'more'} training time"


def _describe_busy_runs(document: Document) -> str | None:
    """Which of the runs that the verdict rests on are of a busy machine; None where none is."""
    compared = (document.get("savings") or {}).get("compared_ids", ())
    rows = [*document["trials"], *document.get("repeats", ()), *filter(None, [document.get("baseline")])]
    runs = {row["id"]: row for row in rows if row["id"] in compared}
    busy = [id for id in compared if id in runs and is_busy(runs[id])]
    if not busy:
        return None
    if len(busy) == len(runs):
        return f"all {len(runs)} runs compared are a busy machine's"
    named = ", ".join(busy)
    return (
        f"of the {len(runs)} runs compared, {len(busy)} {'is' if len(busy) == 1 else 'are'} a busy machine's ({named})"
    )


def _describe_payback(savings: Mapping[str, Any]) -> list[str]:
    if savings.get("payback_s") is None:
        return []
    low, high = map(format_duration, savings["payback_s_ci95"])
    took, after = format_duration(savings["search_s"]), format_duration(savings["payback_s"])
    text = f"the search took {took} and has paid for itself after {after} of training ({low} to {high})"
    if savings["after_s"] is not None and savings["payback_s"] > savings["after_s"]:
        text += f": longer than this run, which saves {format_duration(savings['saved_s'])}"
    return [text]


def describe_resolution(document: Document) -> str | None:
    """What the runs could have told apart, and how many plans they did not."""
    search = document["search"]
    if search.get("detectable_pct") is None:
        return None
    detectable, n_undecided = search["detectable_pct"], search.get("n_undecided") or 0
    n_others = sum(row["status"] == "ok" for row in document["trials"]) - 1
    left = f"; {n_undecided} of {count(n_others, 'other plan')} left undecided" if n_others > 0 else ""
    if detectable > TELLABLE_PCT:
        return f"these runs tell no plans apart: runs of one plan differ too much{left}"
    return f"plans that differ by {_describe_gap(detectable)} are told apart by these runs in 80 of 100 cases{left}"


def _describe_gap(gap_pct: float) -> str:
    """``6.1 %``, ``42 %``, ``a factor of 2.1``: how much faster one of two plans is."""
    if gap_pct > 100:
        return f"a factor of {1 + gap_pct / 100:.1f}"
    return f"{gap_pct:.1f} %" if gap_pct < 9.95 else f"{gap_pct:.0f} %"


def describe_epoch(document: Document) -> str | None:
    epoch = document.get("epoch_seconds") or {}
    if not epoch.get("estimate"):
        return None
    pick = document["picks"].get("recommended") or {}
    estimate = format_duration(epoch["estimate"])
    text = f"one epoch takes about {estimate}{f' {BUSY_MARK}' if _is_any_run_busy(document, pick) else ''}"
    n_runs = len(pick.get("runs_samples_per_s") or ())
    of_runs = f", by the geometric mean of its {n_runs} runs side by side" if n_runs > 1 else ""
    if not epoch.get("ci95"):
        return f"{text}{of_runs}"
    if epoch["ci95"][1] > MAX_SPAN * epoch["ci95"][0]:
        return f"{text}{of_runs}, {'which' if of_runs else 'and its steps'} differ too much for an interval"
    low, high = map(format_duration, epoch["ci95"])
    return f"{text} ({low} to {high}){of_runs}"


def _is_any_run_busy(document: Document, pick: Mapping[str, Any]) -> bool:
    """Whether a busy machine measured the pick's row, or one of the runs beside others that its mean is of."""
    rates = pick.get("runs_samples_per_s") or ()
    rows = (*document["trials"], *document.get("repeats", ()))
    runs = [row for row in rows if row["plan"] == pick.get("plan") and row.get("samples_per_s") in rates]
    return any(map(is_busy, [pick, *runs] if pick else runs))


def describe_learning_rate(document: Document) -> str | None:
    rate = document.get("learning_rate") or {}
    if rate.get("from") is None or rate.get("to") is None or rate["from"] == rate["to"]:
        return None
    return f"learning rate {rate['from']:g} → {rate['to']:g} by the {rate['rule']} rule: the effective batch changed"
