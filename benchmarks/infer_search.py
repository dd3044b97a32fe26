"""Measure what ``fulltilt infer search`` finds for texts of many lengths, and what looking at less costs.

The first case has the model, the lengths and the naive baseline of the survey's table, all in one run and in turns.
The second runs the search and the exhaustive one, which measures every plan with every batching, and has what both
chose take turns.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

from benchmarks._infer_tools import Searched, compare_chosen, order_of, search, take_turns
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, judge
from fulltilt.config import config_for_object
from fulltilt.infer.check import plan_check
from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.candidates import list_combinations
from fulltilt.infer.search.result import SearchResult
from fulltilt.infer.search.run import SearchPlan, plan_goal, run_search
from fulltilt.infer.search.search import PROOF_S, Search
from fulltilt.records import encode
from fulltilt.stats import Comparison, Evidence

CLAIM = (
    "The search finds, by itself, a way at least 5 times as fast as eager fp32 in order of arrival padded to the "
    "longest, and loses at most 5 % to measuring everything, in a quarter of the time and within ten minutes."
)
NEEDS_PEERS = False
DEVICES = ("cpu",)
# Weights are random, so errors are judged without a metric; ONNX Runtime's int8 is 25 to 31 dB here.
LENIENT = ("inference.min_sqnr_db=20",)
BUDGET = "10m"
SMALL = "benchmarks._infer_encoder:small"
N_GROUPS = 4  # of each candidate in the exhaustive search
N_NAIVE, NAIVE_BATCH = 6, 16


class Exhaustive(Search):
    """Measures every plan with every policy in turns with eager, without a surface and without halving."""

    def run(self) -> None:
        self.start()
        plans, self.not_applicable = list_combinations(self.catalogue, self.facts, self.baseline, self.catalogue)
        names = self.build(plans, end_s=self.budget_s)
        self.look([], is_coarse=True, n_groups=1, end_s=self.budget_s)
        for name in names:
            self._measure_policies(name)
        self.finish(names)

    def _measure_policies(self, name: str) -> None:
        """Measure all policies of a candidate, eager beside it with its best one, and take the best."""
        row, own = self.candidates[name], self.candidates[self.base].policy
        policies = self.list_policies(row.plan)
        stages = [self.order_passes([(self.base, own), (name, policy)]) for policy in policies]
        found: list[Evidence[str]] = [Evidence() for _ in policies]
        for number in range(N_GROUPS):
            group = self.measure(f"policies {number}", [self.base, name], stages, PROOF_S, math.inf)
            if not row.is_alive:
                return
            for evidence, turns in zip(found, group.stages, strict=True):
                evidence.add(turns)
        rates = [self.estimate_rate(evidence, name) for evidence in found]
        row.samples_per_s, row.policy = max(zip(rates, policies, strict=True), key=lambda pair: pair[0])


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
    gain = compare_naive(result)
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


def compare_naive(result: SearchResult) -> Comparison:
    """Compare what was chosen with eager fp32 in order of arrival, padded to the longest, in turns."""
    padded = Policy(max_batch=NAIVE_BATCH, length_multiple=max(result.lengths))
    orders = {"naive": {"policy": encode(padded), "n_samples": 256, "in_order": True}, "chosen": order_of(result, 256)}
    out, evidence = Path(result.out_dir), Evidence[str]()
    folders = {"naive": out / "artefacts" / "eager-fp32", "chosen": Path(result.artefact)}
    for _ in range(N_NAIVE):
        evidence.add(take_turns(folders, orders))
    return evidence.compare("naive", "chosen")


def list_times(gain: Comparison) -> tuple[float, float]:
    low_pct, high_pct = gain.ci_pct
    return 1 + low_pct / 100, 1 + high_pct / 100


def _search_exhaustively(out: Path) -> Searched:
    config = config_for_object(SMALL, [*LENIENT])
    checked, begin_s = plan_check(config, needs_targets=False), time.monotonic()
    out.mkdir(parents=True)
    plan = SearchPlan(
        config=config,
        name=checked.name,
        goal=plan_goal(config, checked.targets, checked.load),
        device=checked.device,
        weights=None,
        budget_s=12 * 3600.0,
    )
    result = run_search(plan, out, on_progress=lambda done, total, part: None, kind=Exhaustive)
    return Searched(result, time.monotonic() - begin_s)


def _run_exhaustive(out: Path) -> tuple[list[Arm], list[Target], list[str]]:
    words = (SMALL, *LENIENT, "--budget")
    found, found_s = search(*words, BUDGET, out=out / "found")
    best, best_s = _search_exhaustively(out / "best")
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
