"""Compares a run with the speed that ``tune`` measured for its plan, and says why it is slower.

``tune --apply`` has ``run.promise`` of the configuration name a file of the search: the speed, and the plan, machine,
model and data that it holds for. Live speed is compared in windows of training time. After several slow windows in a
row the machine is read once more, and ``find_reasons`` compares that reading with the one from when the run was fast.
"""

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fulltilt.engine.build.facts import describe_data, name_device, name_model
from fulltilt.engine.build.run import Run
from fulltilt.engine.step.data_waits import DataWaits
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
from fulltilt.records.promise import Promise, read_promise

WINDOW_S = 2.0  # of training; single intervals of a few milliseconds say nothing
N_SLOW_WINDOWS = 3
MARGIN_PCT = 5.0  # below the promised interval: about what two processes of one plan differ by
BUSY_PCT = 10.0  # of the time some task waited: below it, nobody would notice
NEIGHBOUR_CORES = 0.25
DATA_WAIT_POINTS = 10.0  # above the share of data wait when tuned
SLOWDOWNS = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)
UNKNOWN_TIMES = CpuTimes(steal_jiffies=None, total_jiffies=None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the machine says at one moment. ``None``: it does not say."""

    time_s: float
    cpu_wait_us: int | None = None  # since boot, as the next two
    disk_wait_us: int | None = None
    memory_wait_us: int | None = None
    cpu_times: CpuTimes = UNKNOWN_TIMES
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
    """Takes what every logging interval measured, and warns once when the run becomes slower than promised.

    The first window is the warm-up and does not count. After a window as fast as promised it may warn again.

    Args:
        look: Reads the machine; called after the warm-up and each window as fast as promised, and for a warning.
    """

    def __init__(self, promise: Promise, look: Callable[[], Look]):
        self._promise, self._look = promise, look
        self._n_samples, self._seconds = 0, 0.0  # of the window under way
        self._slow: list[tuple[int, float]] = []  # samples and seconds of the slow windows in a row
        self._before: Look | None = None  # None: not warm yet

    def observe(self, n_samples: int, seconds: float) -> str | None:
        """Count an interval; return a warning when it ends the window that makes the run too slow."""
        self._n_samples += n_samples
        self._seconds += seconds
        if self._seconds < WINDOW_S:
            return None
        window = (self._n_samples, self._seconds)
        self._n_samples, self._seconds = 0, 0.0
        lowest = self._promise.samples_per_s[0] * (1 - MARGIN_PCT / 100)
        if self._before is None or window[0] / window[1] >= lowest:
            self._slow, self._before = [], self._look()
            return None
        self._slow = [*self._slow, window][: N_SLOW_WINDOWS + 1]
        if len(self._slow) != N_SLOW_WINDOWS:
            return None
        n_slow, slow_s = map(sum, zip(*self._slow, strict=True))
        return self._describe(n_slow / slow_s, find_reasons(self._promise, self._before, self._look()))

    def _describe(self, rate: float, reasons: list[str]) -> str:
        low, high = self._promise.samples_per_s
        why = "; ".join(reasons) or (
            "nothing that was looked at explains it (clock, neighbours, disk, memory, data workers, data wait, threads)"
        )
        wait_pct = self._promise.cpu_pressure_pct
        busy = "" if wait_pct is None else f", busy then (some task waited for a core {wait_pct:.0f} % of the time)"
        return (
            f"{rate:,.0f} samples/s, tune measured {low:,.0f} to {high:,.0f} for this plan on this machine{busy}: {why}"
        )


def find_reasons(promise: Promise, before: Look, now: Look) -> list[str]:
    """List what may have slowed the run down between two looks, one sentence each."""
    seconds = max(now.time_s - before.time_s, 1e-9)
    found: list[str] = []
    if causes := [name for name in now.throttle_reasons if name in SLOWDOWNS]:
        clocks = f", {now.sm_clock_mhz} of {now.sm_clock_max_mhz} MHz" if now.sm_clock_mhz else ""
        found.append(f"the GPU holds its clock down ({', '.join(causes)}{clocks})")
    if now.n_gpu_neighbours:
        found.append(f"{now.n_gpu_neighbours} other processes use the GPU")
    if pressure := _explain_cores(before, now, seconds):
        found.append(pressure)
    for what, before_us, now_us in (
        ("the disk", before.disk_wait_us, now.disk_wait_us),
        ("memory (is it swapping?)", before.memory_wait_us, now.memory_wait_us),
    ):
        wait_pct = _compute_wait_pct(before_us, now_us, seconds)
        if wait_pct >= BUSY_PCT:
            found.append(f"some task waited for {what} {wait_pct:.0f} % of the time")
    if stopped := now.stopped_workers:
        pids = ", ".join(map(str, stopped))
        found.append(f"{len(stopped)} of {now.n_workers} data workers stand still (pid {pids})")
    data_pct, usual_pct = 100 * (now.data_wait_s - before.data_wait_s) / seconds, promise.data_wait_pct or 0.0
    if data_pct >= usual_pct + DATA_WAIT_POINTS:
        found.append(f"the loop waited for data {data_pct:.0f} % of the time, {usual_pct:.0f} % when tuned")
    if None not in (promise.threads, now.n_threads) and promise.threads != now.n_threads:
        found.append(f"torch uses {now.n_threads} threads, {promise.threads} when tuned")
    return found


def _explain_cores(before: Look, now: Look, seconds: float) -> str | None:
    """Name CPU pressure from outside; tasks of the run that wait for each other are no news to a tuned plan."""
    steal_pct = compute_steal_pct(before.cpu_times, now.cpu_times)
    if steal_pct is not None and steal_pct >= BUSY_PCT:
        return f"CPU pressure: the host took {steal_pct:.0f} % of the cores' time for others"
    busy = [_compute_foreign_cpu_s(look) for look in (before, now)]
    if None in busy:
        return None
    cores = max(0.0, busy[1] - busy[0]) / seconds  # type: ignore[operator]
    wait_pct = _compute_wait_pct(before.cpu_wait_us, now.cpu_wait_us, seconds)
    if wait_pct < BUSY_PCT or cores < NEIGHBOUR_CORES:
        return None
    waited = f"some task waited for one {wait_pct:.0f} % of the time"
    return f"CPU pressure: other processes use {cores:.1f} cores, and {waited}"


def _compute_foreign_cpu_s(look: Look) -> float | None:
    """CPU seconds since boot of processes other than this run's."""
    total, idle, own_s = look.cpu_times.total_jiffies, look.cpu_times.idle_jiffies, look.own_cpu_s
    if total is None or idle is None or own_s is None:
        return None
    return (total - idle) / os.sysconf("SC_CLK_TCK") - own_s


def _compute_wait_pct(before_us: int | None, now_us: int | None, seconds: float) -> float:
    """Share of the time in which some task waited; 0 where the kernel does not say."""
    return 0.0 if before_us is None or now_us is None else (now_us - before_us) / seconds / 1e4


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
        look = Look(
            time_s=time.perf_counter(),
            cpu_wait_us=read_pressure().some_total_us,
            disk_wait_us=read_pressure(resource="io").some_total_us,
            memory_wait_us=read_pressure(resource="memory").some_total_us,
            cpu_times=read_cpu_times(),
            own_cpu_s=own.cpu_s if self._n_ranks == 1 else read_process_tree_cpu(os.getppid()).cpu_s,
            n_workers=own.n_children,
            stopped_workers=own.stopped,
            data_wait_s=self._waits.seconds,
            n_threads=torch.get_num_threads(),
        )
        if self._nvml is None or self._index is None:
            return look
        status = self._nvml.read_status(self._index)
        pids = {process.pid for process in status.processes or ()}
        return dataclasses.replace(
            look,
            throttle_reasons=status.throttle_reasons or (),
            sm_clock_mhz=status.sm_clock_mhz,
            sm_clock_max_mhz=status.sm_clock_max_mhz,
            # One of them is this one; in a container the driver names it by the host's number.
            n_gpu_neighbours=max(0, len(pids) - 1),
        )


def build_watch(run: Run) -> tuple[PromiseWatch | None, str | None]:
    """Build what compares the run with its promise, with a note on why there is none, or on a promise of little use."""
    file, n_ranks = run.config.run.promise, run.world.n_ranks
    if file is None:
        return None, None
    promise = read_promise(path := Path(run.config.base_dir, file))
    if isinstance(promise, str):
        return None, (
            f"run.promise names {path}, which cannot be read ({promise}): this run is not held to the speed it was "
            "tuned for; fulltilt tune --apply writes a new one"
        )
    if promise.n_ranks != n_ranks:
        return None, (
            f"run.promise was measured with run.n_ranks {promise.n_ranks}, and this run has {n_ranks}: it is not held "
            "against this run"
        )
    model = run.setup.model
    for what, promised, this in (
        ("plan", promise.plan, compute_plan_digest(run.plan)),
        ("machine", promise.machine, compute_hostname_hash(socket.gethostname())),
        ("device", promise.device, name_device(run.device)),
        ("model", promise.model, name_model(model)),
        ("model, by its number of parameters", promise.n_parameters, sum(p.numel() for p in model.parameters())),
        ("data set", promise.data, describe_data(run.dataset, run.facts)),
    ):
        if promised is not None and promised != this:
            return None, (
                f"run.promise is of another {what} ({promised}, this is {this}): it is not held against this run; "
                "fulltilt tune --apply writes a new one"
            )
    note = None
    if promise.cpu_pressure_pct is not None:
        low, high = promise.samples_per_s
        note = (
            f"run.promise ({low:,.0f} to {high:,.0f} samples/s) was measured on a busy machine (some task waited for a "
            f"core {promise.cpu_pressure_pct:.0f} % of the time): slower than a quiet one allows is within it; "
            "fulltilt tune --apply on a quiet machine, with --out and a new folder, writes a narrower one"
        )
    run.data_waits = DataWaits()
    return PromiseWatch(promise, MachineLook(run.device, run.data_waits, n_ranks=n_ranks)), note
