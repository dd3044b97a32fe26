"""Holds a run against the speed that the tuner measured for its plan, and says why when it is slower.

The promise stands in the configuration (``run.promise``, written by ``tune --apply``) and names the plan, the machine,
the model and the data it is true of. Live speed is compared in windows of training time; after several slow ones in a
row the machine is asked: the clock, neighbours, the disk, memory, the data workers, the threads.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fulltilt.engine.build.facts import describe_data, name_device, name_model
from fulltilt.hardware import (
    CpuTimes,
    Nvml,
    RealNvml,
    compute_hostname_hash,
    compute_steal_pct,
    read_cpu_times,
    read_pressure,
    read_process_tree_cpu,
)
from fulltilt.levers import compute_plan_digest
from fulltilt.measure.utilization import find_device_index

if TYPE_CHECKING:
    from fulltilt.config.model import Promise
    from fulltilt.engine.build.run import Run
from fulltilt.engine.step.data_waits import DataWaits

WINDOW_S = 2.0  # of training; single intervals of a few milliseconds say nothing
N_SLOW_WINDOWS = 3
MARGIN_PCT = 5.0  # below the promised interval: about what two processes of one plan differ by
BUSY_PCT = 10.0  # of the time some task waited: below it, nobody would notice
NEIGHBOUR_CORES = 0.25
DATA_WAIT_POINTS = 10.0  # above the share of data wait when tuned
SLOWDOWNS = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the machine says at one moment. ``None``: it does not say."""

    time_s: float
    cpu_wait_us: int | None = None  # since boot, as the next two
    disk_wait_us: int | None = None
    memory_wait_us: int | None = None
    cpu_times: CpuTimes = dataclasses.field(default_factory=lambda: CpuTimes(steal_jiffies=None, total_jiffies=None))
    own_cpu_s: float | None = None  # of the run's processes and their data workers
    n_workers: int = 0
    stopped_workers: tuple[int, ...] = ()
    data_wait_s: float = 0.0  # since the start of the run
    n_threads: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    n_gpu_neighbours: int = 0


class PromiseWatch:
    """Takes what every logging interval measured; speaks once when the run falls out of the promise.

    The first window is the warm-up and does not count. A window within the promise ends a fall: another one is told
    again.

    Args:
        look: Reads the machine; called after the warm-up and each window within the promise, and for the reasons of a
            fall.
    """

    def __init__(self, promise: Promise, look: Callable[[], Look]):
        self._promise, self._look = promise, look
        self._seconds = 0.0
        self._n_samples = self._n_slow = 0
        self._slow_samples, self._slow_seconds = 0, 0.0
        self._is_warm = False
        self._before: Look | None = None

    def observe(self, n_samples: int, seconds: float) -> str | None:
        """Count an interval; a message when this was the window that made it a fall."""
        self._seconds += seconds
        self._n_samples += n_samples
        if self._seconds < WINDOW_S:
            return None
        n_samples, seconds = self._n_samples, self._seconds
        self._n_samples, self._seconds = 0, 0.0
        if not self._is_warm:
            self._is_warm, self._before = True, self._look()
            return None
        lowest = self._promise.samples_per_s[0] * (1 - MARGIN_PCT / 100)
        if n_samples / seconds >= lowest:
            self._n_slow, self._slow_samples, self._slow_seconds = 0, 0, 0.0
            self._before = self._look()
            return None
        self._n_slow += 1
        self._slow_samples += n_samples
        self._slow_seconds += seconds
        if self._n_slow != N_SLOW_WINDOWS or self._before is None:
            return None
        return self._describe(self._slow_samples / self._slow_seconds, self._before, self._look())

    def _describe(self, rate: float, before: Look, now: Look) -> str:
        low, high = self._promise.samples_per_s
        reasons = find_reasons(self._promise, before, now)
        why = "; ".join(reasons) or (
            "nothing that was looked at explains it (clock, neighbours, disk, memory, data workers, data wait, threads)"
        )
        wait_pct = self._promise.cpu_pressure_pct
        busy = "" if wait_pct is None else f", busy then (some task waited for a core {wait_pct:.0f} % of the time)"
        return (
            f"{rate:,.0f} samples/s, tune measured {low:,.0f} to {high:,.0f} for this plan on this machine{busy}: {why}"
        )


