"""What training reproducibly costs, and what fast mode gains: the same steps in either mode.

Reproducible is ``run.deterministic``; fast, which only a GPU has, lets cuDNN time its kernels and multiplies in TF32.
Every block is a process of its own: the modes are flags of the whole process.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm
from benchmarks._speed_probe import Size, Way, compare_ways

CLAIM = "What reproducible training costs in speed and, on a GPU, what fast mode gains."
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

PLAIN, AGAIN = "neither", "neither, again"
MODES: Mapping[str, Mapping[str, object]] = {PLAIN: {}, AGAIN: {}, "deterministic": {"run": {"deterministic": True}}}
FAST: Mapping[str, Mapping[str, object]] = {"fast": {"speed": {"cudnn_benchmark": True, "precision": "tf32"}}}
CASES: Mapping[str, Mapping[str, Size]] = {
    "cpu": {
        "small CNN, 64 images of 32 px": Size("small_cnn(width=32)", 64, 3, 32),
        "resnet18, 16 images of 32 px": Size("resnet18", 16, 3, 32),
    },
    "cuda": {
        "small CNN, 512 images of 32 px": Size("small_cnn(width=32)", 512, 3, 32),
        "resnet18, 256 images of 64 px": Size("resnet18", 256, 3, 64),
    },
}
"""A quick run takes the first."""


def run(context: Context) -> Findings:
    modes = MODES | (FAST if context.device == "cuda" else {})
    ways: dict[str, Way] = {name: (values, {}) for name, values in modes.items()}
    arms: list[Arm] = []
    for case, size in list(CASES[context.device].items())[: 1 if context.quick else None]:
        arms += compare_ways(case, size, ways, device=context.device, quick=context.quick, metrics=("samples_per_s",))
    notes = (
        "times as fast: of the median step, over neither mode in the same round; neither against itself is what the "
        "method calls a difference where there is none",
        "data are zeros in memory",
    )
    return Findings(arms=tuple(arms), targets=(), notes=notes)
