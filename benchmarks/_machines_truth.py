"""The truth of a simulated machine: how long each plan takes in the long run, and what memory it needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks._machines_device import GIB, Arm, Footprint, StepModel
from benchmarks._machines_hardware import draw_data, draw_gpu, draw_host
from benchmarks._machines_models import FAMILIES, draw_model
from benchmarks._machines_queue import PREFETCH, Lanes, simulate_step_s
from fulltilt.records import Plan

SIZE_SHARES = (0.3, 0.35, 0.25, 0.1)  # small, medium, large, huge
SMALL_COPY_BYTES = 64 * 1024  # a copy up to this is queued with its data and does not block


class Truth(NamedTuple):
    """What a plan does in the long run, without noise."""

    step_s: float
    wanted_cores: float  # processes that wanted a core, on average


class Lane(NamedTuple):
    """A row of ``Lanes``, and what the begin of an epoch adds to each step: all that the time of a step hangs on."""

    n_workers: int
    prefetch: int
    make_s: float
    make_variation: float
    receive_s: float
    pin_s: float
    lag_s: float
    copy_s: float
    launch_s: float
    device_s: float
    n_ahead: int
    edge_s: float


class MachineTruth:
    """One workload on one machine, without noise; ``seed`` is of the batches, ``rng`` draws all else."""

    def __init__(self, seed: int, rng: np.random.Generator):
        self.seed = seed
        self._truths: dict[Lane, Truth] = {}
        self.gpu = draw_gpu(rng)
        self.host = draw_host(rng, self.gpu)
        family = str(rng.choice(sorted(FAMILIES)))
        self.model = draw_model(rng, family, int(rng.choice(4, p=SIZE_SHARES)))
        self.data = draw_data(rng, family)
        self.step_model = StepModel(self.model, self.gpu, self.host, rng)
        self._find_device_s = functools.cache(self.step_model.compute_device_s)
        self._find_footprint = functools.cache(self.step_model.compute_footprint)
        self.waits_each_step = bool(rng.random() < 0.3)

    @property
    def usable_gib(self) -> float:
        """The memory that the allocator of a training process can get."""
        return self.gpu.memory_gib * 0.985 - self.host.held_gib

    def fits(self, plan: Plan) -> bool:
        return self.compute_needed_gib(plan) <= self.usable_gib

    def true_memory_gib(self, plan: Plan) -> float:
        """Return what the allocator would reserve for the plan; a row shows the same, at most what there is."""
        return self.compute_reserved_gib(plan, with_loader=True)

    def find_truths(self, plans: Sequence[Plan], *, kind: str = "end_to_end") -> list[Truth]:
        """Find the truths of many plans at once, which costs little more than one; also of plans that do not fit."""
        part = kind if kind in ("device", "loader") else "whole"
        asked = [self._describe_lane(plan, part) for plan in plans]
        missing = dict.fromkeys(lane for lane in asked if lane not in self._truths)
        for _, found in itertools.groupby(sorted(missing), key=lambda lane: lane.n_workers):
            group = list(found)
            columns = dict(zip(Lane._fields, map(np.array, zip(*group, strict=True)), strict=True))
            edges = columns.pop("edge_s")
            lanes = Lanes(**columns, storage_share=self.data.storage_share, n_streams=self.data.n_streams)
            step_s, wanted = simulate_step_s(lanes, self.host, seed=self.seed)
            truths = map(Truth, (step_s + edges).tolist(), wanted.tolist())
            self._truths.update(zip(group, truths, strict=True))
        return [self._truths[lane] for lane in asked]

    def _describe_lane(self, plan: Plan, part: str) -> Lane:
        host, batch, workers = self.host, plan["batch_size"], plan["num_workers"]
        size = batch * self.model.sample_bytes
        pinned = plan["pin_memory"]
        receive_s = self.compute_receive_s(batch)
        has_step, has_loader = part != "loader", part != "device"
        arm = read_arm(plan)
        launch_s = self.step_model.compute_dispatch_s(arm) if has_step else 0.0
        n_ahead = max(1, min(4, int(9e-3 / max(launch_s, 1e-4)))) if has_step else 4
        blocks = has_loader and not pinned and size > SMALL_COPY_BYTES
        pin_s = size / (1e9 * host.pin_gb_per_s) + 5e-5
        by_thread = pinned and workers > 0
        return Lane(
            n_workers=workers if has_loader else 0,
            prefetch=plan["prefetch_factor"] or PREFETCH,
            make_s=self._compute_make_s(batch, workers > 0) if has_loader else 1e-9,
            make_variation=self.data.variation / np.sqrt(batch) + 0.01,
            receive_s=1e-4 / host.speed if by_thread else receive_s,
            pin_s=0.0 if not (pinned and has_loader) else pin_s + (receive_s if by_thread else 0.0),
            lag_s=0.0 if blocks or not has_loader else size / (1e9 * host.pinned_gb_per_s) + 1e-5,
            copy_s=size / (1e9 * host.pageable_gb_per_s) + 2e-5 if blocks else 0.0,
            launch_s=launch_s,
            device_s=self._find_device_s(arm, batch) if has_step else 0.0,
            n_ahead=0 if self.waits_each_step and has_step else n_ahead,
            edge_s=self._compute_edge_s(plan) if has_loader else 0.0,
        )

    def _compute_make_s(self, batch: int, is_worker: bool) -> float:
        """Return one core's seconds to read, decode and collate a batch; a worker moves it to shared memory, too."""
        host, size = self.host, batch * self.model.sample_bytes
        seconds = batch * self.data.decode_ms / 1e3 / host.speed + size / (1e9 * host.collate_gb_per_s) + 5e-5
        return seconds + (size / (1e9 * host.collate_gb_per_s) + 2e-4 if is_worker else 0.0)

    def compute_receive_s(self, batch: int) -> float:
        size = batch * self.model.sample_bytes
        return self.host.receive_fixed_ms / 1e3 + size / (1e9 * self.host.receive_gb_per_s)

    def _compute_edge_s(self, plan: Plan) -> float:
        """Return what the begin of an epoch adds to each of its steps: workers start, the first batch is waited for."""
        workers, batch = plan["num_workers"], plan["batch_size"]
        if not workers:
            return 0.0
        first_s = self._compute_make_s(batch, True)
        started_s = 0.0 if plan["persistent_workers"] else workers * self.host.spawn_ms / 1e3
        return (first_s + started_s) / max(1, self.data.n_samples // batch)

    def find_footprint(self, plan: Plan) -> Footprint:
        return self._find_footprint(read_arm(plan), plan["batch_size"])

    def estimate_compile_s(self, plan: Plan, kind: str) -> float:
        return 0.0 if kind == "loader" else self.step_model.estimate_compile_s(read_arm(plan))

    def compute_needed_gib(self, plan: Plan, *, with_loader: bool = True) -> float:
        needed = self.find_footprint(plan).needed_bytes
        return (needed + self.compute_input_bytes(plan, with_loader)) / GIB

    def compute_reserved_gib(self, plan: Plan, *, with_loader: bool) -> float:
        reserved = self.find_footprint(plan).reserved_bytes
        return (reserved + self.compute_input_bytes(plan, with_loader)) / GIB

    def compute_input_bytes(self, plan: Plan, with_loader: bool) -> float:
        return plan["batch_size"] * self.model.sample_bytes * (2 if with_loader else 1)


def read_arm(plan: Mapping[str, Any]) -> Arm:
    """Return the part of a plan that changes what the device computes."""
    switches = (field.name for field in dataclasses.fields(Arm) if field.name != "is_low")
    return Arm(is_low=plan["precision"] in ("bf16", "fp16"), **{name: plan[name] for name in switches})
