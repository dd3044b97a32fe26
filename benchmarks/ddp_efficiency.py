"""The worth of a second rank: two training processes that join their gradients, beside one and beside a loop by hand.

Two ranks are started once; blocks of steps of every arm follow each other in them, in an order drawn anew each round.
*Apart* is two processes that train without each other: what sharing the machine costs is then told from what joining
the gradients costs.

Timed are the engine's steps on the engine's batches; logging, evaluation and checkpoints of ``train`` are left out
(what the loop adds to a step is ``loop_overhead``'s).
"""

from __future__ import annotations

import torch

from benchmarks import _ddp_ranks
from benchmarks._ddp_ranks import APART, BY_HAND, ONE, TOGETHER, Size
from benchmarks._rounds import build_arms, compute_differences_pct, compute_ratios
from benchmarks._runner import Context, Findings
from benchmarks._schema import build_arm, judge
from fulltilt.engine.announce import Announcer
from fulltilt.engine.ranks.group import run_ranks

NAME = "ddp_efficiency"
CLAIM = (
    "The engine's step over two ranks, logging and checkpoints left out, is at least as fast as that of a hand-written "
    "DistributedDataParallel loop, less 2 %."
)
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

N_RANKS = 2
LIMIT_PCT = -2.0
SIZES = {
    "cpu": Size(batch_per_rank=32, n_steps=2, precision="fp32"),
    "cuda": Size(batch_per_rank=512, n_steps=20, precision="bf16"),
}
CASE = "resnet18, 32×32 images"
REPLICATION = "round of two blocks an arm, interleaved in the same two processes"


def find_obstacle(context: Context) -> str | None:
    """Say how many GPUs are missing: two ranks on one would measure how they share it, and NCCL refuses them."""
    n_devices = torch.cuda.device_count() if context.device == "cuda" else N_RANKS
    if n_devices >= N_RANKS:
        return None
    return f"its {N_RANKS} ranks join over NCCL and need a GPU each; this machine shows {n_devices}"


def list_devices(device: str) -> tuple[str, ...]:
    """Name the device of each rank."""
    return tuple(f"cuda:{rank}" if device == "cuda" else device for rank in range(N_RANKS))


def run(context: Context) -> Findings:
    size = SIZES[context.device]
    rounds = run_ranks(
        _ddp_ranks.measure_rounds,
        {"device": context.device, "n_rounds": 2 if context.quick else 40, "size": size},
        devices=list_devices(context.device),
        announcer=Announcer(()),
    )
    common = {"case": CASE, "unit_of_replication": REPLICATION}
    arms = build_arms(rounds, metric="samples_per_s", **common)
    for arm in (APART, BY_HAND, TOGETHER):
        efficiency_pct = [100 * ratio / N_RANKS for ratio in compute_ratios(rounds, arm, ONE)]
        arms.append(build_arm(efficiency_pct, arm=arm, metric="efficiency_pct", **common))
    gain_pct = compute_differences_pct(rounds, TOGETHER, BY_HAND)
    gain = build_arm(gain_pct, arm=TOGETHER, metric="gain_over_by_hand_pct", **common)
    target = judge("samples/s against by hand, %", gain.median, gain.ci95, at_least=LIMIT_PCT)
    notes = (
        f"{N_RANKS} processes, {size.batch_per_rank} samples each a step, {size.n_steps} steps a block, "
        f"{size.precision}, SGD with momentum",
        f"efficiency: samples/s of the arm over {N_RANKS} times those of {ONE!r}, in the same round",
        f"{APART!r}: each trains a model of its own at the same time; what it lacks to 100 % is the machine's",
        "by hand: torch's DistributedDataParallel with its defaults, a DataLoader over the same images",
    )
    return Findings(arms=(*arms, gain), targets=(target,), notes=notes)
