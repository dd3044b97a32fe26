"""Whether searches of the same workload on the same machine end at the same plan.

The plan that most searches recommend is the one they are held against. A search agrees with it when it recommends it,
or when it names it as a tie of what it recommends. The other rule, in the same searches: the plan of the row with the
most samples per second, which is what a search without turns and ties would return.
"""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._duel import describe_plan
from benchmarks._runner import ROOT, Context, Findings
from benchmarks._schema import Arm, build_arm, judge
from benchmarks.plan_quality import Workload, find_fastest
from fulltilt.records import Plan
from fulltilt.tuner import TuneResult, tune

CLAIM = (
    "A search that is repeated 20 times ends at the same plan, or names it as a tie of its own, each time but one at "
    "most."
)
NEEDS_PEERS = False
DEVICES = ("cpu",)

N_SEARCHES = 20
MAX_EXCEPTIONS = 1
WORKLOAD = Workload(  # the space of the file itself, with batch sizes: 160 plans
    name="digits, small CNN",
    target=str(ROOT / "configs" / "digits.yaml"),
    settings={"run.device": "cpu", "benchmark.batch_sizes": [32, 64, 128, 256, 512]},
    axes=("batch_size", "num_workers", "threads", "channels_last", "fused_optimizer", "retain_freed_memory"),
)


def run(context: Context) -> Findings:
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        n_searches = 2 if context.quick else N_SEARCHES
        results = [
            tune(WORKLOAD.target, settings=WORKLOAD.settings, out=Path(folder) / f"search-{number}")
            for number in range(n_searches)
        ]
    arms, exceptions = judge_results(WORKLOAD, results)
    target = judge(
        f"searches of {n_searches} that end elsewhere without a tie", len(exceptions), None, at_most=MAX_EXCEPTIONS
    )
    counts = collections.Counter(result.picks.recommended.trial.plan for result in results)
    picks = "; ".join(f"{n} × {describe_plan(plan, WORKLOAD.axes)}" for plan, n in counts.most_common())
    stalled = [result.search.stalled_pct for result in results if result.search.stalled_pct is not None]
    notes = (
        f"{WORKLOAD.name}: {results[0].search.grid_size} plans; recommended: {picks}",
        f"steps stalled for up to {max(stalled, default=0.0):.0f} % of the seconds in which plans took turns",
    )
    return Findings(arms=tuple(arms), targets=(target,), notes=notes)


def judge_results(workload: Workload, results: Sequence[TuneResult]) -> tuple[list[Arm], list[int]]:
    """Build the arms of both rules, and number the searches, from 0, that disagree by the recommended plan."""
    recommended = [result.picks.recommended.trial.plan for result in results]
    usual = find_usual(recommended)
    fastest = [find_fastest(result.trials).plan for result in results]
    agreements = {
        "recommended, or a tie of it": [
            usual in (plan, *list_ties(result)) for plan, result in zip(recommended, results, strict=True)
        ],
        "recommended": [plan == usual for plan in recommended],
        "fastest row": [plan == find_usual(fastest) for plan in fastest],
    }
    arms = [
        build_arm(list(map(float, found)), case=workload.name, arm=arm, metric="agrees", unit_of_replication="search")
        for arm, found in agreements.items()
    ]
    figures = {
        "ties_named": [float(len(result.picks.recommended.tied_with)) for result in results],
        "groups": [float(result.search.n_groups) for result in results],
        "trials": [float(result.search.n_end_to_end) for result in results],
        "seconds": [result.search.seconds for result in results],
    }
    arms += [
        build_arm(values, case=workload.name, arm="search", metric=metric, unit_of_replication="search")
        for metric, values in figures.items()
    ]
    return arms, [number for number, agrees in enumerate(agreements["recommended, or a tie of it"]) if not agrees]


def list_ties(result: TuneResult) -> list[Plan]:
    """Return the plans that a search says its recommended one cannot be told from."""
    rows = {trial.id: trial.plan for trial in (*result.trials, *result.repeats)}
    return [rows[id] for id in result.picks.recommended.tied_with]


def find_usual(plans: Sequence[Plan]) -> Plan:
    """Return the one that comes up most; of equals, the first."""
    return collections.Counter(plans).most_common(1)[0][0]
