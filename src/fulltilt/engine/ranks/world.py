"""The processes of one run, and the few things they say to each other.

A run over several devices is one process a device. Each runs the same loop over its share of every batch. One process
alone has a ``World`` too, of one rank, which sends nothing. ``run_ranks`` and torchrun start the processes alike: both
tell a process its place by ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` in the environment.
"""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fulltilt.config import Config
from fulltilt.data.loading.sampler import Share
from fulltilt.engine.interrupt import Stop
from fulltilt.engine.ranks.process import IS_ALONE, IS_WAITING, Link, find_link
from fulltilt.errors import ConfigError, UsageError
from fulltilt.hardware import list_rank_devices

GROUP_TIMEOUT = datetime.timedelta(minutes=30)  # only where no parent watches; a checkpoint may take its time
AGREE_EVERY_S = 0.25
MAX_POLLS_APART = 20


def plan_devices(config: Config, device: str | None = None) -> list[str]:
    """List the devices that ``device``, else ``run.device``, names, one a rank; ``auto`` is a GPU or the CPU."""
    wanted = config.run.device if device is None else device
    return list_rank_devices(wanted, config.run.n_ranks, has_gpu=torch.cuda.is_available)


def find_rank() -> tuple[int, int] | None:
    """Return this process's rank and how many ranks there are; None where nobody started it as one.

    Raises:
        UsageError: the environment names a place that there is not, or no meeting point.
    """
    names = ("RANK", "WORLD_SIZE")
    said = [os.environ.get(name) for name in names]
    if None in said:
        return None
    try:
        rank, n_ranks = (int(value or "") for value in said)
    except ValueError:
        rank, n_ranks = -1, 0
    needed = () if n_ranks == 1 or dist.is_initialized() else ("MASTER_ADDR", "MASTER_PORT")
    if not 0 <= rank < n_ranks or any(name not in os.environ for name in needed):
        found = ", ".join(f"{name}={os.environ.get(name, '(unset)')}" for name in (*names, *needed))
        raise UsageError(
            f"the environment makes this process one of several, and names no place that there is: {found}; start "
            "them with torchrun, which sets these, or unset RANK to run one alone"
        )
    return rank, n_ranks


def is_rank() -> bool:
    """Whether this process was started as one of several, by ``run_ranks`` or by torchrun."""
    return find_rank() is not None


