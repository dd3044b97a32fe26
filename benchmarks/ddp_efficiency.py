"""The worth of a second rank: two training processes that join their gradients, beside one and beside a loop by hand.

Two ranks are started once; blocks of steps of every arm follow each other in them, in an order drawn anew each round.
*Apart* is two processes that train without each other: what sharing the machine costs is then told from what joining
the gradients costs.

Timed are the engine's steps on the engine's batches; logging, evaluation and checkpoints of ``train`` are left out
(what the loop adds to a step is ``loop_overhead``'s).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from benchmarks._rounds import Round, build_arms, compute_differences_pct, compute_ratios, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import build_arm, judge
from fulltilt.config import config_from_values, plan_of
from fulltilt.engine.announce import Announcer
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.ranks.group import run_ranks
from fulltilt.engine.ranks.world import ALONE, World, join_devices, plan_devices
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload, build_model

CLAIM = (
    "The engine's step over two ranks, logging and checkpoints left out, is at least as fast as that of a hand-written "
    "DistributedDataParallel loop, less 2 %."
)
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

ONE, APART, BY_HAND, TOGETHER = "one rank", "two ranks apart", "two ranks, by hand", "two ranks"
ARMS = (ONE, APART, BY_HAND, TOGETHER)
MODEL = "resnet18(n_classes=10)"
LR = 0.01
N_RANKS = 2
LIMIT_PCT = -2.0
REPLICATION = "round of two blocks an arm, interleaved in the same two processes"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What one block trains on."""

    batch_per_rank: int
    n_steps: int
    precision: str


SIZES = {
    "cpu": Size(batch_per_rank=32, n_steps=2, precision="fp32"),
    "cuda": Size(batch_per_rank=512, n_steps=20, precision="bf16"),
}
CASE = "resnet18, 32×32 images"


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
        measure_rounds,
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


class Images(Dataset):
    """Random images in memory, collated one by one: loading is a small part of a step, and the same in every arm."""

    def __init__(self, n_samples: int):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(n_samples, 3, 32, 32, generator=generator)
        self.targets = torch.randint(0, 10, (n_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def measure_rounds(device: str, n_rounds: int, size: Size) -> list[Round[float]]:
    """Measure the samples per second of all ranks, of every arm in every round."""
    n_steps, batch_per_rank = size.n_steps, size.batch_per_rank
    config = _build_config(device, batch_per_rank, size.precision)
    world, name = join_devices(plan_devices(config))
    joint = _build_config(device, batch_per_rank * world.n_ranks, size.precision)
    one = _build_block(config, name, ALONE, n_steps)
    blocks = {
        ONE: one if world.is_first else lambda: None,
        APART: _build_block(config, name, ALONE, n_steps),
        BY_HAND: _build_block_by_hand(config, name, n_steps),
        TOGETHER: _build_block(joint, name, world, n_steps),
    }

    def measure(arm: str) -> float:
        n_working = 1 if arm == ONE else world.n_ranks
        return n_working * n_steps * batch_per_rank / _time_together(blocks[arm], torch.device(name))

    for arm in ARMS:  # buckets are built anew after the first step, and memory is laid out
        measure(arm)
    return run_rounds(ARMS, measure, n_rounds=n_rounds)


def _time_together(block: Callable[[], None], device: torch.device) -> float:
    """Time a block from when all ranks are ready to when all are done."""
    dist.barrier()
    began_s = time.perf_counter()
    block()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter() - began_s


def _build_config(device: str, batch_size: int, precision: str) -> Any:
    values = {
        "data": {"batch_size": batch_size, "shuffle": False},
        "optim": {"optimizer": "sgd(momentum=0.9)", "lr": LR},
        "speed": {"precision": precision},
        "run": {"device": device, "n_ranks": 2},
    }
    return config_from_values(values, base_dir=".")


def _build_model() -> nn.Module:
    return build_model(MODEL, where="model", base_dir=".")


def _build_block(config: Any, device: str, world: World, n_steps: int) -> Callable[[], None]:
    """Take ``n_steps`` of the engine's steps on the engine's batches, without what its loop does beside them."""
    workload = Workload(
        model=_build_model,
        dataset=lambda: Images(config.data.batch_size * n_steps),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9),
        name="images",
    )
    run = build_run(config, plan_of(config), device=device, workload=workload, world=world)
    step, timer = TrainStep(run), NullTimer()

    def block() -> None:
        batches = run.start_epoch(0)
        for _ in range(n_steps):
            step(batches, timer)

    return block


def _build_block_by_hand(config: Any, device: str, n_steps: int) -> Callable[[], None]:
    """Train the same model, batches and optimizer in a loop as it is written by hand, over torch's own defaults."""
    model = DistributedDataParallel(_build_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    batch_size = config.data.batch_size
    is_bf16 = config.speed.precision == "bf16"
    loader = torch.utils.data.DataLoader(Images(batch_size * n_steps), batch_size=batch_size)

    def block() -> None:
        for inputs, targets in loader:
            with torch.autocast("cuda", torch.bfloat16) if is_bf16 else contextlib.nullcontext():
                value = loss(model(inputs.to(device)), targets.to(device))
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return block
