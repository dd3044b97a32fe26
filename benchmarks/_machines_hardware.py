"""Hardware and data of the simulated machines: graphics cards, hosts, datasets, and how they are drawn."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np


class Gpu(NamedTuple):
    """A card, by its data sheet. ``low`` is the 16-bit format it has matrix units for."""

    name: str
    memory_gib: float
    vector_tflops: float  # fp32
    matrix_tflops: float  # 16-bit, dense
    bandwidth_gb_per_s: float
    n_multiprocessors: int
    capability: tuple[int, int]
    low: str = "bf16"


GPUS = (
    Gpu("laptop 8 GB", 8, 11, 45, 256, 24, (8, 9)),
    Gpu("desktop 12 GB", 12, 12.7, 51, 360, 28, (8, 6)),
    Gpu("cloud 16 GB", 16, 8, 45, 300, 40, (7, 5), "fp16"),
    Gpu("server 16 GB", 16, 15, 100, 900, 80, (7, 0), "fp16"),
    Gpu("desktop 24 GB", 24, 35, 71, 936, 82, (8, 6)),
    Gpu("desktop 24 GB, newer", 24, 82, 165, 1008, 128, (8, 9)),
    Gpu("server 40 GB", 40, 19.5, 250, 1555, 108, (8, 0)),
    Gpu("server 80 GB", 80, 19.5, 250, 2039, 108, (8, 0)),
    Gpu("server 80 GB, newer", 80, 60, 700, 3350, 132, (9, 0)),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The computer around the card. Rates in GB/s are 1e9 bytes.

    Attributes:
        n_cores: What the scheduler offers; half of them share a core with another when ``has_siblings``.
        speed: Of one core, 1 is a recent desktop.
        sibling_gain: What the second thread of a core adds.
        crowding: Share of speed that a core loses for each other busy one (clock, caches, memory).
        dispatch_us: Host time of one operator of the forward pass.
        pin_gil: Share of speed that the main process loses while its pinning thread works.
        held_gib: Device memory that belongs to the context and to other programs.
    """

    n_cores: int
    has_siblings: bool
    speed: float
    sibling_gain: float
    crowding: float
    dispatch_us: float
    pinned_gb_per_s: float
    pageable_gb_per_s: float
    pin_gb_per_s: float
    receive_gb_per_s: float
    receive_fixed_ms: float
    collate_gb_per_s: float
    pin_gil: float
    spawn_ms: float
    held_gib: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What one sample costs.

    Attributes:
        decode_ms: Mean time of one sample on one core at speed 1, storage included.
        variation: Coefficient of variation between samples; they are lognormal.
        storage_share: Part of ``decode_ms`` that waits for storage.
        n_streams: Readers that storage serves at full speed.
    """

    n_samples: int
    decode_ms: float
    variation: float
    storage_share: float
    n_streams: float


DECODE_MS = {
    "cnn": (0.04, 8.0), "vit": (0.15, 10.0), "gpt": (0.004, 0.4), "unet": (0.4, 30.0), "tabular": (0.002, 0.03),
    "audio": (0.1, 8.0),
}  # fmt: skip
"""Milliseconds a sample from cheap to dear, per family; log-uniform between them."""


def draw_gpu(rng: np.random.Generator) -> Gpu:
    """Draw one of the classes, each figure up to a tenth off its data sheet (clocks, cooling, power limits)."""
    gpu = GPUS[int(rng.integers(len(GPUS)))]
    factors = rng.uniform(0.9, 1.05, 3)
    return gpu._replace(
        vector_tflops=gpu.vector_tflops * factors[0],
        matrix_tflops=gpu.matrix_tflops * factors[1],
        bandwidth_gb_per_s=gpu.bandwidth_gb_per_s * factors[2],
    )


def draw_host(rng: np.random.Generator, gpu: Gpu) -> Host:
    is_server = gpu.name.startswith(("server", "cloud"))
    n_cores = int(rng.choice([4, 8, 12, 16, 32, 64] if is_server else [2, 4, 8, 12, 16, 24]))
    speed = float(rng.uniform(0.55, 0.9) if is_server else rng.uniform(0.7, 1.2))
    pinned = float(rng.uniform(10, 25) if gpu.capability >= (8, 0) else rng.uniform(8, 13))
    return Host(
        n_cores=n_cores,
        has_siblings=bool(n_cores > 2 and rng.random() < 0.6),
        speed=speed,
        sibling_gain=float(rng.uniform(0.15, 0.35)),
        crowding=float(rng.uniform(0.002, 0.02)),
        dispatch_us=float(rng.uniform(5, 11)) / speed,
        pinned_gb_per_s=pinned,
        pageable_gb_per_s=pinned * float(rng.uniform(0.25, 0.6)),
        pin_gb_per_s=float(rng.uniform(3, 9)),
        receive_gb_per_s=float(rng.uniform(1.5, 6)),
        receive_fixed_ms=float(rng.uniform(0.1, 0.35)) / speed,
        collate_gb_per_s=float(rng.uniform(1.0, 4.0)),
        pin_gil=float(rng.uniform(0.05, 0.3)),
        spawn_ms=float(rng.uniform(8, 40)),
        held_gib=float(rng.uniform(0.35, 0.6) + (0 if is_server else rng.uniform(0, 0.7))),
    )


def draw_data(rng: np.random.Generator, family: str) -> Data:
    low, high = DECODE_MS[family]
    return Data(
        n_samples=int(np.exp(rng.uniform(np.log(20_000), np.log(1_300_000)))),
        decode_ms=float(np.exp(rng.uniform(np.log(low), np.log(high)))),
        variation=float(rng.uniform(0.1, 0.9)),
        storage_share=float(rng.choice([0.0, rng.uniform(0.05, 0.5)])),
        n_streams=float(rng.uniform(2, 20)),
    )
