"""Peak memory of each lever on and off: one model, one effective batch, one lever moved at a time.

Every arm is a process of its own. The peak is what torch's allocator held at the fullest moment of two training steps
and an evaluation step (``_memory_probe`` says how that is read on a CPU); on a GPU what it reserved, too.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks._runner import ROOT, Context, Findings
from benchmarks._schema import Arm, build_arm
from fulltilt.hardware import has_c_compiler

NAME = "lever_memory"
CLAIM = "What each lever does to the peak memory of a training step, moved one at a time."
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

PLAIN = "plain"
N_PROCESSES = 6  # the fewest whose median has an interval
TIMEOUT_S = 1800


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One arm: sections of a configuration; ``devices`` is where it can apply."""

    name: str
    values: dict[str, Any]
    devices: tuple[str, ...] = DEVICES
    needs_compiler: bool = False


SETTINGS = (
    Setting(name=PLAIN, values={}),
    Setting(name="activation_checkpointing true", values={"speed": {"activation_checkpointing": True}}),
    Setting(name="precision bf16", values={"speed": {"precision": "bf16"}}),
    Setting(name="accumulate 4", values={"speed": {"accumulate": 4}}),
    Setting(name="activation_checkpointing layer1", values={"speed": {"activation_checkpointing": "layer1"}}),
    Setting(name="precision fp16", values={"speed": {"precision": "fp16"}}, devices=("cuda",)),  # a CPU takes minutes
    Setting(name="precision tf32", values={"speed": {"precision": "tf32"}}, devices=("cuda",)),
    Setting(name="channels_last", values={"speed": {"channels_last": True}}),
    Setting(name="fused_optimizer", values={"speed": {"fused_optimizer": True}}),
    Setting(name="optim.ema 0.999", values={"optim": {"ema": 0.999}}),
    Setting(name="optim.clip_norm 1", values={"optim": {"clip_norm": 1.0}}),
    Setting(name="deterministic", values={"run": {"deterministic": True}}),
    Setting(name="compile true", values={"speed": {"compile": True}}, needs_compiler=True),
    Setting(name="compile regional", values={"speed": {"compile": "regional"}}, needs_compiler=True),
    Setting(name="cudnn_benchmark", values={"speed": {"cudnn_benchmark": True}}, devices=("cuda",)),
    Setting(name="expandable_segments", values={"speed": {"expandable_segments": True}}, devices=("cuda",)),
    Setting(name="device_prefetch", values={"data": {"device_prefetch": True, "pin_memory": True}}, devices=("cuda",)),
    Setting(name="empty_cache_every 1 step", values={"speed": {"empty_cache_every": "1 step"}}, devices=("cuda",)),
)
"""A quick run takes the first four."""


def run(context: Context) -> Findings:
    batch_size, side_px = (16, 32) if context.quick else (64, 32) if context.device == "cpu" else (512, 32)
    settings = [s for s in SETTINGS if context.device in s.devices and (has_c_compiler() or not s.needs_compiler)]
    case = f"resnet18, adamw, {batch_size} images of {side_px} px"
    peaks: dict[str, list[dict[str, float]]] = {}
    for setting in settings[:4] if context.quick else settings:
        peaks[setting.name] = [
            _probe(setting, batch_size, side_px, context.device) for _ in range(1 if context.quick else N_PROCESSES)
        ]
        print(f"{setting.name}: {peaks[setting.name][0]['allocated_peak_gib']:.3f} GiB", file=sys.stderr, flush=True)
    metrics = [name for name, value in peaks[PLAIN][0].items() if value is not None]
    return Findings(arms=tuple(arm for metric in metrics for arm in _build_arms(peaks, metric, case)), targets=())


def _probe(setting: Setting, batch_size: int, side_px: int, device: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks._lever_memory_probe", json.dumps(setting.values)]
    options = ["--batch-size", str(batch_size), "--side-px", str(side_px), "--device", device]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{setting.name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _build_arms(peaks: dict[str, list[dict[str, float]]], metric: str, case: str) -> list[Arm]:
    """The peak of every setting, and what it comes to against the plain run."""
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
