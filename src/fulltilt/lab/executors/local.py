"""Run attempts on this machine: its GPUs, or shares of its CPU where there is none. It needs no engine."""

import contextlib
import dataclasses
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fulltilt.errors import DeviceError
from fulltilt.hardware import Nvml, RealNvml, count_usable_cores, read_visible_devices, resolve_device
from fulltilt.hardware.proctree import (
    build_death_wish,
    find_marked,
    kill_descendants,
    kill_marked,
    remove_shared_segments,
)
from fulltilt.lab.executors import Place, RefusedError, Seen, name_mark
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import MARK, Order, join_environs

GUARD = (sys.executable, "-m", "fulltilt.lab.runner.guard")
GUARD_MARK = "FULLTILT_GUARD"
N_NAMED = 3  # processes of others on a GPU


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A device, or a share of the CPU, for one training.

    Attributes:
        name: ``cuda:2``, or ``cpu:2`` for a share of the CPU that stands in for a GPU.
        device: ``run.device`` of the training. A training on a GPU sees no other GPU.
        n_threads: Its share of the cores; None on a GPU.
        index: NVML's, of a GPU.
    """

    name: str
    device: str
    environ: Mapping[str, str]
    n_threads: int | None = None
    index: int | None = None


def build_slots(pool: str | int | Sequence[int], nvml: Nvml | None = None) -> list[Slot]:
    """Build the slots that ``run.device`` of a grid names; without a GPU they are shares of the CPU.

    Raises:
        DeviceError: a named GPU is not there.
    """
    numbers = [pool] if isinstance(pool, int) else list(pool) if not isinstance(pool, str) else None
    if pool == "cpu" or (resolve_device("auto", nvml) == "cpu" and (numbers is not None or pool == "auto")):
        return build_cpu_slots(numbers or [0])
    if isinstance(pool, str) and pool.startswith("cuda:"):
        numbers = [int(pool.removeprefix("cuda:"))]
    for name in ["cuda"] if numbers is None else [f"cuda:{number}" for number in numbers]:
        resolve_device(name, nvml)
    with contextlib.closing(RealNvml()) if nvml is None else contextlib.nullcontext(nvml) as library:
        visible = read_visible_devices(library)
    slots = []
    for number in range(len(visible)) if numbers is None else numbers:
        environ = {"CUDA_VISIBLE_DEVICES": visible[number].uuid or str(visible[number].index)}
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        index = visible[number].index
        slots.append(Slot(name=f"cuda:{number}", device="cuda:0", environ=environ, index=index))
    return slots


def build_cpu_slots(numbers: Sequence[int]) -> list[Slot]:
    """Build shares of the CPU; a training on one sees no GPU."""
    n_threads = max(1, count_usable_cores() // len(numbers))
    environ = {"OMP_NUM_THREADS": str(n_threads), "CUDA_VISIBLE_DEVICES": ""}
    return [Slot(name=f"cpu:{number}", device="cpu", environ=environ, n_threads=n_threads) for number in numbers]


def find_busy(slots: Sequence[Slot], nvml: Nvml) -> dict[str, str]:
    """Find the GPUs that somebody computes on, or that do not answer → what shows it."""
    found = {}
    for name, index in ((slot.name, slot.index) for slot in slots if slot.index is not None):
        try:
            status = nvml.read_status(index)
        except DeviceError as error:
            found[name] = str(error)
            continue
        if status.processes:
            found[name] = f"used by process {', '.join(str(process.pid) for process in status.processes[:N_NAMED])}"
        elif status.processes is status.memory_used_bytes is status.utilization_pct is None:  # one is told everywhere
            found[name] = f"it does not answer ({status.null_reasons['memory_used_bytes']})"
    return found


class LocalExecutor:
    """Starts guards as processes of this machine.

    Args:
        pool: Which devices: ``run.device`` of a configuration, as ``auto``, ``cpu``, ``cuda:1``, ``[0, 1, 2]``.
        is_lasting: Attempts go on when this process is gone, and are found again by their mark.

    Raises:
        DeviceError: a named GPU is not there.
    """

    name = "local"

    def __init__(
        self, pool: str | int | Sequence[int], *, logs: Path, is_lasting: bool = False, nvml: Nvml | None = None
    ):
        self._nvml = nvml or RealNvml()
        self.slots = build_slots(pool, self._nvml)
        self._logs, self.is_lasting = logs, is_lasting
        self._guards: dict[str, subprocess.Popen[bytes]] = {}

    def read_places(self) -> Sequence[Place]:
        n_threads = {slot.n_threads for slot in self.slots}.pop()
        names = [slot.name for slot in self.slots]
        busy = find_busy(self.slots, self._nvml)
        return [Place(node=platform.node(), devices=names, n_threads=n_threads, busy=busy)]

    def submit(self, attempt: Attempt, order: Order, node: str, devices: Sequence[str]) -> str:
        if order.mark in self._guards:
            return order.mark
        slots = [slot for slot in self.slots if slot.name in devices]
        environ = {**os.environ, **join_environs(slot.environ for slot in slots)}
        environ |= {**order.to_environment(), GUARD_MARK: order.mark}
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            with (self._logs / f"runner-{attempt.experiment}-{attempt.number}.txt").open("ab") as log:
                guard = subprocess.Popen(
                    GUARD,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    start_new_session=True,
                    preexec_fn=None if self.is_lasting else build_death_wish(os.getpid()),
                )
        except OSError as error:
            raise RefusedError(f"no process can be started on {node}: {error.strerror}") from error
        self._guards[order.mark] = guard
        return order.mark

    def poll(self, experiments: Sequence[Experiment]) -> Mapping[str, Seen]:
        seen: dict[str, Seen] = {}
        for experiment in experiments:
            if experiment.node != platform.node():  # a lab on a disk that several machines share
                seen[experiment.id] = "unknown"
                continue
            guard = self._guards.get(mark := name_mark(experiment))  # None: of a server before this one
            is_alive = bool(find_marked(f"{GUARD_MARK}={mark}")) if guard is None else guard.poll() is None
            if not is_alive:
                remove_shared_segments(set(kill_marked(f"{MARK}={mark}")))
            seen[experiment.id] = "alive" if is_alive else "gone"
        live = set(map(name_mark, experiments))  # the runners of the others told their ends; a zombie would be left
        self._guards = {mark: each for mark, each in self._guards.items() if mark in live or each.poll() is None}
        return seen

    def cancel(self, experiment: Experiment, *, is_urgent: bool) -> None:
        mark = name_mark(experiment)
        if is_urgent:
            for guard in find_marked(f"{GUARD_MARK}={mark}")[:1]:  # last: below it nothing hides
                remove_shared_segments(set(kill_descendants(guard)))
            kill_marked(f"{GUARD_MARK}={mark}")
            remove_shared_segments(set(kill_marked(f"{MARK}={mark}")))
            return
        if (guard := self._guards.get(mark)) is not None:
            guard.send_signal(signal.SIGTERM)
            return
        for pid in find_marked(f"{GUARD_MARK}={mark}")[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def close(self) -> None:
        for guard in self._guards.values():
            if not self.is_lasting:
                guard.wait()
        self._nvml.close()
