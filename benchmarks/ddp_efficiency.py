"""What a second rank is worth: two training processes that join their gradients, beside one, and beside a loop by hand.

Two ranks are started once; blocks of steps of every arm follow each other in them, in an order drawn anew each round.
*Apart* is two processes that train without each other: what sharing the machine costs is then told from what joining
the gradients costs.

Timed are the engine's steps on the engine's batches; logging, evaluation and checkpoints of ``train`` are left out
(what the loop adds to a step is ``loop_overhead``'s).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import _ddp_ranks
from benchmarks._ddp_ranks import APART, ARMS, BY_HAND, ONE, TOGETHER, Size
from benchmarks._rounds import Round, compute_differences_pct, compute_means
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge
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
    """Two ranks on one GPU would measure how they share it; NCCL refuses them, too."""
    n_devices = torch.cuda.device_count() if context.device == "cuda" else N_RANKS
    if n_devices >= N_RANKS:
        return None
    return f"its {N_RANKS} ranks join over NCCL and need a GPU each; this machine shows {n_devices}"


def list_devices(device: str) -> tuple[str, ...]:
    """One a rank."""
    return tuple(f"cuda:{rank}" if device == "cuda" else device for rank in range(N_RANKS))


def run(context: Context) -> Findings:
    size = SIZES[context.device]
    rounds = run_ranks(
        _ddp_ranks.measure_rounds,
        {"device": context.device, "n_rounds": 2 if context.quick else 40, "size": size},
        devices=list_devices(context.device),
        announcer=Announcer(()),
    )
    by_hand = _build(compute_differences_pct(rounds, TOGETHER, BY_HAND, float), TOGETHER, "gain_over_by_hand_pct")
    arms = [_build(compute_means(rounds, arm, float), arm, "samples_per_s") for arm in ARMS]
    arms += [_build(_compute_efficiency_pct(rounds, arm), arm, "efficiency_pct") for arm in (APART, BY_HAND, TOGETHER)]
    targets = (_judge(by_hand),)
    notes = (
        f"{N_RANKS} processes, {size.batch_per_rank} samples each a step, {size.n_steps} steps a block, "
        f"{size.precision}, SGD with momentum",
        f"efficiency: samples/s of the arm over {N_RANKS} times those of {ONE!r}, in the same round",
        f"{APART!r}: each trains a model of its own at the same time; what it lacks to 100 % is the machine's",
        "by hand: torch's DistributedDataParallel with its defaults, a DataLoader over the same images",
    )
    return Findings(arms=(*arms, by_hand), targets=targets, notes=notes)


def _compute_efficiency_pct(rounds: Sequence[Round[float]], arm: str) -> list[float]:
    pairs = zip(compute_means(rounds, arm, float), compute_means(rounds, ONE, float), strict=True)
    return [100 * rate / (N_RANKS * alone) for rate, alone in pairs]


def _judge(by_hand: Arm) -> Target:
    return judge("samples/s against by hand, %", by_hand.median, by_hand.ci95, at_least=LIMIT_PCT)


def _build(values: Sequence[float], arm: str, metric: str) -> Arm:
    return build_arm(values, case=CASE, arm=arm, metric=metric, unit_of_replication=REPLICATION)
