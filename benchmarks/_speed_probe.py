"""The speed of several settings against each other, every block in a process of its own, which trains for a while."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from benchmarks._child import call_in_process
from benchmarks._rounds import Round, build_arms, compute_geometric_ratios, run_rounds
from benchmarks._schema import Arm, build_arm
from fulltilt import Workload
from fulltilt.config import config_from_values, plan_of
from fulltilt.engine import build_run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.measure import NullTimer
from fulltilt.tasks import build_model

N_ROUNDS = 6  # the fewest whose median has an interval
FASTER = "times_as_fast"
FIGURES = ("samples_per_s", "faults_per_step", "kernel_ms_per_step", "rss_peak_gib")
N_WARMUP = 3
N_BATCHES = 8  # of the data set
MEASURE_S = 1.0
MIN_STEPS = 8
TIMEOUT_S = 600


Way = tuple[Mapping[str, object], Mapping[str, str]]
"""Sections of a configuration, and variables of the environment."""


class Size(NamedTuple):
    """What is trained."""

    model: str
    batch_size: int
    n_channels: int
    side_px: int


def compare_ways(
    case: str, size: Size, ways: Mapping[str, Way], *, device: str, quick: bool, metrics: Sequence[str]
) -> list[Arm]:
    """Run all ways in turn; build arms for their figures, and for how many times as fast as the first each is."""
    rounds = run_rounds(
        list(ways),
        lambda name: start_probe(size, *ways[name], device=device),
        n_rounds=1 if quick else N_ROUNDS,
    )
    return describe_ways(case, rounds, metrics)


def describe_ways(case: str, rounds: Sequence[Round[dict[str, float]]], metrics: Sequence[str]) -> list[Arm]:
    common = {"case": case, "unit_of_replication": "round of two processes"}
    arms = []
    for metric in metrics:
        arms += build_arms(rounds, lambda found, metric=metric: found[metric], metric=metric, **common)
    plain, *others = rounds[0]
    for name in others:
        ratios = compute_geometric_ratios(rounds, name, plain, lambda found: found["samples_per_s"])
        arms.append(build_arm(ratios, arm=name, metric=FASTER, **common))
    return arms


def start_probe(
    size: Size, values: Mapping[str, object], environment: Mapping[str, str], *, device: str
) -> dict[str, float]:
    """Return what ``probe`` finds in a new process with these variables in its environment."""
    asked = {"values": values, "device": device, **size._asdict()}
    return call_in_process(f"{__name__}:probe", asked, timeout_s=TIMEOUT_S, environment=environment)


def build_images(model: str, n_samples: int, n_channels: int, side_px: int) -> Workload:
    """Build a workload of black images in memory."""
    images = torch.zeros(n_samples, n_channels, side_px, side_px)
    return Workload(
        model=lambda: build_model(model, n_classes=10, in_channels=n_channels),
        dataset=lambda: TensorDataset(images, torch.zeros(n_samples).long()),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: optim.AdamW(parameters, lr=1e-4),
    )


def probe(
    values: dict[str, Any], device: str, model: str, batch_size: int, n_channels: int, side_px: int
) -> dict[str, float]:
    """Measure speed by the median step, pages that the system brought and its CPU time a step, and peak memory."""
    workload = build_images(model, N_BATCHES * batch_size, n_channels, side_px)
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
