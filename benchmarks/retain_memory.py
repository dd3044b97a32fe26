"""What keeping freed memory is worth on the CPU, beside what else is advised against the same cost.

Every block is a process of its own, as how much a process gives back and takes again differs from one to the next, and
so does its speed. The others: torch's own ``THP_MEM_ALLOC_ENABLE=1`` (large pages), and jemalloc and tcmalloc in the
place of glibc (``LD_PRELOAD``), as torch's own launcher puts them there, where their libraries are installed.
"""

from __future__ import annotations

import ctypes.util
from collections.abc import Mapping, Sequence

from benchmarks import _rounds
from benchmarks._rounds import Round, compute_geometric_ratios, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm, judge
from benchmarks._speed_probe import Size, start_probe

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

CASES: Mapping[str, Size] = {
    "small CNN, 64 images of 8 px": Size("small_cnn(width=32)", 64, 1, 8),
    "small CNN, 64 images of 96 px": Size("small_cnn(width=32)", 64, 3, 96),
    "resnet18, 32 images of 64 px": Size("resnet18", 32, 3, 64),
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
        "data are zeros in memory",
    )
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=notes)


def find_ways() -> tuple[dict[str, tuple[Mapping[str, object], Mapping[str, str]]], list[str]]:
    """Return the settings and the environment of each arm, and the allocators that are not installed."""
    ways: dict[str, tuple[Mapping[str, object], Mapping[str, str]]] = {
        PLAIN: ({}, {}),
        OURS: ({"speed": {"retain_freed_memory": True}}, {}),
        LARGE_PAGES: ({}, {"THP_MEM_ALLOC_ENABLE": "1"}),
    }
    libraries = {name: ctypes.util.find_library(name) for name in ALLOCATORS}
    ways |= {name: ({}, {"LD_PRELOAD": library, **ALLOCATORS[name]}) for name, library in libraries.items() if library}
    return ways, [name for name, library in libraries.items() if not library]


def build_arms(case: str, rounds: Sequence[Round[dict[str, float]]]) -> list[Arm]:
    """Build arms for the figures of each way, and for its speedup."""
    common = {"case": case, "unit_of_replication": "round of two processes"}
    arms = []
    for metric in rounds[0][PLAIN][0]:
        arms += _rounds.build_arms(rounds, lambda found, metric=metric: found[metric], metric=metric, **common)
    rates = [{way: (a["samples_per_s"], b["samples_per_s"]) for way, (a, b) in blocks.items()} for blocks in rounds]
    for way in rounds[0]:
        arms.append(build_arm(compute_geometric_ratios(rates, way, PLAIN), arm=way, metric=FASTER, **common))
    return arms
