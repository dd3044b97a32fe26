"""The speed of some settings in a process of its own: trains for a while; JSON on stdout.

``python -m benchmarks._speed_probe '{"speed": {"retain_freed_memory": true}}' 'small_cnn(width=32)' 64 1 8 cpu``
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from benchmarks._runner import ROOT
from fulltilt import Workload
from fulltilt.config import config_from_values, plan_of
from fulltilt.engine import build_run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.measure import NullTimer
from fulltilt.tasks import build_model

N_WARMUP = 3
N_BATCHES = 8  # of the data set
MEASURE_S = 1.0
MIN_STEPS = 8
TIMEOUT_S = 600


def start_probe(
    case: tuple[str, ...], values: Mapping[str, object], environment: Mapping[str, str], *, device: str
) -> dict[str, float]:
    """What ``probe`` finds in a new process.

    Args:
        case: Model, batch size, channels, side in pixels.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    command = [sys.executable, "-m", "benchmarks._speed_probe", json.dumps(values), *case, device]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{case}, {values}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(values: str, model: str, batch_size: str, n_channels: str, side_px: str, device: str) -> None:
    print(json.dumps(probe(json.loads(values), model, int(batch_size), int(n_channels), int(side_px), device)))


def probe(
    values: dict[str, Any], model: str, batch_size: int, n_channels: int, side_px: int, device: str
) -> dict[str, float]:
    """Speed by the median step; a step's pages brought by the system and its CPU time; peak of the process."""
    n_samples = N_BATCHES * batch_size
    workload = Workload(
        model=lambda: build_model(model, n_classes=10, in_channels=n_channels),
        dataset=lambda: TensorDataset(
            torch.zeros(n_samples, n_channels, side_px, side_px), torch.zeros(n_samples).long()
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: optim.AdamW(parameters, lr=1e-4),
    )
    config = config_from_values({**values, "data": {"batch_size": batch_size, "num_workers": 0}}, base_dir=".")
    with build_run(config, plan_of(config), device=device, workload=workload) as run:
        step, seconds, epoch = TrainStep(run), list[float](), 0
        batches = run.start_epoch(epoch)
        start_s, before = 0.0, None
        while before is None or len(seconds) < MIN_STEPS or time.perf_counter() - start_s < MEASURE_S:
            began_s = time.perf_counter()
            if step(batches, NullTimer()) is None:
                epoch += 1
                batches = run.start_epoch(epoch)
                continue
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began_s)
            if before is None and len(seconds) == N_WARMUP:
                seconds, start_s, before = [], time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "samples_per_s": batch_size / statistics.median(seconds),
        "faults_per_step": (after.ru_minflt - before.ru_minflt) / len(seconds),
        "kernel_ms_per_step": 1e3 * (after.ru_stime - before.ru_stime) / len(seconds),
        "rss_peak_gib": after.ru_maxrss / 2**20,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
