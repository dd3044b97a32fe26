"""Say what came of a search: what was decided, by how much, and what that is in time."""

import statistics
from collections.abc import Mapping
from typing import Any

from fulltilt.records import format_rate
from fulltilt.report.summary import Document, count, describe_plan, format_duration, read_recommended
from fulltilt.report.table import BUSY_MARK, TELLING_PCT, is_busy

TIE_PCT = 2.0  # differences below it are none
REPEAT_WHEN_QUIET = "search again on a quiet machine, with --out and a new folder"
MAX_SPAN = 100.0  # of an interval that is shown, its upper end over its lower
TELLABLE_PCT = 900.0  # a gain of a factor of 10: runs that tell only larger ones apart tell nothing


def describe_outcome(document: Document) -> list[str]:
    """Say what comes of the search, before its picks: what was decided, then by how much, then what it is in time.

    A machine that was too busy decides nothing: a reader who saw the picks first took them for a result.
    """
    first, *rest = describe_savings(document) or [None]
    lines = [first, describe_gain(document), *rest, describe_resolution(document), describe_epoch(document)]
    return [line for line in (*lines, describe_learning_rate(document)) if line]


def describe_gain(document: Document) -> str | None:
    """Compare the recommended plan with the user's own, where both were measured and not found alike."""
    pick, baseline = read_recommended(document), document.get("baseline") or {}
    savings = document.get("savings") or {}
    verdict = savings.get("verdict")
    if verdict in ("no gain", "same plan") or not pick or not baseline.get("samples_per_s"):
        return None
    if pick["id"] == baseline["id"]:
        return None
    compared = [] if savings.get("gain_pct") is None else _list_compared(document)
    plans = baseline["plan"], pick["plan"]
    sides = [[row["samples_per_s"] for row in compared if row["plan"] == plan] for plan in plans]
    rates, base = (baseline["samples_per_s"], pick["samples_per_s"]), "by their rows in the table"
    if all(sides):
        rates = tuple(map(statistics.geometric_mean, sides))
        base = f"by the geometric mean of {count(len(sides[0]), 'run')} each side by side"
    ratio, noise_pct = rates[1] / rates[0], document["search"].get("noise_pct") or 0.0
    if verdict is None and 100 * abs(ratio - 1) <= noise_pct:
        return f"no difference from the settings as they were: runs of one plan lay {noise_pct:.0f} % apart"
    times = f"{ratio:.2f} ×"
    if any(map(is_busy, (pick, baseline, *_list_compared(document)))):
        times = f"about {f'{ratio:.0f}' if ratio >= 10 else f'{ratio:.2g}'} × {BUSY_MARK}"
    reasons = document.get("null_reasons") or {}
    doubt = ", in too few runs to tell it from chance" if reasons.get("savings") else ""
    before, after = map(format_rate, rates)
    return (
        f"{times} the throughput of the settings as they were, {base}: {before} → {after} samples/s (before: "
        f"{describe_plan(plans[0])}){doubt}"
    )


def _list_compared(document: Document) -> list[Mapping[str, Any]]:
    """List the runs that the saving was computed from."""
    ids = (document.get("savings") or {}).get("compared_ids", ())
    rows = [*document["trials"], *document.get("repeats", ()), document.get("baseline")]
    found = {row["id"]: row for row in rows if row}
    return [found[id] for id in ids if id in found]


def describe_savings(document: Document) -> list[str]:
    """Say what the user's own run takes before and after, and when the search has paid for itself.

    What a busy machine showed is no promise for a quiet one: a minute of contention once made 112 × of what was no
    clear gain 24 minutes later. It is said first, and nothing is paid back by it.
    """
    savings = document.get("savings")
    if not savings:
        reason = (document.get("null_reasons") or {}).get("savings")
        return [f"time saved: not known, {reason}"] if reason else []
    compared = _list_compared(document)
    busy = [row["id"] for row in compared if is_busy(row)]
    is_claim = savings["verdict"] in ("faster", "slower")
    said = _describe_claim(savings, is_busy=bool(busy)) if is_claim else _describe_no_gain(document, savings)
    if unconfirmed := _describe_unconfirmed(savings, document.get("verification") or {}):
        said += f"; {unconfirmed}"
    if not busy:
        is_paid_back = is_claim and savings.get("payback_s") is not None
        return [said, _describe_payback(savings)] if is_paid_back else [said]
    n, are = len(compared), "is" if len(busy) == 1 else "are"
    those = f"of the {n} runs compared, {len(busy)} {are} a busy machine's ({', '.join(busy)})"
    if len(busy) == n:
        those = f"all {n} runs compared are a busy machine's"
    remedy = "" if REPEAT_WHEN_QUIET in said else f": {REPEAT_WHEN_QUIET}"
    holds = "on a machine as busy as this one was, which is no claim for a quiet one: " if is_claim else ""
    return [f"{holds}{said}; {those}{remedy}"]


def _describe_no_gain(document: Document, savings: Mapping[str, Any]) -> str:
    if savings["verdict"] == "same plan":
        n_undecided = document["search"].get("n_undecided") or 0
        if not n_undecided:
            return "no gain: the settings as they were are the recommended ones"
        others = count(n_undecided, "other plan")
        return f"no gain was found: the settings as they were are recommended, and {others} left undecided"
    low, high = savings["gain_ci95_pct"]
    if high - low > 2 * TELLING_PCT:
        return (
            "too noisy to tell the recommended plan from the settings as they were: runs of one plan differ as much as "
            f"the two do ({savings['n_pairs']} pairs of runs side by side); {REPEAT_WHEN_QUIET}"
        )
    shown = "no gain" if max(abs(low), abs(high)) <= TIE_PCT else "no gain that this search could prove"
    return (
        f"{shown} over the settings as they were: {_describe_time_saved(savings['gain_pct'], n_digits=1)} was measured "
        f"(saved: {low:z.1f} to {high:z.1f} %, an interval that holds 0; {savings['n_pairs']} pairs of runs side by "
        "side)"
    )