def find_reasons(promise: Promise, before: Look, now: Look) -> list[str]:
    """What may have slowed the run down between two looks, one sentence each."""
    seconds = max(now.time_s - before.time_s, 1e-9)
    found = [
        _explain_clock(now),
        f"{now.n_gpu_neighbours} other processes use the GPU" if now.n_gpu_neighbours else None,
        _explain_cores(before, now, seconds),
        _explain_wait("the disk", before.disk_wait_us, now.disk_wait_us, seconds),
        _explain_wait("memory (is it swapping?)", before.memory_wait_us, now.memory_wait_us, seconds),
        _explain_workers(now),
        _explain_data(promise, before, now, seconds),
        _explain_threads(promise, now),
    ]
    return [reason for reason in found if reason]


def _explain_clock(now: Look) -> str | None:
    causes = [name for name in now.throttle_reasons if name in SLOWDOWNS]
    if not causes:
        return None
    clocks = f", {now.sm_clock_mhz} of {now.sm_clock_max_mhz} MHz" if now.sm_clock_mhz else ""
    return f"the GPU holds its clock down ({', '.join(causes)}{clocks})"


def _explain_cores(before: Look, now: Look, seconds: float) -> str | None:
    """CPU pressure from outside; tasks of the run that wait for each other are no news to a tuned plan."""
    steal_pct = compute_steal_pct(before.cpu_times, now.cpu_times)
    if steal_pct is not None and steal_pct >= BUSY_PCT:
        return f"CPU pressure: the host took {steal_pct:.0f} % of the cores' time for others"
    wait_pct = _compute_wait_pct(before.cpu_wait_us, now.cpu_wait_us, seconds)
    cores = _compute_foreign_cores(before, now, seconds)
    if wait_pct is None or wait_pct < BUSY_PCT or cores is None or cores < NEIGHBOUR_CORES:
        return None
    waited = f"some task waited for one {wait_pct:.0f} % of the time"
    return f"CPU pressure: other processes use {cores:.1f} cores, and {waited}"


def _compute_foreign_cores(before: Look, now: Look, seconds: float) -> float | None:
    """Cores that processes other than this run's kept busy."""
    times = [before.cpu_times.idle_jiffies, before.cpu_times.total_jiffies]
    times += [now.cpu_times.idle_jiffies, now.cpu_times.total_jiffies]
    if None in times or before.own_cpu_s is None or now.own_cpu_s is None:
        return None
    idle_before, total_before, idle_now, total_now = (float(t) for t in times if t is not None)
    busy_s = (total_now - total_before - (idle_now - idle_before)) / os.sysconf("SC_CLK_TCK")
    return max(0.0, busy_s - (now.own_cpu_s - before.own_cpu_s)) / seconds


def _explain_wait(what: str, before_us: int | None, now_us: int | None, seconds: float) -> str | None:
    wait_pct = _compute_wait_pct(before_us, now_us, seconds)
    if wait_pct is None or wait_pct < BUSY_PCT:
        return None
    return f"some task waited for {what} {wait_pct:.0f} % of the time"


def _compute_wait_pct(before_us: int | None, now_us: int | None, seconds: float) -> float | None:
    return None if before_us is None or now_us is None else (now_us - before_us) / seconds / 1e4


def _explain_workers(now: Look) -> str | None:
    if not now.stopped_workers:
        return None
    pids = ", ".join(map(str, now.stopped_workers))
    return f"{len(now.stopped_workers)} of {now.n_workers} data workers stand still (pid {pids})"


def _explain_data(promise: Promise, before: Look, now: Look, seconds: float) -> str | None:
    wait_pct = 100 * (now.data_wait_s - before.data_wait_s) / seconds
    usual_pct = promise.data_wait_pct or 0.0
    if wait_pct < usual_pct + DATA_WAIT_POINTS:
        return None
    return f"the loop waited for data {wait_pct:.0f} % of the time, {usual_pct:.0f} % when tuned"


