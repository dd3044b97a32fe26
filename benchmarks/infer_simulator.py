"""How well the simulated queue predicts p99 of a served model under Poisson arrivals, at six loads.

The surface is that of a search; what calls take longer in a server, what a request takes beside the model, and how long
it keeps the model from others, is measured in the server at two loads, by the first seconds of the same arrivals. Each
load is a real server and a real client process over HTTP; of three loads, in turns with the others, the median counts,
because one stall of the machine decides a p99. Loads are shares of the capacity that the simulation finds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks._infer_calibration import calibrate, cut
from benchmarks._infer_tools import search
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm, judge, judge_median
from fulltilt.infer.search.accept import load_server, serve
from fulltilt.infer.search.policies import estimate_capacity
from fulltilt.infer.search.simulate import compute_quantile_s, draw_arrivals, simulate_responses_s

CLAIM = "The simulated queue predicts p99 of the served model within 15 % in the median, and 30 % at worst."
NEEDS_PEERS = False
DEVICES = ("cpu",)
SHARES = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8)  # of the most requests/s whose simulated p99 is below the limit
LIMIT_S = 0.1
SERVED_S, LOAD_S, N_LOADS = 5.0, 15.0, 3
N_REQUESTS, N_SIMULATED = 40_000, 5_000
LENIENT = ("inference.min_sqnr_db=20", "targets.samples_per_request=1")
WORKLOADS = {
    "digits": ("configs/targets.yaml", "targets.samples_per_request=1"),
    "encoder": ("benchmarks._infer_encoder:small", *LENIENT),
    "encoder of MiniLM's size": ("benchmarks._infer_encoder:workload", *LENIENT),
}


def run(context: Context) -> Findings:
    arms: list[Arm] = []
    errors, repeats, notes = list[float](), list[float](), list[str]()
    for name, words in WORKLOADS.items():
        with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
            said, found = _compare(name, words, Path(folder), context)
        notes.append(f"{name}: {said}")
        for share, predicted_ms, measured_ms in found:
            case, live_ms = f"{name} at {100 * share:.0f} % of capacity", statistics.median(measured_ms)
            print(f"{case}: p99 {predicted_ms:.1f} ms simulated, {measured_ms} live", file=sys.stderr, flush=True)
            errors.append(abs(100 * (predicted_ms / live_ms - 1)))
            repeats += _compare_loads([*filter(math.isfinite, measured_ms)])
            common = {"case": case, "metric": "response_p99_ms", "unit_of_replication": f"load of {LOAD_S:g} s"}
            for arm, each_ms in (("simulated", [predicted_ms]), ("live", measured_ms)):
                if answered_ms := [*filter(math.isfinite, each_ms)]:  # else over 1 % were never answered
                    arms.append(build_arm(answered_ms, arm=arm, **common))
    targets = (
        judge_median("error of p99, median % (T5)", errors, at_most=15.0),
        judge("error of p99, worst % (T5)", max(errors), None, at_most=30.0),
    )
    notes.append(f"mean error {statistics.fmean(errors):.1f} %")
    if repeats:
        middle_pct, worst_pct = statistics.median(repeats), max(repeats)
        notes.append(f"a live load by the others at its rate: median {middle_pct:.0f} %, worst {worst_pct:.0f} %")
    return Findings(arms=tuple(arms), targets=targets, notes=tuple(notes))


def _compare_loads(measured_ms: list[float]) -> list[float]:
    """Compute by how many percent the others at its rate miss each load: the error of measuring again."""
    if len(measured_ms) < 2:
        return []
    total_ms, n_others = sum(measured_ms), len(measured_ms) - 1
    return [abs(100 * ((total_ms - own_ms) / n_others / own_ms - 1)) for own_ms in measured_ms]


def _compare(
    name: str, words: tuple[str, ...], out: Path, context: Context
) -> tuple[str, list[tuple[float, float, list[float]]]]:
    """Return what was served, and for each rate its share of capacity, p99 predicted and p99s measured, in ms."""
    result, _ = search(*words, "--budget", "3m", out=out)
    row, goal = result.find(result.chosen), result.goal
    assert row.policy is not None
    arrivals, found = draw_arrivals(result.lengths, goal.samples_per_request, n=N_REQUESTS), []
    with serve(Path(result.artefact), out / "serve.log") as url:
        served = load_server(url, goal, None, seconds=SERVED_S).build_outcome().answered_per_s
        service = calibrate(url, row, goal, arrivals, served)
        asked = dataclasses.replace(goal, quantile=0.99, limit_s=LIMIT_S)
        capacity = estimate_capacity(cut(arrivals, N_SIMULATED), row.policy, service, asked, served)
        assert capacity > 0, f"{name} keeps {1000 * LIMIT_S:g} ms at no load"
        said = f"{row.name}, {served:.0f}/s served, {capacity:.0f}/s capacity"
        print(f"{name}: {said}", file=sys.stderr, flush=True)
        shares = SHARES[::3] if context.quick else SHARES
        live = {share: [] for share in shares}
        for share in shares * (1 if context.quick else N_LOADS):
            live[share].append(load_server(url, goal, share * capacity, seconds=LOAD_S).build_outcome())
    for share, outcomes in live.items():
        same = cut(arrivals, outcomes[0].n_requests)
        predicted_s = compute_quantile_s(simulate_responses_s(same, share * capacity, row.policy, service), 0.99)
        found.append((share, 1000 * predicted_s, [outcome.response_ms["p99"].measured for outcome in outcomes]))
    return said, found
