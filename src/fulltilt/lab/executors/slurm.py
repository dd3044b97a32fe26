"""Run attempts on a Slurm cluster, by its own commands: sbatch, squeue, sinfo, scancel.

A job is named after its attempt, so that what became of it is found by its name. Slurm chooses the GPUs, and never
starts a job again by itself (``--no-requeue``): who is tried again, and from where, is the lab's. The variables that
sbatch reads (SBATCH_ACCOUNT, SBATCH_TIMELIMIT, …) hold for the jobs.
"""

import contextlib
import dataclasses
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from fulltilt.errors import UsageError
from fulltilt.lab.executors import AwayError, Place, RefusedError, Seen, name_job, name_mark
from fulltilt.lab.executors.local import GUARD
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import Order

TIMEOUT_S = 30.0
FRESH_S = 2.0  # how long an answer serves: a slurmctld has others to answer
AWAY_S = 10.0  # how long nothing is asked of one that did not answer
# States of a node in which it takes jobs, as sinfo shortens them: "*" would say that it does not answer.
USABLE = re.compile(r"(idle|mix|alloc|comp|plnd)[-+~#]?")
WAITING, ENDING = ("PD", "CF"), "CG"  # states of a job: those without a process, and its last one with some
ENDED = ("BF", "CA", "CD", "DL", "F", "NF", "OOM", "PR", "RV", "TO")
GPUS = re.compile(r"\bgpu(?::[\w.-]+)?:(\d+)")
COLUMNS = ("NodeList", "Partition", "Gres", "GresUsed", "StateCompact", "CPUs")
WIDTH = 256  # sinfo cuts what is longer
T = TypeVar("T")


