"""What keeping freed memory is worth on the CPU, beside what else is advised against the same cost.

Every block is a process of its own: how much a process gives back and takes again differs from one to the next, and so
does its speed. The others: torch's own ``THP_MEM_ALLOC_ENABLE=1`` (large pages), and jemalloc and tcmalloc in glibc's
place (``LD_PRELOAD``), as torch's own launcher puts them there, where their libraries are installed.
"""

from __future__ import annotations

import ctypes.util
import math
from collections.abc import Mapping, Sequence

from benchmarks._rounds import Round, compute_means, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm, judge
from benchmarks._speed_probe import start_probe

NAME = "retain_memory"
CLAIM = "Keeping freed memory makes training on the CPU as fast at least as without it."
NEEDS_PEERS = False
DEVICES = ("cpu",)

PLAIN, OURS = "as torch has it", "retain_freed_memory"
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE=1"
LAUNCHER = "torch.backends.xeon.run_cpu"
ALLOCATORS: Mapping[str, Mapping[str, str]] = {  # with what torch's launcher sets beside them
    "jemalloc": {"MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto"},
    "tcmalloc_minimal": {},
}
FASTER = "times_as_fast"
N_ROUNDS = 6  # the fewest whose median has an interval
LEAST_RATIO = 1.0

CASES: Mapping[str, tuple[str, ...]] = {  # model, batch size, channels, side in pixels
    "small CNN, 64 images of 8 px": ("small_cnn(width=32)", "64", "1", "8"),
    "small CNN, 64 images of 96 px": ("small_cnn(width=32)", "64", "3", "96"),
    "resnet18, 32 images of 64 px": ("resnet18", "32", "3", "64"),
}
"""A quick run takes the first."""


def run(context: Context) -> Findings:
    ways, missing = find_ways()
    arms, targets = [], []
    for case in list(CASES)[: 1 if context.quick else None]:
        rounds = run_rounds(
            list(ways),
            lambda way, case=case: start_probe(CASES[case], *ways[way], device="cpu"),
            n_rounds=1 if context.quick else N_ROUNDS,
        )
        arms += build_arms(case, rounds)
        (ratio,) = (arm for arm in arms if (arm.case, arm.arm, arm.metric) == (case, OURS, FASTER))
        targets.append(judge(f"{case}: times as fast", ratio.median, ratio.ci95, at_least=LEAST_RATIO))
    notes = (
        f"an allocator in glibc's place as {LAUNCHER} has it; not installed here: {', '.join(missing) or 'none'}",
        "the spread is the largest speed of a process over the smallest, of one arm and case; data are zeros in memory",
    )
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=notes)


def find_ways() -> tuple[dict[str, tuple[Mapping[str, object], Mapping[str, str]]], list[str]]:
    """Arm → its settings and its environment, and the allocators that are not installed."""
    ways: dict[str, tuple[Mapping[str, object], Mapping[str, str]]] = {
        PLAIN: ({}, {}),
        OURS: ({"speed": {"retain_freed_memory": True}}, {}),
        LARGE_PAGES: ({}, {"THP_MEM_ALLOC_ENABLE": "1"}),
    }
    libraries = {name: ctypes.util.find_library(name) for name in ALLOCATORS}
    ways |= {name: ({}, {"LD_PRELOAD": library, **ALLOCATORS[name]}) for name, library in libraries.items() if library}
    return ways, [name for name, library in libraries.items() if not library]


def build_arms(case: str, rounds: Sequence[Round[dict[str, float]]]) -> list[Arm]:
    """Figures of each arm, a round each; how far its processes lie apart; last, times as fast as the plain one."""
    arms = []
    for way in rounds[0]:
        common = {"case": case, "arm": way, "unit_of_replication": "round of two processes"}
        for metric in rounds[0][PLAIN][0]:
            values = compute_means(rounds, way, lambda found, metric=metric: found[metric])
            arms.append(build_arm(values, metric=metric, **common))
        rates = [found["samples_per_s"] for blocks in rounds for found in blocks[way]]
        spread = [max(rates) / min(rates)]
        arms.append(build_arm(spread, case=case, arm=way, metric="spread_ratio", unit_of_replication="all processes"))
    return [*arms, *(_build_ratio(case, way, rounds) for way in rounds[0])]


def _build_ratio(case: str, way: str, rounds: Sequence[Round[dict[str, float]]]) -> Arm:
    logs = {name: compute_means(rounds, name, lambda found: math.log(found["samples_per_s"])) for name in (way, PLAIN)}
    ratios = [math.exp(a - b) for a, b in zip(logs[way], logs[PLAIN], strict=True)]
    return build_arm(ratios, case=case, arm=way, metric=FASTER, unit_of_replication="round of two processes")
