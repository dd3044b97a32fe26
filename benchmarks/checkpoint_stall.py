"""What a checkpoint costs training: written in the foreground, and beside training from a copy.

Each block trains a new model for the same steps through the product's own ``train``. A stall is what the steps from a
checkpoint on took longer than as many steps right before it, in the same run: the copy, the wait, and the cores and the
disk that the writer shares with the steps. So near to each other, both have the same neighbours and the same clock.
The arm without checkpoints is held to the same steps: it shows what the method calls a stall where there is none.

On a CPU all cores train, and the writer takes its time from the steps; or one core is left to it.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks._rounds import Round, build_arms, compute_means, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge
from fulltilt.config import config_from_values
from fulltilt.engine.loop.train import train
from fulltilt.hardware import count_usable_cores
from fulltilt.tasks import MODELS, Workload

CLAIM = "Writing a checkpoint of a resnet18 beside training stalls it at most half as long as writing it in between."
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

WITHOUT, FOREGROUND, BESIDE = "no checkpoints", "foreground", "async_checkpoint"
EVERY_CORE, CORE_LEFT, ON_GPU = "every core trains", "a core is left", "a GPU trains"
LIMIT_RATIO = 0.5
N_CHECKPOINTS = 3
REPLICATION = "round of two blocks an arm, interleaved, each a run of its own"


class Block(NamedTuple):
    """The stall of a checkpoint, and a step before it; means of a run."""

    stall_s: float
    step_s: float


class TimedImages(Dataset):
    """Random images; remembers when each batch was asked for."""

    def __init__(self, n_samples: int):
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randn(n_samples, 3, 32, 32, generator=generator)
        self._labels = torch.randint(10, (n_samples,), generator=generator)
        self.asked_s: list[float] = []

    def __len__(self) -> int:
        return len(self._labels)

    def get_batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        self.asked_s.append(time.perf_counter())
        return self._images[indices], self._labels[indices]


def run(context: Context) -> Findings:
    steps_each = 6 if context.quick else 480 if context.device == "cuda" else 24
    batch_size = 64 if context.device == "cuda" else 2
    cases = plan_cases(context.device, count_usable_cores())
    arms: list[Arm] = []
    targets: list[Target] = []
    for case, n_threads in cases.items():
        measure = functools.partial(
            measure_block, device=context.device, batch_size=batch_size, steps_each=steps_each, n_threads=n_threads
        )
        measure(WITHOUT)  # the first model of a process pays for much that later ones do not
        rounds = run_rounds([WITHOUT, FOREGROUND, BESIDE], measure, n_rounds=1 if context.quick else 10)
        arms += describe_case(rounds, case)
        excess, target = judge_stalls(rounds, case)
        arms.append(excess)
        targets.append(target)
    said = ", ".join(f"{case}: {n or 'as many as cores'}" for case, n in cases.items())
    state_mib = 3 * sum(p.numel() * p.element_size() for p in build_model().parameters()) / 2**20  # AdamW has 2 moments
    notes = (
        f"resnet18 with AdamW, batch {batch_size} of 32×32 images, {N_CHECKPOINTS} checkpoints a block, each "
        f"{steps_each} steps, {steps_each // 2} of them compared with as many before; "
        f"{state_mib:.0f} MiB each, synced to the disk of the temporary folder",
        f"threads that train, of {count_usable_cores()} cores: {said}",
        "the writer's cores and the disk are those of the training: what it takes from the steps is in the stall",
    )
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=notes)


def plan_cases(device: str, n_cores: int) -> dict[str, int | None]:
    """Return the threads that train, by case; None is torch's own number. A GPU leaves the cores to the writer."""
    if device == "cuda":
        return {ON_GPU: None}
    return {EVERY_CORE: n_cores} | ({CORE_LEFT: n_cores - 1} if n_cores > 1 else {})


def measure_block(arm: str, *, device: str, batch_size: int, steps_each: int, n_threads: int | None) -> Block:
    """Train one run, and return means over its checkpoints.

    On a GPU the batches are asked for ahead of it by a few steps; a logging interval of one step ties the two together.
    """
    n_steps = N_CHECKPOINTS * steps_each + steps_each // 2
    dataset = TimedImages(batch_size * (n_steps + 1))
    config = config_from_values(
        {
            "data": {"batch_size": batch_size},
            "speed": {"threads": n_threads},
            "run": {
                "epochs": 1,
                "device": device,
                "checkpoint_every": None if arm == WITHOUT else f"{steps_each} steps",
                "evaluate_every": None,
                "log_every_n_steps": 1,
                "async_checkpoint": arm == BESIDE,
            },
        },
        base_dir=".",
    )
    workload = Workload(model=build_model, dataset=lambda: dataset, loss=nn.CrossEntropyLoss(), name="images")
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        train(config, out_dir=Path(folder) / "run", workload=workload, max_steps=n_steps)
    return compute_stall(dataset.asked_s, steps_each)


def compute_stall(asked_s: Sequence[float], steps_each: int) -> Block:
    """Return how much longer the steps from a checkpoint on took than those before it, and a step before it.

    Args:
        asked_s: When the batch of each step was asked for; that of step n + 1 after a checkpoint of step n.
    """
    n = steps_each // 2
    positions = [steps_each * (i + 1) - 1 for i in range(N_CHECKPOINTS)]
    before = statistics.fmean(asked_s[at] - asked_s[at - n] for at in positions)
    after = statistics.fmean(asked_s[at + n] - asked_s[at] for at in positions)
    return Block(stall_s=after - before, step_s=before / n)


def build_model() -> nn.Module:
    return MODELS["resnet18"](n_classes=10)


def describe_case(rounds: Sequence[Round[Block]], case: str) -> list[Arm]:
    """Build arms for the stalls, and for the step they are seen against."""
    common = {"case": case, "unit_of_replication": REPLICATION}
    step_ms = compute_means(rounds, WITHOUT, lambda block: 1000 * block.step_s)
    stalls = build_arms(rounds, lambda block: 1000 * block.stall_s, metric="stall_ms_per_checkpoint", **common)
    return [build_arm(step_ms, arm=WITHOUT, metric="step_wall_ms", **common), *stalls]


def judge_stalls(rounds: Sequence[Round[Block]], case: str) -> tuple[Arm, Target]:
    """Judge how far the stall beside training lies above the share of the foreground's that is claimed, by rounds.

    A difference, because rounds whose foreground stall drowned in noise count in it too; a ratio has none for them.
    """
    beside, foreground = (
        compute_means(rounds, name, lambda block: 1000 * block.stall_s) for name in (BESIDE, FOREGROUND)
    )
    excess_ms = [b - LIMIT_RATIO * f for b, f in zip(beside, foreground, strict=True)]
    arm = build_arm(excess_ms, case=case, arm=BESIDE, metric="stall_above_limit_ms", unit_of_replication=REPLICATION)
    medians = f"medians {statistics.median(beside):.1f} and {statistics.median(foreground):.1f} ms"
    name = f"{case}: stall, {BESIDE} less {LIMIT_RATIO} times {FOREGROUND}, ms"
    return arm, judge(name, arm.median, arm.ci95, at_most=0.0, note=medians)
