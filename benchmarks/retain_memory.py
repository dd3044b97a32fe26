"""What keeping freed memory is worth on the CPU, beside what else is advised against the same cost.

Every block is a process of its own, as how much a process gives back and takes again differs from one to the next, and
so does its speed. The others: torch's own ``THP_MEM_ALLOC_ENABLE=1`` (large pages), and jemalloc and tcmalloc in the
place of glibc (``LD_PRELOAD``), as torch's own launcher puts them there, where their libraries are installed.
"""

from __future__ import annotations

import ctypes.util
from collections.abc import Mapping

from benchmarks._runner import Context, Findings
from benchmarks._schema import judge
from benchmarks._speed_probe import FASTER, FIGURES, Size, Way, compare_ways

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
        found = compare_ways(case, CASES[case], ways, device="cpu", quick=context.quick, metrics=FIGURES)
        ratio = next(arm for arm in found if (arm.arm, arm.metric) == (OURS, FASTER))
        targets.append(judge(f"{case}: times as fast", ratio.median, ratio.ci95, at_least=LEAST_RATIO))
        arms += found
    notes = (
        f"an allocator in glibc's place as {LAUNCHER} has it; not installed here: {', '.join(missing) or 'none'}",
        "data are zeros in memory",
    )
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=notes)


def find_ways() -> tuple[dict[str, Way], list[str]]:
    """Return the settings and the environment of each arm, and the allocators that are not installed."""
    ways: dict[str, Way] = {
        PLAIN: ({}, {}),
        OURS: ({"speed": {"retain_freed_memory": True}}, {}),
        LARGE_PAGES: ({}, {"THP_MEM_ALLOC_ENABLE": "1"}),
    }
    libraries = {name: ctypes.util.find_library(name) for name in ALLOCATORS}
    ways |= {name: ({}, {"LD_PRELOAD": library, **ALLOCATORS[name]}) for name, library in libraries.items() if library}
    return ways, [name for name, library in libraries.items() if not library]
