"""What training reproducibly costs, and what fast mode gains: the same steps in either mode.

Reproducible is ``run.deterministic``; fast, which only a GPU has, lets cuDNN time its kernels and multiplies in TF32.
Every block is a process of its own: the modes are flags of the whole process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks._rounds import Round, compute_means, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm
from benchmarks._speed_probe import start_probe

NAME = "mode_cost"
CLAIM = "What reproducible training costs in speed and, on a GPU, what fast mode gains."
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

PLAIN, AGAIN = "neither", "neither, again"
MODES: Mapping[str, Mapping[str, object]] = {
    PLAIN: {},
    AGAIN: {},
    "deterministic": {"run": {"deterministic": True}},
}
FAST: Mapping[str, Mapping[str, object]] = {"fast": {"speed": {"cudnn_benchmark": True, "precision": "tf32"}}}
CASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {  # model, batch size, channels, side in pixels
    "cpu": {
        "small CNN, 64 images of 32 px": ("small_cnn(width=32)", "64", "3", "32"),
        "resnet18, 16 images of 32 px": ("resnet18", "16", "3", "32"),
    },
    "cuda": {
        "small CNN, 512 images of 32 px": ("small_cnn(width=32)", "512", "3", "32"),
        "resnet18, 256 images of 64 px": ("resnet18", "256", "3", "64"),
    },
}
"""A quick run takes the first."""
N_ROUNDS = 6  # the fewest whose median has an interval
REPLICATION = "round of two processes"


def run(context: Context) -> Findings:
    modes = {**MODES, **(FAST if context.device == "cuda" else {})}
    arms: list[Arm] = []
    for case, sizes in list(CASES[context.device].items())[: 1 if context.quick else None]:
        rounds = run_rounds(
            list(modes),
            lambda mode, sizes=sizes: start_probe(sizes, modes[mode], {}, device=context.device)["samples_per_s"],
            n_rounds=1 if context.quick else N_ROUNDS,
        )
        arms += build_arms(case, rounds)
    notes = (
        "times as fast: of the median step, over neither mode in the same round; neither against itself is what the "
        "method calls a difference where there is none",
        "data are zeros in memory",
    )
    return Findings(arms=tuple(arms), targets=(), notes=notes)


def build_arms(case: str, rounds: Sequence[Round[float]]) -> list[Arm]:
    """Speed of each mode, and times as fast as neither."""
    rates = {mode: compute_means(rounds, mode, float) for mode in rounds[0]}
    arms = [
        build_arm(values, case=case, arm=mode, metric="samples_per_s", unit_of_replication=REPLICATION)
        for mode, values in rates.items()
    ]
    logs = {mode: compute_means(rounds, mode, math.log) for mode in rounds[0]}
    for mode in list(rounds[0])[1:]:
        ratios = [math.exp(a - b) for a, b in zip(logs[mode], logs[PLAIN], strict=True)]
        arms.append(build_arm(ratios, case=case, arm=mode, metric="times_as_fast", unit_of_replication=REPLICATION))
    return arms
