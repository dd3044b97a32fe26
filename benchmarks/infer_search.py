"""Measure what ``fulltilt infer search`` finds for texts of many lengths, and what looking at less costs.

The first case has the model, the lengths and the naive baseline of the survey's table, all in one run and in turns.
The second runs the search and the exhaustive one, which measures every plan with every batching, and has what both
chose take turns.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path

from benchmarks._infer_tools import Contestant, Searched, compare_in_turns, read_chosen, search
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge
from fulltilt.config import config_for_object
from fulltilt.infer.artefact import read_manifest, write_manifest
from fulltilt.infer.check import plan_check
from fulltilt.infer.joining import join_samples, read_samples, write_samples
from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.candidates import list_combinations
from fulltilt.infer.search.result import Candidate
from fulltilt.infer.search.run import run_search
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
MOST_S = 600.0  # of a search
SHARE = 0.24  # of the exhaustive one, as a budget: what a search does after it fits into the rest of a quarter
SMALL = "benchmarks._infer_encoder:small"
UNIT = "group of fresh processes in turns"
N_FAST, N_AGAIN = 3, 2  # of a candidate's 21 policies, so many fast ones are measured in so many further groups
N_NAIVE, NAIVE_BATCH = 6, 16
N_REGRET = 20


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
        """Measure all policies of a candidate beside eager, the fastest again, and take the best."""
        row, own = self.candidates[name], self.candidates[self.base].policy
        policies = self.list_policies()
        found: list[Evidence[str]] = [Evidence() for _ in policies]
        asked, gains = list(range(len(policies))), [0.0]
        for number in range(1 + N_AGAIN):
            stages = [self.order_passes([(self.base, own), (name, policies[at])]) for at in asked]
            group = self.measure(f"policies {number}", [self.base, name], stages, PROOF_S, math.inf)
            if not row.is_alive:
                return
            for at, turns in zip(asked, group.stages, strict=True):
                found[at].add(turns)
            gains = [evidence.compare(self.base, name).speedup for evidence in found]
            asked = sorted(asked, key=lambda at: -gains[at])[:N_FAST]
        best, eager = asked[0], self.candidates[self.base]
        row.policy, row.samples_per_s = policies[best], gains[best] * (eager.samples_per_s or 1.0)


def run(context: Context) -> Findings:
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        out = Path(folder)
        found = [_run_mix(out / "mix"), *([] if context.quick else [_run_exhaustive(out)])]
    return Findings(
        arms=tuple(arm for arm, _, _ in found),
        targets=tuple(target for _, targets, _ in found for target in targets),
        notes=tuple(note for _, _, notes in found for note in notes),
    )


def _run_mix(out: Path) -> tuple[Arm, list[Target], list[str]]:
    result, seconds = search("benchmarks._infer_encoder:workload", *LENIENT, "--budget", f"{MOST_S:.0f}s", out=out)
    chosen, eager = read_chosen(result), Path(result.out_dir) / "artefacts" / "eager-fp32"
    naive = Contestant(pad_samples(eager), {**chosen.order, "policy": encode(Policy(max_batch=NAIVE_BATCH))})
    gain, times = compare_in_turns(naive, chosen, n_groups=N_NAIVE)
    arm = build_arm(
        times,
        case="encoder of MiniLM's size, 256 texts of 4 to 128 words",
        arm=result.chosen,
        metric="times_naive_eager",
        unit_of_replication=UNIT,
        note=f"policy {result.find(result.chosen).policy}",
    )
    targets = [
        judge("times naive eager fp32 (T2)", gain.speedup, list_times(gain), at_least=5.0),
        judge("seconds of the search (T3)", seconds, None, at_most=MOST_S),
    ]
    return arm, targets, [_describe(row) for row in result.candidates if row.gain or row.reason]


def pad_samples(artefact: Path) -> Path:
    """Copy an artefact, all of its samples padded to the longest → the copy."""
    padded = artefact.with_name(f"{artefact.name}-padded")
    shutil.copytree(artefact, padded)
    manifest, samples = read_manifest(padded), read_samples(padded)
    joined = zip(*join_samples(samples, manifest.inputs), strict=True)
    write_samples(padded, [*joined])
    write_manifest(padded, manifest)
    return padded


def _describe(row: Candidate) -> str:
    if row.gain is None:
        return f"{row.name}: {row.status}: {row.reason}"
    low, high = list_times(row.gain)
    return (
        f"{row.name}: {row.status}, {row.gain.speedup:.3g} times eager with its best policy ({low:.3g} to {high:.3g})"
    )


def list_times(gain: Comparison) -> tuple[float, float]:
    low_pct, high_pct = gain.ci_pct
    return 1 + low_pct / 100, 1 + high_pct / 100


def _search_exhaustively(out: Path) -> Searched:
    checked = plan_check(config_for_object(SMALL, [*LENIENT]), needs_targets=False)
    out.mkdir(parents=True, exist_ok=True)
    told = {"budget_s": 12 * 3600.0, "artefact": out / "chosen", "on_progress": lambda done, total, part: None}
    result = run_search(checked, None, out, **told, kind=Exhaustive)
    return Searched(result, result.seconds)


def _run_exhaustive(out: Path) -> tuple[Arm, list[Target], list[str]]:
    best, best_s = _search_exhaustively(out / "best")
    budget_s = min(SHARE * best_s, MOST_S)
    found, found_s = search(SMALL, *LENIENT, "--budget", f"{budget_s:.0f}s", out=out / "found")
    compared, times = compare_in_turns(read_chosen(best), read_chosen(found), n_groups=N_REGRET)
    arm = build_arm(
        [100 * (1 - share) for share in times],
        case="encoder of depth 2 and width 128, the same texts",
        arm=found.chosen,
        metric="regret_pct",
        unit_of_replication=UNIT,
        note=f"exhaustive: {best.chosen}, {best.find(best.chosen).policy}; found: {found.find(found.chosen).policy}",
    )
    low_pct, high_pct = compared.ci_pct
    regret = judge(
        "regret against the exhaustive search, % (T3)", -compared.gain_pct, (-high_pct, -low_pct), at_most=5.0
    )
    share = judge("share of the exhaustive search's time, % (T3)", 100 * found_s / best_s, None, at_most=25.0)
    said = f"exhaustive: {best_s:.0f} s, {len(best.candidates)} plans; search: {found_s:.0f} s"
    return arm, [regret, share], [said]