def is_first_rank() -> bool:
    """Whether this process is the one that tells and writes, of however many were started."""
    return (find_rank() or (0, 1))[0] == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """This process among those of the run. All ranks have to call the methods that exchange something, in one order."""

    rank: int = 0  # 0 writes, tells and decides
    n_ranks: int = 1
    link: Link | None = None  # to the process that started this one; None where nobody watches it

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_divided(self) -> bool:
        return self.n_ranks > 1

    @property
    def share(self) -> Share | None:
        return Share(self.rank, self.n_ranks) if self.is_divided else None

    def start_sum(self, values: Tensor) -> Callable[[], None]:
        """Start to add up ``values`` over all ranks, in place; call what is returned before reading them.

        Device: on a GPU neither waits on the host, work that is queued afterwards comes after the sum.
        """
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        if values.is_cuda:
            work.wait()  # makes the stream wait, not the host
            return lambda: None
        return functools.partial(self.wait_for, work)

    def wait_for(self, work: dist.Work) -> None:
        """Wait on the host for the other ranks to do their part of an exchange."""
        with self._standing_still():
            work.wait()

    def sum(self, values: Tensor) -> Tensor:
        """Add up ``values`` over all ranks, in place."""
        if self.is_divided:
            self.start_sum(values)()
        return values

    def hand_out(self, value: Any) -> Any:
        """Return rank 0's value to all; it is pickled."""
        if not self.is_divided:
            return value
        box = [value]
        with self._standing_still():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks to all; they are pickled."""
        if not self.is_divided:
            return [value]
        values: list[Any] = [None] * self.n_ranks
        with self._standing_still():
            dist.all_gather_object(values, value)
        return values

    def arrive(self) -> None:
        """Note, for the parent, that this rank waits for the others from here on, before its first step."""
        if self.is_divided and self.link is not None:
            self.link.lap("start")

    def leave_at_exit(self) -> None:
        """Leave torchrun's group when this process exits.

        Only after all went well: leaving a group that a failed rank left behind can take for ever.
        """
        if self.is_divided and self.link is None:
            atexit.register(_leave_group)

    def meet(self) -> None:
        """Wait on the host until all ranks are here; what is queued on a device goes on."""
        self.sum(torch.zeros(1))

    def copy_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers (running statistics of BatchNorm) to all: what is evaluated is what is saved."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers() if self.is_divided else ():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            with self._standing_still():
                dist.broadcast(flat.view(torch.uint8), src=0)  # as bytes: complex and bool buffers travel too
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))

    def work_alone(self) -> contextlib.AbstractContextManager[None]:
        """Let the others wait for what this rank does now, which may take long: it does not hang."""
        return contextlib.nullcontext() if self.link is None else self.link.mark(IS_ALONE)

    def agree_on(self, stop: Stop) -> Stop:
        """Return ``stop`` as all ranks see it at once, the parent's wish included."""
        return stop if not self.is_divided and self.link is None else AgreedStop(self, stop)

    def _standing_still(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.link is None else self.link.mark(IS_WAITING)


ALONE = World()


def join_devices(devices: Sequence[str]) -> tuple[World, str]:
    """Return the world of this process and the name of its device; wait for the other ranks the first time.

    Raises:
        ConfigError: as many ranks were started as there are no devices for.
    """
    if (found := find_rank()) is None:
        return ALONE, devices[0]
    rank, n_ranks = found
    name = _choose_device(devices, int(os.environ.get("LOCAL_RANK", rank)))
    world = World(rank=rank, n_ranks=n_ranks, link=find_link())
    world.arrive()
    if world.is_divided and not dist.is_initialized():
        with contextlib.nullcontext() if world.link is not None else _ended_by_signals():
            _join_group(torch.device(name))
    return world, name


def _choose_device(devices: Sequence[str], local_rank: int) -> str:
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if len(devices) == n_local:
        return devices[local_rank]
    if len(devices) > 1:
        raise ConfigError(
            f"{n_local} ranks were started on this machine, the configuration names {len(devices)} devices "
            f"({', '.join(devices)}); start as many, or give device cuda",
            key="run.device",
        )
    return f"cuda:{local_rank}" if devices[0] == "cuda" else devices[0]


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process in the block: torch waits in C++, where no handler of Python's runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _join_group(device: torch.device) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        # Small things that live on the host go through gloo: they never wait for the device.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=GROUP_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)


def _leave_group() -> None:
    """Leave the group, and let its threads drop what they hold.

    DDP keeps them alive beyond the group. One that frees a tensor while Python ends would end the process by abort().
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    is_busy = True
    while is_busy:
        time.sleep(0.001)  # whoever waits for the interpreter has it
        stats = [*Path("/proc/self/task").glob("*/stat")]
        with contextlib.suppress(OSError):  # a thread ended meanwhile
            is_busy = any("(pt_gloo_runloop) R" in stat.read_text() for stat in stats)


class AgreedStop:
    """A request to stop that all ranks see between the same two steps: none is left in an all-reduce for ever.

    Every rank has to ask (``bool``) equally often. About every ``AGREE_EVERY_S`` an asking starts an exchange on the
    host, and the next one reads it: nothing waits for the device, and hardly for another rank.
    """

    def __init__(self, world: World, own: Stop):
        self._world, self._own = world, own
        self._is_agreed = False
        self._values = torch.zeros(2, dtype=torch.float64)
        self._work: Any = None
        self._n_left = self._n_apart = 1
        self._asked_s = time.monotonic()

    def __bool__(self) -> bool:
        if self._is_agreed:
            return True
        if not self._world.is_divided:
            return self._is_wanted()
        self._n_left -= 1
        if self._work is not None:
            self._read()
        elif self._n_left <= 0:
            self._ask()
        return self._is_agreed

    def _is_wanted(self) -> bool:
        link = self._world.link
        return bool(self._own) or (link is not None and link.is_stop_wanted)

    def _ask(self) -> None:
        now_s = time.monotonic()
        seconds = (now_s - self._asked_s) / (self._n_apart + 1)
        self._asked_s = now_s
        self._values[0], self._values[1] = float(self._is_wanted()), seconds
        self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, async_op=True)

    def _read(self) -> None:
        self._world.wait_for(self._work)
        self._work = None
        is_wanted, seconds = self._values.tolist()
        self._is_agreed = is_wanted > 0
        self._n_apart = self._n_left = max(1, min(MAX_POLLS_APART, int(AGREE_EVERY_S / max(seconds, 1e-6))))
