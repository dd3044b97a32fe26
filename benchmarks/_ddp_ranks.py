"""The blocks of steps that the two processes of ``ddp_efficiency`` run: alone, side by side, and together."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from benchmarks._rounds import Round, run_rounds
from fulltilt.config import config_from_values, plan_of
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.ranks.world import ALONE, World, join_world
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload, build_model

ONE, APART, BY_HAND, TOGETHER = "one rank", "two ranks apart", "two ranks, by hand", "two ranks"
ARMS = (ONE, APART, BY_HAND, TOGETHER)
MODEL = "resnet18(n_classes=10)"
LR = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What one block trains on."""

    batch_per_rank: int
    n_steps: int
    precision: str


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
    world, name = join_world(config)
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
        batches: Iterator[Any] = iter(loader)
        for inputs, targets in batches:
            with torch.autocast("cuda", torch.bfloat16) if is_bf16 else contextlib.nullcontext():
                value = loss(model(inputs.to(device)), targets.to(device))
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return block
