"""Run attempts on this machine: one training process a slot, all of them ended with the scheduler.

Each training has a session of its own, so Ctrl-C reaches the scheduler alone. The kernel ends it when the scheduler
dies. Its environment names the attempt, so a later scheduler can find and end what is left of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fulltilt.errors import FulltiltError, StorageError
from fulltilt.hardware import Nvml, RealNvml, count_usable_cores, read_visible_devices, resolve_device
from fulltilt.hardware.proctree import find_marked, kill_marked, remove_shared_segments, set_death_signal
from fulltilt.lab.records import Attempt

MARK = "FULLTILT_ATTEMPT"
LOG = "log.txt"
TRAIN = (sys.executable, "-m", "fulltilt", "train")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A device, or a share of the CPU, for one training.

    Attributes:
        name: ``cuda:2``, or ``cpu:2`` for a share of the CPU that stands in for a GPU.
        device: ``run.device`` of the training. A training on a GPU sees no other GPU.
        n_threads: Its share of the cores; None on a GPU.
    """

    name: str
    device: str
    environ: Mapping[str, str]
    n_threads: int | None = None


def build_slots(pool: str | int | Sequence[int], nvml: Nvml | None = None) -> list[Slot]:
    """Build the slots that ``run.device`` of a grid names; without a GPU they are shares of the CPU.

    Raises:
        DeviceError: a named GPU is not there.
    """
    numbers = [pool] if isinstance(pool, int) else list(pool) if not isinstance(pool, str) else None
    if pool == "cpu" or (resolve_device("auto", nvml) == "cpu" and (numbers is not None or pool == "auto")):
        return _build_cpu_slots(numbers or [0])
    if isinstance(pool, str) and pool.startswith("cuda:"):
        numbers = [int(pool.removeprefix("cuda:"))]
    for name in ["cuda"] if numbers is None else [f"cuda:{number}" for number in numbers]:
        resolve_device(name, nvml)
    with contextlib.closing(RealNvml()) if nvml is None else contextlib.nullcontext(nvml) as library:
        visible = read_visible_devices(library)
    return [
        Slot(
            name=f"cuda:{number}",
            device="cuda:0",
            environ={
                "CUDA_VISIBLE_DEVICES": visible[number].uuid or str(visible[number].index),
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            },
        )
        for number in (range(len(visible)) if numbers is None else numbers)
    ]


def _build_cpu_slots(numbers: Sequence[int]) -> list[Slot]:
    n_threads = max(1, count_usable_cores() // len(numbers))
    environ = {"OMP_NUM_THREADS": str(n_threads)}
    return [Slot(name=f"cpu:{number}", device="cpu", environ=environ, n_threads=n_threads) for number in numbers]


class LocalExecutor:
    """Starts attempts on free slots and reports which have ended.

    Args:
        lab: Folder of the lab; each experiment has a folder in it.
        command: The command that trains; it takes the arguments of ``fulltilt train``.
    """

    def __init__(self, lab: Path, slots: Sequence[Slot], command: Sequence[str] = TRAIN):
        self._lab, self._slots, self._command = lab, slots, command
        self._running: dict[Attempt, tuple[subprocess.Popen[bytes], Slot]] = {}

    @property
    def running(self) -> tuple[Attempt, ...]:
        return tuple(self._running)

    @property
    def free(self) -> list[Slot]:
        taken = {slot.name for _, slot in self._running.values()}
        return [slot for slot in self._slots if slot.name not in taken]

    def start(self, attempt: Attempt, slot: Slot, source: Path, words: Sequence[str], *, title: str) -> int:
        """Start the training of an attempt and return its process id.

        Args:
            title: First line of its log.

        Raises:
            StorageError: its folder cannot be written. OSError: the process cannot be started.
        """
        out_dir = find_out_dir(self._lab, attempt.experiment)
        command = [*self._command, str(source), *words, f"run.device={slot.device}", "--resume"]
        command += ["--out", str(out_dir), "--json", str(find_result(self._lab, attempt))]
        environ = {**os.environ, **slot.environ, "PYTHONUNBUFFERED": "1", MARK: self._name_mark(attempt)}
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            find_result(self._lab, attempt).unlink(missing_ok=True)  # of another lab that was in this folder
            log = (out_dir / LOG).open("ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{out_dir} cannot be written ({error.strerror}); give another --lab") from None
        with log:
            log.write(f"== {attempt.experiment}, attempt {attempt.number} on {slot.name}: {title}\n".encode())
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
                preexec_fn=build_death_wish(os.getpid()),
            )
        self._running[attempt] = (process, slot)
        return process.pid

    def poll(self) -> list[tuple[Attempt, int]]:
        """Return the attempts that ended since the last call, with their exit codes, and free their slots."""
        ended = [
            (attempt, code) for attempt, (process, _) in self._running.items() if (code := process.poll()) is not None
        ]
        for attempt, _ in ended:
            del self._running[attempt]
        return ended

    def send(self, attempt: Attempt, number: int) -> None:
        """Send a signal to the training process; it forwards the signal to its ranks."""
        self._running[attempt][0].send_signal(number)

    def end_leftovers(self, attempt: Attempt) -> None:
        """End every process that has the attempt's mark in its environment, and wait until none is left.

        Raises:
            FulltiltError: a process cannot be ended.
        """
        mark = f"{MARK}={self._name_mark(attempt)}"
        remove_shared_segments(set(kill_marked(mark)))
        left = find_marked(mark)
        if left:
            raise FulltiltError(
                f"process {left[0]} of {attempt.experiment}, attempt {attempt.number}, cannot be ended; wait until it "
                "is gone, and run the same command again"
            )

    def _name_mark(self, attempt: Attempt) -> str:
        return f"{self._lab.resolve()}/{attempt.experiment}/{attempt.number}"


def find_out_dir(lab: Path, experiment: str) -> Path:
    return lab / experiment


def find_result(lab: Path, attempt: Attempt) -> Path:
    """Return the path of an attempt's result file; its name holds the attempt's number."""
    return find_out_dir(lab, attempt.experiment) / f"result-{attempt.number}.json"


def build_death_wish(parent: int) -> Callable[[], None]:
    """Return the function that a child runs before exec, so that it dies with its scheduler."""

    def wish() -> None:
        set_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return wish
