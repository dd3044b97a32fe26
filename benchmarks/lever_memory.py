"""Peak memory of each lever on and off: one model, one effective batch, one lever moved at a time.

Every arm is a process of its own. The peak is what torch's allocator held at the fullest moment of two training steps
and an evaluation step (``_memory_probe`` says how that is read on a CPU); on a GPU what it reserved, too.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any, NamedTuple

import torch

from benchmarks._child import call_in_process
from benchmarks._memory_probe import measure_allocated_peak_bytes
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm
from benchmarks._speed_probe import build_images
from fulltilt.config import config_from_values, plan_of
from fulltilt.engine import build_run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.hardware import has_c_compiler
from fulltilt.measure import NullTimer

CLAIM = "What each lever does to the peak memory of a training step, moved one at a time."
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

PLAIN = "plain"
MODEL = "resnet18(small_images=true)"  # with AdamW: 0.17 GiB of weights, gradients and optimizer state
SIDE_PX = 32
N_PROCESSES = 6  # the fewest whose median has an interval
TIMEOUT_S = 1800


class Setting(NamedTuple):
    """One arm: a key of the configuration and its value; ``devices`` is where it can apply."""

    name: str
    values: dict[str, Any]
    devices: tuple[str, ...] = DEVICES
    needs_compiler: bool = False


SETTINGS = (
    Setting(PLAIN, {}),
    Setting("activation_checkpointing true", {"speed": {"activation_checkpointing": True}}),
    Setting("precision bf16", {"speed": {"precision": "bf16"}}),
    Setting("accumulate 4", {"speed": {"accumulate": 4}}),
    Setting("activation_checkpointing layer1", {"speed": {"activation_checkpointing": "layer1"}}),
    Setting("precision fp16", {"speed": {"precision": "fp16"}}, ("cuda",)),  # a CPU takes minutes
    Setting("precision tf32", {"speed": {"precision": "tf32"}}, ("cuda",)),
    Setting("channels_last", {"speed": {"channels_last": True}}),
    Setting("fused_optimizer", {"speed": {"fused_optimizer": True}}),
    Setting("optim.ema 0.999", {"optim": {"ema": 0.999}}),
    Setting("optim.clip_norm 1", {"optim": {"clip_norm": 1.0}}),
    Setting("deterministic", {"run": {"deterministic": True}}),
    Setting("compile true", {"speed": {"compile": True}}, needs_compiler=True),
    Setting("compile regional", {"speed": {"compile": "regional"}}, needs_compiler=True),
    Setting("cudnn_benchmark", {"speed": {"cudnn_benchmark": True}}, ("cuda",)),
    Setting("expandable_segments", {"speed": {"expandable_segments": True}}, ("cuda",)),
    Setting("device_prefetch", {"data": {"device_prefetch": True, "pin_memory": True}}, ("cuda",)),
    Setting("empty_cache_every 1 step", {"speed": {"empty_cache_every": "1 step"}}, ("cuda",)),
)
"""A quick run takes the first four."""


def run(context: Context) -> Findings:
    batch_size = 16 if context.quick else 64 if context.device == "cpu" else 512
    settings = [s for s in SETTINGS if context.device in s.devices and (has_c_compiler() or not s.needs_compiler)]
    case = f"resnet18, adamw, {batch_size} images of {SIDE_PX} px"
    peaks: dict[str, list[dict[str, float]]] = {}
    for setting in settings[:4] if context.quick else settings:
        asked = {"values": setting.values, "effective_batch_size": batch_size, "device": context.device}
        peaks[setting.name] = [
            call_in_process("benchmarks.lever_memory:probe", asked, timeout_s=TIMEOUT_S)
            for _ in range(1 if context.quick else N_PROCESSES)
        ]
        print(f"{setting.name}: {peaks[setting.name][0]['allocated_peak_gib']:.3f} GiB", file=sys.stderr, flush=True)
    arms = tuple(arm for metric in peaks[PLAIN][0] for arm in build_arms(peaks, metric, case))
    return Findings(arms=arms, targets=())


def build_arms(peaks: dict[str, list[dict[str, float]]], metric: str, case: str) -> list[Arm]:
    """Build an arm for the peak of every setting, and one for its change against the plain run."""
    plain = statistics.median(row[metric] for row in peaks[PLAIN])
    arms = []
    for name, rows in peaks.items():
        values = [row[metric] for row in rows]
        common = {"case": case, "arm": name, "unit_of_replication": "process"}
        arms.append(build_arm(values, metric=metric, **common))
        if name != PLAIN:
            changes = [100 * (value / plain - 1) for value in values]
            arms.append(build_arm(changes, metric=metric.replace("_gib", "_change_pct"), **common))
    return arms


def probe(
    values: dict[str, Any], effective_batch_size: int, device: str, *, side_px: int = SIDE_PX, model: str = MODEL
) -> dict[str, float]:
    """Measure the peak in GiB: allocated, and on a GPU reserved by the allocator too."""
    torch.set_num_threads(1)  # peaks do not depend on it, and a busy machine is finished sooner
    accumulate = values.get("speed", {}).get("accumulate", 1)
    data = {**values.get("data", {}), "batch_size": effective_batch_size // accumulate}
    config = config_from_values({**values, "data": data}, base_dir=".")
    workload = build_images(model, 2 * effective_batch_size, 3, side_px)  # a batch more, for what is copied ahead

    def work() -> None:
        with build_run(config, plan_of(config), device=device, workload=workload) as run:
            step = TrainStep(run)
            for epoch in range(2):
                step(run.start_epoch(epoch), NullTimer())
            run.setup.model.eval()
            with torch.no_grad():
                step.compute_loss(next(run.start_epoch(2)))

    peaks = {"allocated_peak_gib": measure_allocated_peak_bytes(work, device) / 2**30}
    return peaks | ({"reserved_peak_gib": torch.cuda.max_memory_reserved() / 2**30} if device == "cuda" else {})
