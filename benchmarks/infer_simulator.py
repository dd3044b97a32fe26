"""How well the simulated queue predicts p99 of a served model under Poisson arrivals, at six loads.

The surface is that of a search; what a request takes beside the model, and how long it keeps the model from others, is
measured in the server at two loads, by the first seconds of the same arrivals. Each load is a real server and a real
client process over HTTP.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks._infer_tools import search
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm, judge, judge_median
from fulltilt.infer.search.accept import calibrate, load_server, serve
from fulltilt.infer.search.simulate import compute_quantile_s, draw_arrivals, simulate_responses_s

CLAIM = "The simulated queue predicts p99 of the served model within 15 % in the median, and 30 % at worst."
NEEDS_PEERS = False
DEVICES = ("cpu",)
SHARES = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8)  # of what the server answers with requests waiting
SERVED_S, LOAD_S = 5.0, 30.0
CALIBRATED = 0.5  # of it, too: the load at which the simulation is fitted
N_REQUESTS = 40_000
WORKLOADS = {
    "digits": ("configs/targets.yaml", "targets.samples_per_request=1"),
    "encoder": ("benchmarks._infer_encoder:small", "inference.min_sqnr_db=20", "targets.samples_per_request=1"),
}


def run(context: Context) -> Findings:
    arms: list[Arm] = []
    errors: list[float] = []
    for name, words in WORKLOADS.items():
        with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
            found = _compare(name, words, Path(folder), context)
        for share, predicted_ms, measured_ms in found:
            case = f"{name} at {100 * share:.0f} % of what is served"
            print(f"{case}: p99 {predicted_ms:.1f} ms simulated, {measured_ms:.1f} live", file=sys.stderr, flush=True)
            errors.append(abs(100 * (predicted_ms / measured_ms - 1)))
            common = {"case": case, "metric": "response_p99_ms", "unit_of_replication": "load of 30 s"}
            for arm, p99_ms in (("simulated", predicted_ms), ("live", measured_ms)):
                if math.isfinite(p99_ms):  # else over 1 % of the requests were never answered
                    arms.append(build_arm([p99_ms], arm=arm, **common))
    targets = (
        judge_median("error of p99, median % (T5)", errors, at_most=15.0),
        judge("error of p99, worst % (T5)", max(errors), None, at_most=30.0),
    )
    return Findings(arms=tuple(arms), targets=targets, notes=(f"mean error {statistics.fmean(errors):.1f} %",))


def _compare(name: str, words: tuple[str, ...], out: Path, context: Context) -> list[tuple[float, float, float]]:
    """Return (share, predicted p99, measured p99) in milliseconds for each load."""
    result, _ = search(*words, "--budget", "3m", out=out)
    row, goal = result.find(result.chosen), result.goal
    assert row.policy is not None
    arrivals, found = draw_arrivals(result.lengths, goal.samples_per_request, n=N_REQUESTS), []
    with serve(Path(result.artefact), out / "serve.log") as url:
        served = load_server(url, goal, None, seconds=SERVED_S).build_outcome().answered_per_s
        service = calibrate(url, row, goal, arrivals, CALIBRATED * served)
        for share in SHARES[::3] if context.quick else SHARES:
            measured = load_server(url, goal, share * served, seconds=LOAD_S).build_outcome()
            same = arrivals.cut(measured.n_requests)
            predicted_s = compute_quantile_s(simulate_responses_s(same, share * served, row.policy, service), 0.99)
            found.append((share, 1000 * predicted_s, measured.response_ms["p99"].measured))
    return found
