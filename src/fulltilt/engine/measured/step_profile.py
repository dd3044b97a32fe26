"""Where the steps of a run spend their time and their memory, by operator: some steps under torch's profiler.

Phases of a step (data wait, forward, …) every run tells by itself; this is the look into them. It is no measurement of
the run's speed: the profiler slows down what it watches.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fulltilt.config import Config, plan_of
from fulltilt.engine.build.assemble import build_workload
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.measured.endless_steps import EndlessSteps
from fulltilt.errors import StorageError, UsageError
from fulltilt.measure import NullTimer

N_WARMUP_STEPS = 3  # allocations, workers and algorithms are chosen by then
TRACE, SNAPSHOT = "trace.json", "memory_snapshot.pickle"
SNAPSHOT_ENTRIES = 200_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """Time of one operator, without those that it calls."""

    name: str
    calls_per_step: float
    cpu_ms_per_step: float
    device_ms_per_step: float | None  # of the kernels that it queued; None without a GPU
    share_pct: float  # of all operators together; of their device time on a GPU
    mib_per_step: float  # allocated less freed, on the device that the steps ran on
    shapes: str  # of its tensors, where it took most time: "[64, 32] [32]"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """What some steps spent their time on."""

    device: str
    n_steps: int
    operators: tuple[OperatorTime, ...]  # the costliest first
    trace_path: str  # for chrome://tracing or ui.perfetto.dev
    snapshot_path: str | None  # allocations of the steps, for pytorch.org/memory_viz; None without a GPU


def profile_steps(config: Config, *, device: torch.device, n_steps: int, out_dir: Path) -> StepProfile:
    """Take ``n_steps`` optimizer steps as the run would, after some for warm-up, under torch's profiler.

    Raises:
        UsageError: ``n_steps`` is below 1.
        StorageError: the files cannot be written.

    Device: waits for it before and behind the steps. **Cost**: a trace of 0.1 to 5 MB a step.
    """
    if n_steps < 1:
        raise UsageError(f"{n_steps} steps cannot be profiled; at least 1 is needed")
    workload = build_workload(config)
    with build_run(config, plan_of(config), device=device, workload=workload, strict=False) as run:
        with _telling_where(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
        return _profile(run, n_steps, out_dir)


@contextlib.contextmanager
def _telling_where(out_dir: Path) -> Iterator[None]:
    """Tell where writing failed. Put it around writing alone: an OSError of a step is that of the data."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"the profile cannot be written to {out_dir} ({error}); give another --out") from error


def _profile(run: Run, n_steps: int, out_dir: Path) -> StepProfile:
    steps, is_gpu = EndlessSteps(run, NullTimer()), run.device.type == "cuda"
    for _ in range(N_WARMUP_STEPS):
        steps()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    snapshot = out_dir / SNAPSHOT
    if is_gpu:
        torch.cuda.synchronize(run.device)
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    try:
        with profile(activities=activities, record_shapes=True, profile_memory=True) as profiled:
            for _ in range(n_steps):
                steps()
            if is_gpu:
                torch.cuda.synchronize(run.device)
        if is_gpu:
            with _telling_where(out_dir):
                torch.cuda.memory._dump_snapshot(str(snapshot))
    finally:
        if is_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
    trace = out_dir / TRACE
    with _telling_where(out_dir):
        profiled.export_chrome_trace(str(trace))
    return StepProfile(
        device=str(run.device),
        n_steps=n_steps,
        operators=_list_operators(profiled, n_steps, is_gpu=is_gpu),
        trace_path=str(trace),
        snapshot_path=str(snapshot) if is_gpu else None,
    )


def _list_operators(profiled: Any, n_steps: int, *, is_gpu: bool) -> tuple[OperatorTime, ...]:
    def read_us(event: Any) -> float:
        return event.self_device_time_total if is_gpu else event.self_cpu_time_total

    averages, memory = profiled.key_averages(), "self_device_memory_usage" if is_gpu else "self_cpu_memory_usage"
    by_shape = sorted(profiled.key_averages(group_by_input_shape=True), key=read_us)
    shapes = {event.key: " ".join(str(shape) for shape in event.input_shapes if shape) for event in by_shape}
    # Kernels stand in the list once more by themselves: their time is that of the operator that queued them.
    by_operator = [event for event in averages if event.device_type == DeviceType.CPU]
    events = sorted(by_operator, key=read_us, reverse=True)
    total_us = sum(read_us(event) for event in events)
    return tuple(
        OperatorTime(
            name=event.key,
            calls_per_step=event.count / n_steps,
            cpu_ms_per_step=event.self_cpu_time_total / 1e3 / n_steps,
            device_ms_per_step=event.self_device_time_total / 1e3 / n_steps if is_gpu else None,
            share_pct=100 * read_us(event) / total_us if total_us else 0.0,
            mib_per_step=getattr(event, memory) / 2**20 / n_steps,
            shapes=shapes.get(event.key, ""),
        )
        for event in events
    )
