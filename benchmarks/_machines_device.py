"""Device time and memory of one simulated step, kernel by kernel.

Every layer is one or more kernels forwards and backwards. A kernel takes the longer of its arithmetic, in whole waves
of tiles over the multiprocessors, and its memory traffic, and a fixed time to start. Which tiling or convolution
algorithm runs is chosen by a heuristic that errs, so time jumps at some batch sizes. Memory is the largest footprint
while walking the layers forwards, backwards and through the optimizer.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from benchmarks._machines_hardware import Gpu, Host
from benchmarks._machines_models import MATRIX, Layer, Model

GIB = 2**30
KERNEL_S = 2.6e-6  # to start and drain one kernel on the device
TILES = np.array([(64, 64, 0.55), (128, 64, 0.68), (128, 128, 0.8), (256, 128, 0.88)])
"""Rows, columns and share of the peak rate that a tile of this size can reach."""
SPLIT_DEPTH = 512  # a reduction is split over idle multiprocessors in pieces of at least this
TRAFFIC_SHARE = 0.8  # of the data sheet's bandwidth that kernels see
STATE_BYTES = 12  # weight and two moments of AdamW, fp32
SAVED_WHEN_FUSED = {"pointwise": 0.35, "norm": 0.5}  # a compiled backward computes the rest again
SEGMENT_BYTES = 2 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """The levers that change what the device does."""

    is_low: bool  # 16-bit autocast
    channels_last: bool = False
    compile: bool = False
    activation_checkpointing: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quirks:
    """What differs from model to model and no data sheet tells; arrays have one entry a layer."""

    heuristic_log: np.ndarray  # (layers, tiles): error of the heuristic's estimate
    winograd_from_rows: np.ndarray  # rows of the product from which the heuristic takes the transform algorithm
    channels_last_rate: np.ndarray  # relative speed of 16-bit convolutions in that layout
    channels_last_wide_rate: np.ndarray  # the same in fp32
    fused_share: float  # of the possible fusion that the compiler achieves: graph breaks
    compiled_rate: float  # of matrix kernels under the compiler
    compiler_picks_layout: bool
    fragmentation: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Peak device memory of a step, in bytes; without the context of the process."""

    allocated_bytes: float
    reserved_bytes: float
    needed_bytes: float  # below this the allocator cannot go, however often it gives segments back
    ideal_bytes: float  # what tensors alone take: no workspace, no rounding