def _describe_claim(savings: Mapping[str, Any], *, is_busy: bool) -> str:
    low, high = savings["gain_ci95_pct"]
    gain = f"{savings['gain_pct']:.1f} % ({low:.1f} to {high:.1f} %; {savings['n_pairs']} pairs of runs side by side)"
    share = f"{gain} less training time" if is_busy else f"{gain} of the training time is saved"
    if savings["verdict"] == "slower":
        share = f"slower than the settings as they were: the share of the training time saved is {gain}"
    if savings["before_s"] is None:
        return share
    before, after = format_duration(savings["before_s"]), format_duration(savings["after_s"])
    return f"this run, {savings['n_epochs']} epochs of {savings['n_samples']:,} samples: {before} → {after}; {share}"


def _describe_unconfirmed(savings: Mapping[str, Any], verification: Mapping[str, Any]) -> str | None:
    """Say what the trainings of ``--verify`` took, where that differs from what the search says is saved."""
    interval = verification.get("time_saved_ci95_pct")
    if savings["verdict"] != "faster" or not interval:
        return None
    (low, high), (least, most) = interval, savings["gain_ci95_pct"]
    verdict, why = "did not confirm it", ", an interval that holds 0"
    if low > most:
        verdict, why = "saved more than the search says", ""
    elif not low <= 0 <= high:
        why = ", an interval apart from the search's"
        if high >= least:
            return None
    return (
        f"--verify's trainings of {verification['n_pairs']} pairs {verdict}: "
        f"{_describe_time_saved(verification['time_saved_pct'])} to the same quality "
        f"(saved: {low:z.0f} to {high:z.0f} %{why})"
    )


def _describe_time_saved(saved_pct: float, *, n_digits: int = 0) -> str:
    """Say a share of time saved: ``34 % less training time``, ``the same training time``."""
    shown = f"{abs(saved_pct):.{n_digits}f}"
    return (
        f"{shown} % {'less' if saved_pct > 0 else 'more'} training time" if float(shown) else "the same training time"
    )


def _describe_payback(savings: Mapping[str, Any]) -> str:
    low, high = map(format_duration, savings["payback_s_ci95"])
    took, after = format_duration(savings["search_s"]), format_duration(savings["payback_s"])
    text = f"the search took {took} and has paid for itself after {after} of training ({low} to {high})"
    if savings["after_s"] is not None and savings["payback_s"] > savings["after_s"]:
        text += f": longer than this run, which saves {format_duration(savings['saved_s'])}"
    return text


def describe_resolution(document: Document) -> str | None:
    """Say what the runs could have told apart, and how many plans they did not."""
    search = document["search"]
    gap_pct, n_undecided = search.get("detectable_pct"), search.get("n_undecided") or 0
    if gap_pct is None:
        return None
    n_others = sum(row["status"] == "ok" for row in document["trials"]) - 1
    left = f"; {n_undecided} of {count(n_others, 'other plan')} left undecided" if n_others > 0 else ""
    if gap_pct > TELLABLE_PCT:
        return f"these runs tell no plans apart: runs of one plan differ too much{left}"
    gap = f"{gap_pct:.1f} %" if gap_pct < 9.95 else f"{gap_pct:.0f} %"
    gap = f"a factor of {1 + gap_pct / 100:.1f}" if gap_pct > 100 else gap
    return f"plans that differ by {gap} are told apart by these runs in 80 of 100 cases{left}"


def describe_epoch(document: Document) -> str | None:
    """Say how long one pass over the training set takes, and by which runs."""
    epoch, pick = document.get("epoch_seconds") or {}, read_recommended(document)
    if not epoch.get("estimate"):
        return None
    rates = pick.get("runs_samples_per_s") or ()
    rows = (*document["trials"], *document.get("repeats", ()))
    runs = [row for row in rows if row["plan"] == pick.get("plan") and row.get("samples_per_s") in rates]
    mark = f" {BUSY_MARK}" if any(map(is_busy, [pick, *runs] if pick else runs)) else ""
    text = f"one epoch takes about {format_duration(epoch['estimate'])}{mark}"
    of_runs = f", by the geometric mean of its {len(rates)} runs side by side" if len(rates) > 1 else ""
    if not epoch.get("ci95"):
        return f"{text}{of_runs}"
    if epoch["ci95"][1] > MAX_SPAN * epoch["ci95"][0]:
        return f"{text}{of_runs}, {'which' if of_runs else 'and its steps'} differ too much for an interval"
    low, high = map(format_duration, epoch["ci95"])
    return f"{text} ({low} to {high}){of_runs}"


def describe_learning_rate(document: Document) -> str | None:
    """Say how the learning rate follows the effective batch, where it does."""
    rate = document.get("learning_rate") or {}
    if rate.get("from") is None or rate.get("to") is None or rate["from"] == rate["to"]:
        return None
    return f"learning rate {rate['from']:g} → {rate['to']:g} by the {rate['rule']} rule: the effective batch changed"
