"""Say what the doctor found: the result in a sentence, where the time goes, and the findings."""

import linecache
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fulltilt.report.summary import count

LABELS = {
    "data_wait": "data wait",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "host_sync": "host sync",
    "file_write": "file writes",
    "unknown": "unknown",
}
BAR_WIDTH = 40
N_SHOWN = 3  # findings: with bars and notes they fit a screen
WIDTH = 100


def describe_result(document: Mapping[str, Any]) -> str:
    """Say the result in one sentence."""
    findings = document["findings"]
    acts = [finding for finding in findings if finding["verdict"] == "act"]
    if not document["breakdown_pct"]:
        return f"Nothing to judge: {document['steps']['n']} training steps were seen."
    if acts:
        low, high = acts[0]["gain_ci95_pct"]
        return (
            f"Without {_place(acts[0])} a step takes {acts[0]['gain_pct']:.0f} % less time "
            f"({low:.0f} to {high:.0f} %), proved in this run."
        )
    if findings:
        worst = findings[0]
        cost = "time on a GPU" if worst["ceiling_pct"] is None else f"up to {worst['ceiling_pct']:.0f} % of a step"
        return f"Nothing is proved; {_place(worst)} perhaps costs {cost} ({count(len(findings), 'finding')})."
    return f"None of the {len(document['checked'])} rules found anything in {document['steps']['n_counted']} steps."


def describe_steps(document: Mapping[str, Any]) -> str:
    """Say how many steps were seen, how long one took, and what watching cost."""
    steps, overhead_us = document["steps"], document["overhead_us_per_step"]
    return (
        f"{steps['n']} steps of {steps['wall_ms_median']:.1f} ms (median of {steps['n_counted']}) on "
        f"{document['device']}; watching took {overhead_us:.0f} µs of each"
    )


def list_bars(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield one bar for each kind of work, as long as its share of the step."""
    for kind, share_pct in document["breakdown_pct"].items():
        bar = "█" * round(BAR_WIDTH * max(share_pct, 0) / 100)
        yield f"{LABELS[kind]:<12}{share_pct:5.1f} % {bar}".rstrip()


def list_findings(findings: Sequence[Mapping[str, Any]], *, is_whole: bool = False) -> Iterator[str]:
    """Yield three lines for each finding, of the first few unless ``is_whole``: where, what is known, what to do."""
    n_shown = len(findings) if is_whole else N_SHOWN
    for finding in findings[:n_shown]:
        code = linecache.getline(finding["file"], finding["line"]).strip()
        yield _fit(f"{finding['verdict']:<12}{_place(finding)}  {code}")
        evidence = _EVIDENCE[finding["rule"]](finding, finding["evidence"])
        yield _fit(f"{'':12}{finding['rule']}: {evidence}")
        yield _fit(f"{'':12}fix: {finding['fix']}")
    if len(findings) > n_shown:
        yield f"and {len(findings) - n_shown} more in the report"


def _describe_sync(finding: Mapping[str, Any], evidence: Mapping[str, Any]) -> str:
    called = f"{evidence['call']}() {evidence['calls_per_step']:.0f} × a step"
    if "host_part_ms" in evidence:
        return f"{called}; free on a CPU, a GPU may idle for the host's {evidence['host_part_ms']:.1f} ms"
    blocked = f"{evidence['blocked_ms_per_step']:.2f} ms blocked"
    return f"{called}, {blocked}; without it at most {finding['ceiling_pct']:.0f} % less"


def _describe_transform(finding: Mapping[str, Any], evidence: Mapping[str, Any]) -> str:
    return (
        f"{evidence['function']}: {evidence['share_of_sample_pct']:.0f} % of loading, "
        f"at most {finding['ceiling_pct']:.0f} % of a step"
    )


def _describe_write(finding: Mapping[str, Any], evidence: Mapping[str, Any]) -> str:
    if finding["gain_pct"] is None:
        return f"{finding['ceiling_pct']:.0f} % of a step; not proved: {evidence['not_proved']}"
    low, high = finding["gain_ci95_pct"]
    took = f"{evidence['write_ms_per_step']:.1f} ms"
    if low <= 0:
        return f"{took}; no gain without it can be told ({low:.1f} to {high:.1f} %)"
    a_a_low, a_a_high = evidence["a_a_ci95_pct"]
    return (
        f"{took}; {finding['gain_pct']:.1f} % less without ({low:.1f} to {high:.1f}; {evidence['n_rounds']} rounds); "
        f"A/A {a_a_low:.1f} to {a_a_high:.1f}"
    )


_EVIDENCE = {"host-sync": _describe_sync, "slow-transform": _describe_transform, "file-write": _describe_write}


def _place(finding: Mapping[str, Any]) -> str:
    return f"{finding['file']}:{finding['line']}"


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
