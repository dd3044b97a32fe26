"""What the training loop costs a step, beside a hand-written loop and the loops of other libraries.

Each block trains a new model through one library's own entry point; see ``_loops`` for the arms and ``_rounds`` for
the order. The figure is the difference to the hand-written loop in the same round.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch

from benchmarks import _loops
from benchmarks._loops import AGAIN, ARMS, NOTES, OURS, PEERS, REFERENCE, Block, Case
from benchmarks._rounds import compute_differences, compute_differences_pct, compute_means, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge

NAME = "loop_overhead"
CLAIM = "The training loop adds at most 1 % to a step of 10 ms, and at most 30 µs to any step."
NEEDS_PEERS = True
DEVICES = ("cpu",)

LIMIT_PCT = 1.0
LIMIT_US = 30.0
STEPS_MS = {"step 1 ms": 1.0, "step 10 ms": 10.0}
REPLICATION = "round of two blocks an arm, interleaved, each on a new model"

READERS: dict[str, Callable[[Block], float]] = {
    "wall": lambda block: block.wall_us,
    "cpu": lambda block: block.cpu_us,
}


def run(context: Context) -> Findings:
    torch.set_num_threads(1)
    names = [name for name in ARMS if name not in PEERS or importlib.util.find_spec(PEERS[name])]
    _loops.load_peers(names)
    arms: list[Arm] = []
    targets: list[Target] = []
    notes = list(_describe_method())
    for case in build_cases(quick=context.quick):
        rounds = run_rounds(
            names, lambda arm, case=case: _loops.measure_block(arm, case), n_rounds=3 if context.quick else 24
        )
        arms += describe_rounds(rounds, names, case)
        targets += judge_rounds(rounds, case)
        notes.append(f"{case.name}: width {case.width}, {case.n_steps} timed steps a block after {case.n_warmup}")
    missing = [name for name in ARMS if name not in names]
    if missing:
        notes.append(f"not installed here and left out: {', '.join(missing)}")
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=tuple(notes))


def build_cases(*, quick: bool) -> list[Case]:
    """Models sized so that a step of the hand-written loop takes what the case says, on this machine, now."""
    cases = []
    for name, step_ms in STEPS_MS.items():
        width = _loops.calibrate_width(step_ms, n_tries=2 if quick else 5)
        n_steps = max(20, round(150 / step_ms))
        cases.append(Case(name=name, width=width, n_warmup=max(5, n_steps // 8), n_steps=n_steps))
    return cases


def describe_rounds(rounds: Sequence[dict[str, tuple[Block, Block]]], names: Sequence[str], case: Case) -> list[Arm]:
    """The reference's own time, then every other arm's difference to it, by wall clock and by CPU time."""
    arms: list[Arm] = []
    for clock, read in READERS.items():
        values = [us / 1000 for us in compute_means(rounds, REFERENCE, read)]
        arms.append(_build(values, case, REFERENCE, f"step_{clock}_ms"))
    for name in names:
        if name == REFERENCE:
            continue
        for clock, read in READERS.items():
            us = compute_differences(rounds, name, REFERENCE, read)
            pct = compute_differences_pct(rounds, name, REFERENCE, read)
            arms.append(_build(us, case, name, f"overhead_{clock}_us_per_step"))
            arms.append(_build(pct, case, name, f"overhead_{clock}_pct"))
    waits = compute_means(rounds, OURS, lambda block: block.waits)
    arms.append(_build(waits, case, OURS, "voluntary_context_switches_per_step"))
    return arms


def judge_rounds(rounds: Sequence[dict[str, tuple[Block, Block]]], case: Case) -> list[Target]:
    """Held against CPU time; the reason is in the notes."""
    read = READERS["cpu"]
    us = _build(compute_differences(rounds, OURS, REFERENCE, read), case, OURS, "us")
    again = _build(compute_differences(rounds, AGAIN, REFERENCE, read), case, AGAIN, "us")
    note = f"the hand-written loop against itself: {again.median:.1f} ({again.ci95[0]:.1f} to {again.ci95[1]:.1f}) µs"
    targets = [judge(f"{case.name}: overhead, µs a step", us.median, us.ci95, at_most=LIMIT_US, note=note)]
    if STEPS_MS[case.name] >= 10:
        pct = _build(compute_differences_pct(rounds, OURS, REFERENCE, read), case, OURS, "pct")
        targets.append(judge(f"{case.name}: overhead, %", pct.median, pct.ci95, at_most=LIMIT_PCT, note=note))
    return targets


def _build(values: Sequence[float], case: Case, name: str, metric: str) -> Arm:
    return build_arm(values, case=case.name, arm=name, metric=metric, unit_of_replication=REPLICATION, note=NOTES[name])


def _describe_method() -> tuple[str, ...]:
    return (
        f"MLP of {_loops.N_HIDDEN_LAYERS} hidden layers, batch {_loops.BATCH_SIZE}, cross entropy, AdamW, fp32, no "
        "accumulation, 1 thread; every arm iterates the same DataLoader over rows in memory (no workers, whole-batch "
        "reads, shuffled)",
        "the clocks are read in the dataset, when it is asked for the first and for the last of the timed batches",
        "targets are held against CPU time of the process, which leaves out what other processes took; it would not "
        "see a loop that waits, so the times a step gives the core back by itself are counted, and wall time is given",
    )
