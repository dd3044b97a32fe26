"""What the training loop costs a step, beside a hand-written loop and the loops of other libraries.

Each block trains a new model through one library's own entry point (``_loops``), in interleaved rounds (``_rounds``).
The figure is the difference to the hand-written loop in the same round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks import _loops
from benchmarks._loops import AGAIN, LIGHTNING_LISTENING, LOOPS, OURS, OURS_LISTENING, REFERENCE, Block, Case
from benchmarks._rounds import Round, compute_differences, compute_differences_pct, compute_means, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, compute_bounds, describe_interval, judge_median

CLAIM = (
    "The training loop adds at most 1 % to a step of 10 ms, and at most 30 µs to any step, 50 µs with metrics, CSV "
    "and progress."
)
NEEDS_PEERS = True
DEVICES = ("cpu", "cuda")

LIMIT_PCT = 1.0
LIMIT_US = 30.0
LISTENING_LIMIT_US = 50.0
SMALLEST = "smallest step"
STEPS_MS = {SMALLEST: 0.3, "step 1 ms": 1.0, "step 10 ms": 10.0}
SMALLEST_BATCH = 8
JUDGED = (AGAIN, OURS)
N_CORE_ROUNDS = 30  # the targets lie at 0.3 % of a step
N_OTHER_ROUNDS = 12
N_LISTENING_ROUNDS = 12
N_LISTENING_PEER_ROUNDS = 6  # the fewest that bound a median; a round takes the 1 ms case 17 s
LISTENING_BLOCK_MS = 2000  # twice the second that rows are held: a block has its true share of writes
WIDTHS = {
    "cpu": {SMALLEST: 0, "step 1 ms": 128, "step 10 ms": 256},
    # Wide enough that the device, and not the launches of its kernels, makes a step of 10 ms.
    "cuda": {SMALLEST: 0, "step 1 ms": 1024, "step 10 ms": 4096},
}
JUDGED_BY = {"cpu": "cpu", "cuda": "wall"}  # the process waits for a GPU, and waiting is no work of the loop
REPLICATION = "round of two blocks an arm, interleaved, each on a new model in the same place"

READERS: dict[str, Callable[[Block], float]] = {
    "wall": lambda block: block.wall_us,
    "cpu": lambda block: block.cpu_us,
}


def run(context: Context) -> Findings:
    torch.set_num_threads(1)
    _loops.keep_freed_memory(context.device)
    ours, theirs = _loops.load_loops()
    arms: list[Arm] = []
    targets: list[Target] = []
    notes = list(_describe_method(context.device))
    for case in build_cases(context.device, quick=context.quick):
        # Long blocks hold the share of writes of loops that do something once a second.
        n_long = case.n_steps if context.quick else round(LISTENING_BLOCK_MS / STEPS_MS[case.name])
        long = dataclasses.replace(case, n_steps=n_long)
        # Nothing in the peers without a log happens once a second: a short block has its share of all they do.
        groups = [
            (JUDGED, case, N_CORE_ROUNDS),
            ([name for name in theirs if name != LIGHTNING_LISTENING], case, N_OTHER_ROUNDS),
            ([OURS_LISTENING], long, N_LISTENING_ROUNDS),
            ([name for name in theirs if name == LIGHTNING_LISTENING], long, N_LISTENING_PEER_ROUNDS),
        ]
        for names, of, n_rounds in groups:
            if not names:
                continue
            rounds = measure(of, names, n_rounds=3 if context.quick else n_rounds)
            if names is JUDGED:
                arms += describe_reference(rounds, of)
                targets += judge_rounds(rounds, of)
            if OURS_LISTENING in names:
                targets.append(judge_listening(rounds, of))
            arms += describe_differences(rounds, names, of)
        notes.append(
            f"{case.name}: width {case.width}, batch {case.batch_size}, {case.n_steps} timed steps a block after "
            f"{case.n_warmup}, {long.n_steps} with metrics, CSV and progress"
        )
    if missing := [name for name in LOOPS if name not in (*ours, *theirs)]:
        notes.append(f"not installed here and left out: {', '.join(missing)}")
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=tuple(notes))


def measure(case: Case, arms: Sequence[str], *, n_rounds: int) -> list[Round[Block]]:
    """Run rounds of the reference and these arms."""
    return run_rounds([REFERENCE, *arms], lambda arm: _loops.measure_block(arm, case), n_rounds=n_rounds)


def build_cases(device: str, *, quick: bool) -> list[Case]:
    """Build cases in which a step of the hand-written loop takes what they say, on this machine, now."""
    cases = []
    for name, step_ms in STEPS_MS.items():
        width = WIDTHS[device][name]
        n_tries = 2 if quick else 5
        batch_size = SMALLEST_BATCH
        if width:
            batch_size = _loops.calibrate_batch_size(step_ms, width=width, n_tries=n_tries, device=device)
        # In blocks of 20 steps after 5 the first steps of a process weighed too much to judge the target by.
        n_steps = max(60, round(150 / step_ms))
        n_warmup = max(18, n_steps // 8)
        cases.append(
            Case(name=name, width=width, batch_size=batch_size, n_warmup=n_warmup, n_steps=n_steps, device=device)
        )
    return cases


def describe_reference(rounds: Sequence[Round[Block]], case: Case) -> list[Arm]:
    """Build arms for the hand-written loop's own step, and for how often a step of ours waits."""
    arms = []
    for clock, read in READERS.items():
        values = [us / 1000 for us in compute_means(rounds, REFERENCE, read)]
        arms.append(_build(values, case, REFERENCE, f"step_{clock}_ms"))
    waits = compute_means(rounds, OURS, lambda block: block.waits)
    return [*arms, _build(waits, case, OURS, "voluntary_context_switches_per_step")]