def _explain_threads(promise: Promise, now: Look) -> str | None:
    if promise.threads is None or now.n_threads is None or promise.threads == now.n_threads:
        return None
    return f"torch uses {now.n_threads} threads, {promise.threads} when tuned"


class MachineLook:
    """Reads this machine for a run.

    Args:
        n_ranks: Processes of the run; of several the others are this one's siblings, and no neighbours.

    Cost: some small files, and with a GPU one reading of NVML.
    """

    def __init__(self, device: torch.device, waits: DataWaits, nvml: Nvml | None = None, *, n_ranks: int = 1):
        self._waits, self._n_ranks = waits, n_ranks
        self._nvml = (nvml or RealNvml()) if device.type == "cuda" else None
        self._index = find_device_index(device, self._nvml) if self._nvml is not None else None

    def __call__(self) -> Look:
        own = read_process_tree_cpu(os.getpid())
        cpu_s = own.cpu_s if self._n_ranks == 1 else read_process_tree_cpu(os.getppid()).cpu_s
        return Look(
            time_s=time.perf_counter(),
            cpu_wait_us=read_pressure().some_total_us,
            disk_wait_us=read_pressure(resource="io").some_total_us,
            memory_wait_us=read_pressure(resource="memory").some_total_us,
            cpu_times=read_cpu_times(),
            own_cpu_s=cpu_s,
            n_workers=own.n_children,
            stopped_workers=own.stopped,
            data_wait_s=self._waits.seconds,
            n_threads=torch.get_num_threads(),
            **self._look_at_gpu(),
        )

    def _look_at_gpu(self) -> dict[str, Any]:
        if self._nvml is None or self._index is None:
            return {}
        status = self._nvml.read_status(self._index)
        pids = {process.pid for process in status.processes or ()}
        # One of them is this one; in a container the driver names it by the host's number.
        return {
            "throttle_reasons": status.throttle_reasons or (),
            "sm_clock_mhz": status.sm_clock_mhz,
            "sm_clock_max_mhz": status.sm_clock_max_mhz,
            "n_gpu_neighbours": max(0, len(pids) - 1),
        }


def _find_other(promise: Promise, run: Run) -> str | None:
    """What the promise is of, where that is not this run."""
    model = run.setup.model
    n_parameters = sum(p.numel() for p in model.parameters())
    compared = [
        ("plan", promise.plan, compute_plan_digest(run.plan)),
        ("machine", promise.machine, compute_hostname_hash(socket.gethostname())),
        ("device", promise.device, name_device(run.device)),
        ("model", promise.model, name_model(model)),
        ("model, by its number of parameters", promise.n_parameters, n_parameters),
        ("data set", promise.data, describe_data(run.dataset, run.facts)),
    ]
    for what, promised, this in compared:
        if promised is not None and promised != this:
            return f"run.promise is of another {what} ({promised}, this is {this})"
    return None


def build_watch(run: Run) -> tuple[PromiseWatch | None, str | None]:
    """Build what holds the run to its promise; or say why nothing does, or why it holds to little."""
    promise = run.config.run.promise if run.config is not None else None
    if promise is None:
        return None, None
    n_ranks = run.world.n_ranks
    if promise.n_ranks != n_ranks:
        return None, (
            f"run.promise was measured with run.n_ranks {promise.n_ranks}, and this run has {n_ranks}: it is not held "
            "against this run"
        )
    if other := _find_other(promise, run):
        return None, f"{other}: it is not held against this run; fulltilt tune --apply writes a new one"
    run.data_waits = DataWaits()
    return PromiseWatch(promise, MachineLook(run.device, run.data_waits, n_ranks=n_ranks)), _note_busy(promise)


def _note_busy(promise: Promise) -> str | None:
    if promise.cpu_pressure_pct is None:
        return None
    low, high = promise.samples_per_s
    return (
        f"run.promise ({low:,.0f} to {high:,.0f} samples/s) was measured on a busy machine (some task waited for a "
        f"core {promise.cpu_pressure_pct:.0f} % of the time): slower than a quiet one allows is within it; fulltilt "
        "tune --apply on a quiet machine, with --out and a new folder, writes a narrower one"
    )