class StepModel:
    """Device seconds, host seconds and memory of one step of ``model`` on ``gpu``, by arm and batch."""

    def __init__(self, model: Model, gpu: Gpu, host: Host, rng: np.random.Generator):
        self._gpu, self._host = gpu, host
        self._bytes_per_s = 1e9 * gpu.bandwidth_gb_per_s * TRAFFIC_SHARE
        self.quirks = _draw_quirks(rng, model)
        self._read_layers(model.layers)
        self._layers_key = f"{model.family}{len(model.layers)}{self.quirks.fragmentation:.6f}"

    def _read_layers(self, layers: Sequence[Layer]) -> None:
        def column(name: str) -> np.ndarray:
            return np.array([getattr(layer, name) for layer in layers], dtype=float)

        self._rows, self._cols, self._depth = column("rows"), column("cols"), column("depth")
        self._weights, self._in, self._out = column("weights"), column("in_elements"), column("out_elements")
        self._block, self._serial = column("block").astype(int), column("n_serial")
        kinds = np.array([layer.kind for layer in layers])
        self._is_matrix = np.isin(kinds, MATRIX)
        self._is_conv, self._is_depthwise = kinds == "conv", kinds == "depthwise"
        self._is_light = np.isin(kinds, ("pointwise", "norm"))
        self._is_wide = np.array([layer.is_wide for layer in layers])
        self._is_3x3 = self._is_conv & (self._depth % 9 == 0) & (self._depth > 27)
        self._saved_when_fused = np.array([SAVED_WHEN_FUSED.get(kind, 1.0) for kind in kinds])
        self._n_tensors = 2 * int((self._weights > 0).sum()) + 2

    def compute_device_s(self, arm: Arm, batch: int) -> float:
        """Return the seconds that the device computes, kernels back to back."""
        forward_s, backward_s = self._compute_kernels_s(arm, batch)
        again_s = forward_s[self._block >= 0].sum() if arm.activation_checkpointing else 0.0
        return float(forward_s.sum() + again_s + backward_s.sum() + self._compute_optimizer_s())

    def compute_dispatch_s(self, arm: Arm) -> float:
        """Return the seconds of one core that the host needs to launch a step."""
        us = self._host.dispatch_us
        forward = 1.0 + 0.9 * arm.is_low * self._is_matrix
        n_forward = float((forward * np.maximum(1, self._serial)).sum())
        n_blocks = float((forward * self._serial)[self._block >= 0].sum())
        cost_us = us * (n_forward + 0.7 * n_forward + arm.activation_checkpointing * 1.2 * n_blocks) + 12 * us
        if arm.compile:
            kept = 1 - 0.72 * self.quirks.fused_share
            cost_us = kept * cost_us + 15 * us
        return 1e-6 * (cost_us + 0.9 * self._n_tensors + 8 * us)

    def estimate_compile_s(self, arm: Arm) -> float:
        return (6 + 0.22 * len(self._rows) * (1.3 if arm.activation_checkpointing else 1)) * arm.compile

    def _compute_kernels_s(self, arm: Arm, batch: int) -> tuple[np.ndarray, np.ndarray]:
        width = np.where(arm.is_low & ~self._is_wide, 2.0, 4.0)
        moved = self._compute_traffic_bytes(arm, batch, width)
        forward_s, backward_s = moved / self._bytes_per_s, 2.2 * moved / self._bytes_per_s
        conv_rate = self._read_layout_rate(arm)
        m, n, k = batch * self._rows, self._cols, self._depth
        with np.errstate(divide="ignore", invalid="ignore"):
            first = self._compute_product_s(arm, m, n, k) / conv_rate
            second = (self._compute_product_s(arm, m, k, n) + self._compute_product_s(arm, n, k, m)) / conv_rate
        first, second, extra_s = self._choose_convolution(arm, batch, first, second)
        on = self._is_matrix
        forward_s = np.where(on, np.maximum(first, forward_s) + extra_s, forward_s)
        backward_s = np.where(on, np.maximum(second, backward_s) + 2 * extra_s, backward_s)
        slow = np.where(self._is_depthwise, 1 / (conv_rate if arm.channels_last else 1), 1.0)
        n_kernels = self._serial * np.where(self._is_light & arm.compile, 1 - 0.7 * self.quirks.fused_share, 1.0)
        return slow * forward_s + KERNEL_S * n_kernels, slow * backward_s + 2 * KERNEL_S * n_kernels

    def _compute_traffic_bytes(self, arm: Arm, batch: int, width: np.ndarray) -> np.ndarray:
        """Return the bytes of the forward kernels: activations, weights, and what casting and layout changes add."""
        activations = batch * (self._in + self._out) * width
        if arm.compile:
            activations = np.where(self._is_light, activations * (1 - 0.62 * self.quirks.fused_share), activations)
        weights = self._weights * width
        if arm.is_low:
            weights = weights + 6 * self._weights
            after_wide = np.concatenate([[True], self._is_wide[:-1]])
            cast = np.where(self._is_matrix & after_wide, 6.0 * batch * self._in, 0.0)
            activations = activations + cast * (0.3 if arm.compile else 1.0)
        needs_turning = arm.is_low and not arm.channels_last
        if needs_turning and not (arm.compile and self.quirks.compiler_picks_layout):
            activations = activations + np.where(self._is_conv, 2.0 * batch * (self._in + self._out) * width, 0.0)
        return activations + weights

    def _read_layout_rate(self, arm: Arm) -> np.ndarray:
        rate = np.ones(len(self._rows))
        if arm.channels_last:
            rates = self.quirks.channels_last_rate if arm.is_low else self.quirks.channels_last_wide_rate
            rate = np.where(self._is_conv | self._is_depthwise, rates, rate)
        return np.where(self._is_matrix, rate * (self.quirks.compiled_rate if arm.compile else 1.0), rate)

    def _compute_product_s(self, arm: Arm, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Time m × k times k × n in whole waves, for the tiling that the heuristic takes."""
        low = arm.is_low & ~self._is_wide
        teraflops = np.where(low, self._gpu.matrix_tflops, self._gpu.vector_tflops)
        n_units = self._gpu.n_multiprocessors
        unit_rate = 1e12 * teraflops / n_units
        options = []
        for tile_rows, tile_cols, share in TILES:
            tiles = np.ceil(m / tile_rows) * np.ceil(n / tile_cols)
            pieces = np.clip(np.floor(n_units / np.maximum(tiles, 1)), 1, np.maximum(1, k // SPLIT_DEPTH))
            waves = np.ceil(tiles * pieces / n_units)
            options.append(waves * 2 * tile_rows * tile_cols * k / pieces / (unit_rate * share))
        seconds = np.stack(options, axis=1)
        taken = np.argmin(np.log(np.maximum(seconds, 1e-12)) + self.quirks.heuristic_log, axis=1)
        return np.take_along_axis(seconds, taken[:, None], axis=1)[:, 0] * self._serial**0.5

    def _choose_convolution(
        self, arm: Arm, batch: int, first: np.ndarray, second: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Run fp32 convolutions as transformed products where that gains: less arithmetic, more traffic."""
        nothing = np.zeros(len(first))
        if arm.is_low or arm.channels_last:
            return first, second, nothing
        traffic_s = 6.0 * batch * (self._in + self._out) / self._bytes_per_s
        gains = (batch * self._rows >= self.quirks.winograd_from_rows) & self._is_3x3
        return np.where(gains, first / 2.25, first), np.where(gains, second / 1.8, second), gains * traffic_s

    def _compute_optimizer_s(self) -> float:
        n_kernels = 10 * (1 + self._n_tensors // 40)
        return 52 * self._weights.sum() / self._bytes_per_s + n_kernels * KERNEL_S

    def compute_footprint(self, arm: Arm, batch: int) -> Footprint:
        """Return the peak over the walk: forwards, backwards layer by layer, the optimizer."""
        width = np.where(arm.is_low & ~self._is_wide, 2.0, 4.0)
        saved = batch * self._out * width
        if arm.compile:
            saved = saved * (1 - self.quirks.fused_share * (1 - self._saved_when_fused))
        live = np.cumsum(saved)
        if arm.activation_checkpointing:
            live = self._walk_checkpointed(saved, batch * self._in * width)
        n_weights = self._weights.sum()
        gradients = 4 * (n_weights - np.cumsum(self._weights) + self._weights)
        casts = 2 * n_weights if arm.is_low else 0.0
        passing = batch * (self._in + self._out) * width
        tensors = float(np.max(live + passing + gradients)) + casts
        stepping = 8 * n_weights
        ideal = STATE_BYTES * n_weights + max(tensors, stepping)
        workspace = self._compute_workspace(arm, batch)
        allocated = STATE_BYTES * n_weights + max(tensors + workspace, stepping) + 512 * 3 * len(self._rows)
        loss = self.quirks.fragmentation * _draw_from_text(f"{self._layers_key}{arm}{batch}")
        held = np.ceil(allocated * (1 + loss) / SEGMENT_BYTES) * SEGMENT_BYTES + 20 * 2**20
        return Footprint(
            allocated_bytes=allocated,
            reserved_bytes=held,
            needed_bytes=allocated * (1 + 0.4 * loss) + 20 * 2**20,
            ideal_bytes=ideal,
        )

    def _walk_checkpointed(self, saved: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """Return the live bytes when the backward pass reaches each layer: earlier blocks' inputs, its own block."""
        inside = self._block >= 0
        starts = inside & (np.concatenate([[-1], self._block[:-1]]) != self._block)
        kept = np.cumsum(np.where(inside, 0.0, saved) + np.where(starts, inputs, 0.0))
        total = np.cumsum(saved)
        begin = np.maximum.accumulate(np.where(starts, total - saved, 0.0))
        return kept + np.where(inside, total - begin, 0.0)

    def _compute_workspace(self, arm: Arm, batch: int) -> float:
        base = 32e6 if self._gpu.capability >= (9, 0) else 8.5e6
        if not self._is_conv.any():
            return base
        area = batch * np.max((self._in + self._out) * self._is_conv) * (2.0 if arm.is_low else 4.0)
        share = 0.25 * (0.3 if arm.is_low and arm.channels_last else 1.0)
        return base + min(share * area, 0.12 * self._gpu.memory_gib * GIB)


def _draw_quirks(rng: np.random.Generator, model: Model) -> Quirks:
    n_layers = len(model.layers)
    loses = rng.random() < 0.16
    rate = np.exp(rng.uniform(np.log(0.25), np.log(0.85))) if loses else np.exp(rng.normal(0.06, 0.1))
    jitter = np.exp(rng.normal(0, 0.12, n_layers))
    return Quirks(
        heuristic_log=rng.normal(0, 0.12, (n_layers, len(TILES))),
        winograd_from_rows=np.exp(rng.normal(np.log(30_000), 1.2, n_layers)),
        channels_last_rate=rate * jitter,
        channels_last_wide_rate=np.exp(rng.normal(-0.15, 0.2)) * jitter,
        fused_share=float(rng.uniform(0.2, 0.5) if rng.random() < 0.12 else rng.uniform(0.8, 1.0)),
        compiled_rate=float(np.exp(rng.normal(0.0, 0.03))),
        compiler_picks_layout=bool(rng.random() < 0.6),
        fragmentation=float(rng.uniform(0.02, 0.14)),
    )


def _draw_from_text(text: str) -> float:
    """Return a number in [0, 1) that is the same in every process and jumps from plan to plan."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48