class SlurmExecutor:
    """Sends attempts to the Slurm cluster that the commands of this machine reach.

    Args:
        logs: Folder for what guards print, where a node sees it.
        partition: Where jobs go; None: Slurm's default.

    Raises:
        UsageError: Slurm's commands are not here.
    """

    name = "slurm"
    is_lasting = True

    def __init__(self, *, logs: Path, partition: str | None = None):
        if shutil.which("sbatch") is None:
            raise UsageError("there is no sbatch on the path; serve the lab where jobs are submitted from")
        lab = f"{platform.node()}:{logs.resolve()}"
        self._root = f"lab-{hashlib.sha256(lab.encode()).hexdigest()[:12]}"  # nodes may share a home, labs as well
        self._logs, self._partition = logs.resolve(), partition
        self._jobs, self._nodes = _Fresh(_read_jobs), _Fresh(self._read_nodes)

    def read_places(self) -> Sequence[Place]:
        """Return the nodes that have GPUs; none where nobody answers."""
        try:
            return [node.place for node in self._nodes.get().values()]
        except AwayError:
            return []

    def submit(self, attempt: Attempt, order: Order, node: str, devices: Sequence[str]) -> str:
        name, jobs, found = name_job(order.mark), self._jobs.get(), self._nodes.get().get(node)
        if name in jobs:
            return name
        if found is None:
            raise RefusedError(f"Slurm has no {node} any more")
        # A disk that nodes share is nothing to rely on, a URI of an object store is.
        is_store = re.match(r"(?!file:)\w+://", order.depot or "")
        order = dataclasses.replace(order, root=f"{self._root}/{node}", depot=order.depot if is_store else None)
        log = self._logs / f"runner-{attempt.experiment}-{attempt.number}.txt"
        with contextlib.suppress(OSError):  # then nothing is kept of what the guard prints
            self._logs.mkdir(parents=True, exist_ok=True)
        # "/" for the guard's folder: Python looks for modules there, and Slurm goes to /tmp where another is missing.
        command = ["sbatch", "--parsable", "--no-requeue", f"--job-name={name}", f"--nodelist={node}", "--ntasks=1"]
        command += [f"--partition={found.partition}", f"--gres=gpu:{len(devices)}", "--chdir=/", "--output=/dev/null"]
        if "SBATCH_CPUS_PER_GPU" not in os.environ:
            command.append(f"--cpus-per-task={found.n_cpus * len(devices)}")
        folder = shlex.quote(str(self._logs))
        script = f"[ -w {folder} ] && exec >>{shlex.quote(str(log))} 2>&1; exec {shlex.join(GUARD)}"
        # The order is secret. The environment goes to slurmctld, whose files root reads, and to the job's own
        # processes; what others see of a job (its name, its script, command lines) says nothing of it.
        environment = {**order.to_environment(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as Slurm counts GPUs
        try:
            _run(*command, "--export=ALL", f"--wrap={script}", environment=environment)
        except RefusedError:
            self._nodes.read()  # raises AwayError where nobody answers at all
            raise
        jobs[name] = "PD"
        return name

    def poll(self, experiments: Sequence[Experiment]) -> Mapping[str, Seen]:
        try:
            jobs = self._jobs.get()
        except AwayError:
            return {experiment.id: "unknown" for experiment in experiments}
        return {each.id: _judge(jobs.get(name_job(name_mark(each)))) for each in experiments}

    def cancel(self, experiment: Experiment, *, is_urgent: bool) -> None:
        name = name_job(name_mark(experiment))
        try:
            jobs = self._jobs.get()
            if _judge(state := jobs.get(name)) == "gone" or state == ENDING:
                return
            signal = ("--signal=KILL", "--full") if is_urgent else ("--signal=TERM", "--batch")
            _run("scancel", "--me", f"--name={name}", *(() if state in WAITING else signal))
            if is_urgent:
                jobs[name] = ENDING  # until the next look: who asks every turn is served once
        except RefusedError:  # nobody answers: it is asked for again
            return

    def close(self) -> None:
        return

    def _read_nodes(self) -> dict[str, "_Node"]:
        where = [] if self._partition is None else [f"--partition={self._partition}"]
        columns = ",".join(f"{name}:{WIDTH}" for name in COLUMNS)
        lines = _run("sinfo", "--noheader", "--Node", f"--Format={columns}", *where)
        nodes: dict[str, _Node] = {}
        for name, partition, gres, used, state, n_cpus in map(str.split, lines):
            n_gpus = _count_gpus(gres)
            if n_gpus and (self._partition is not None or partition.endswith("*")):
                place = Place(
                    node=name,
                    devices=[f"gpu:{number}" for number in range(n_gpus)],
                    n_used=_count_gpus(used),
                    is_away=USABLE.fullmatch(state) is None,
                )
                share = max(1, int(n_cpus) // n_gpus)
                nodes[name] = _Node(place=place, partition=partition.rstrip("*"), n_cpus=share)
        return nodes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """A node of a partition, and the share of its processors that belongs to each GPU."""

    place: Place
    partition: str
    n_cpus: int


class _Fresh(Generic[T]):
    """Keeps an answer for a while, and also that there was none."""

    def __init__(self, read: Callable[[], T]):
        self._read = read
        self._value: T | AwayError | None = None
        self._until_s = 0.0

    def get(self) -> T:
        """Return the answer. Raises AwayError where there is none."""
        value = self._value  # once: another thread may ask anew
        if value is None or time.monotonic() > self._until_s:
            return self.read()
        if isinstance(value, AwayError):
            raise value
        return value

    def read(self) -> T:
        """Ask anew."""
        try:
            self._value = value = self._read()
            self._until_s = time.monotonic() + FRESH_S
            return value
        except RefusedError as error:
            self._value = away = AwayError(str(error))
            self._until_s = time.monotonic() + AWAY_S
            raise away from error


def _read_jobs() -> dict[str, str]:
    """Return the states of our jobs by name, those that ended a short while ago too."""
    lines = _run("squeue", "--noheader", "--me", "--states=all", "--format=%t %j")
    return {name: state for state, _, name in (line.partition(" ") for line in lines)}


def _judge(state: str | None) -> Seen:
    if state is None or state in ENDED:
        return "gone"
    return "waiting" if state in WAITING else "alive"


def _run(*command: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Run one of Slurm's commands and return its lines. Raises RefusedError where it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env={**os.environ, **(environment or {})},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise RefusedError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout.splitlines()


def _count_gpus(gres: str) -> int:
    return sum(int(number) for number in GPUS.findall(gres))