def describe_differences(rounds: Sequence[Round[Block]], names: Sequence[str], case: Case) -> list[Arm]:
    """Build arms for each one's difference to the reference in the same round, by wall clock and by CPU time."""
    arms = []
    for name in names:
        for clock, read in READERS.items():
            us = compute_differences(rounds, name, REFERENCE, read)
            pct = compute_differences_pct(rounds, name, REFERENCE, read)
            arms.append(_build(us, case, name, f"overhead_{clock}_us_per_step"))
            arms.append(_build(pct, case, name, f"overhead_{clock}_pct"))
    return arms


def judge_rounds(rounds: Sequence[Round[Block]], case: Case) -> list[Target]:
    """Hold our loop against CPU time, on a GPU against the wall clock; the reason is in the notes."""
    read = READERS[JUDGED_BY[case.device]]
    us, again = (compute_differences(rounds, arm, REFERENCE, read) for arm in (OURS, AGAIN))
    interval = describe_interval(compute_bounds(again), ".1f")
    note = f"the hand-written loop against itself: {statistics.median(again):.1f} ({interval}) µs"
    targets = [judge_median(f"{case.name}: overhead, µs a step", us, at_most=LIMIT_US, note=note)]
    if STEPS_MS[case.name] >= 10:
        pct = compute_differences_pct(rounds, OURS, REFERENCE, read)
        targets.append(judge_median(f"{case.name}: overhead, %", pct, at_most=LIMIT_PCT, note=note))
    return targets


def judge_listening(rounds: Sequence[Round[Block]], case: Case) -> Target:
    us = compute_differences(rounds, OURS_LISTENING, REFERENCE, READERS[JUDGED_BY[case.device]])
    name = f"{case.name}: overhead with metrics, CSV and progress, µs a step"
    return judge_median(name, us, at_most=LISTENING_LIMIT_US)


def _build(values: Sequence[float], case: Case, name: str, metric: str) -> Arm:
    return build_arm(
        values, case=case.name, arm=name, metric=metric, unit_of_replication=REPLICATION, note=LOOPS[name].note
    )


def _describe_method(device: str) -> tuple[str, ...]:
    if device == "cpu":
        held = (
            "targets are held against CPU time of the process, which leaves out what other processes took; it would "
            "not see a loop that waits, so the times a step gives the core back by itself are counted, and wall time "
            "is given"
        )
    else:
        held = (
            "targets are held against wall time: the device is synchronised where the clocks are read and nowhere "
            "else, each loop copies its batches from pageable memory; a step is what the calibration could reach"
        )
    return (
        "what a loop adds hangs on the step little, and a step's own spread on its length: it is seen best at the "
        "smallest step, one linear layer and 8 rows",
        f"MLP of {_loops.N_HIDDEN_LAYERS} hidden layers, cross entropy, AdamW, fp32, no "
        "accumulation, 1 thread; every arm iterates the same DataLoader over rows in memory (no workers, whole-batch "
        "reads, shuffled)",
        "the weights of every block lie in the same memory, and on a CPU the process keeps what a step frees "
        "(retain_freed_memory), in all arms: where tensors happen to lie moved a step by more than a loop does",
        "the clocks are read in the dataset, when it is asked for the first and for the last of the timed batches",
        held,
    )
