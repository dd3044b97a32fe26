"""Measure what ``fulltilt infer search`` finds for texts of many lengths, and what looking at less costs.

The first case has the model, the lengths and the naive baseline of the survey's table, all in one run and in turns.
The second runs the search and the exhaustive one, which measures every plan with every batching, and has what both
chose take turns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._infer_tools import compare_chosen, search
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, judge
from fulltilt.stats import Comparison

CLAIM = (
    "The search finds, by itself, a way at least 5 times as fast as eager fp32 in order of arrival padded to the "
    "longest, and loses at most 5 % to measuring everything, in a quarter of the time and within ten minutes."
)
NEEDS_PEERS = False
DEVICES = ("cpu",)
# Weights are random, so errors are judged without a metric; ONNX Runtime's int8 is 25 to 31 dB here.
LENIENT = ("inference.min_sqnr_db=20",)
BUDGET = "10m"


def run(context: Context) -> Findings:
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        out = Path(folder)
        arms, targets, notes = _run_mix(out / "mix")
        if not context.quick:
            more = _run_exhaustive(out)
            arms, targets, notes = [*arms, *more[0]], [*targets, *more[1]], [*notes, *more[2]]
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=tuple(notes))


def _run_mix(out: Path) -> tuple[list[Arm], list[Target], list[str]]:
    result, seconds = search("benchmarks._infer_encoder:workload", *LENIENT, "--budget", BUDGET, out=out)
    gain = result.gain_over_naive
    assert gain is not None
    arms = [
        Arm(
            case="encoder of MiniLM's size, 256 texts of 4 to 128 words",
            arm=result.chosen,
            metric="times_naive_eager",
            median=gain.speedup,
            ci95=list_times(gain),
            n=gain.n_groups,
            unit_of_replication="group of fresh processes in turns",
            note=f"policy {result.find(result.chosen).policy}; the interval is at 98 %",
        ),
        *(
            Arm(
                case="encoder of MiniLM's size, 256 texts of 4 to 128 words",
                arm=row.name,
                metric="times_eager_with_its_best_policy",
                median=row.gain.speedup,
                ci95=list_times(row.gain),
                n=row.gain.n_groups,
                unit_of_replication="group of fresh processes in turns",
                note=row.status,
            )
            for row in result.candidates
            if row.gain
        ),
    ]
    targets = [
        judge("times naive eager fp32 (T2)", gain.speedup, list_times(gain), at_least=5.0),
        judge("seconds of the search (T3)", seconds, None, at_most=600.0),
    ]
    reasons = [f"{row.name}: {row.status}: {row.reason}" for row in result.candidates if row.reason]
    return arms, targets, reasons


def list_times(gain: Comparison) -> tuple[float, float]:
    low_pct, high_pct = gain.ci_pct
    return 1 + low_pct / 100, 1 + high_pct / 100


def _run_exhaustive(out: Path) -> tuple[list[Arm], list[Target], list[str]]:
    words = ("benchmarks._infer_encoder:small", *LENIENT, "--budget")
    found, found_s = search(*words, BUDGET, out=out / "found")
    best, best_s = search(*words, "12h", "--exhaustive", out=out / "best")
    compared = compare_chosen(best, found, n_groups=8)
    low, high = (-pct for pct in reversed(compared.ci_pct))
    arm = Arm(
        case="encoder of depth 2 and width 128, the same texts",
        arm=found.chosen,
        metric="regret_pct",
        median=-compared.gain_pct,
        ci95=(low, high),
        n=compared.n_groups,
        unit_of_replication="group of fresh processes in turns",
        note=f"exhaustive: {best.chosen}, {best.find(best.chosen).policy}; found: {found.find(found.chosen).policy}",
    )
    targets = [
        judge("regret against the exhaustive search, % (T3)", -compared.gain_pct, (low, high), at_most=5.0),
        judge("share of the exhaustive search's time, % (T3)", 100 * found_s / best_s, None, at_most=25.0),
    ]
    return [arm], targets, [f"exhaustive: {best_s:.0f} s, {len(best.candidates)} plans; search: {found_s:.0f} s"]
