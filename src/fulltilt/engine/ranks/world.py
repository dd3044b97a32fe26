"""Who else trains: the processes of one run, and the few things they say to each other.

A run over several devices is one process a device. Each runs the same loop over its share of every batch; ``World`` is
what that process knows of the others. One process alone has a ``World`` too, of one rank, in which nothing is said.

Started by ``ranks.run_ranks`` or by torchrun: both tell a process its place by ``RANK``, ``WORLD_SIZE`` and
``LOCAL_RANK`` in the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fulltilt.config import Config
from fulltilt.data.loading.sampler import Share
from fulltilt.engine.interrupt import Stop
from fulltilt.engine.ranks.process import find_link
from fulltilt.errors import ConfigError
from fulltilt.hardware import list_rank_devices

GROUP_TIMEOUT = datetime.timedelta(minutes=30)  # only where no parent watches; a checkpoint may take its time
AGREE_EVERY_S = 0.25
MAX_POLLS_APART = 20


def plan_devices(config: Config, device: str | None = None) -> list[str]:
    """The devices of a run, one a rank: see ``hardware.list_rank_devices``.

    Args:
        device: Instead of ``run.device``.
    """
    wanted = config.run.device if device is None else device
    return list_rank_devices(wanted, config.run.n_ranks, has_gpu=torch.cuda.is_available)


def is_rank() -> bool:
    """Whether this process was started as one of several, by ``run_ranks`` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Whether this process is the one that speaks, of however many were started."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """This process among those of the run. The methods that exchange something have to be called by all, in one order.

    Attributes:
        rank: 0 is the one that writes, tells and decides.
    """

    rank: int = 0
    n_ranks: int = 1

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
        """Add up ``values`` over all ranks, in place; call what is returned before reading them.

        Device: on a GPU neither waits on the host, work that is queued afterwards comes after the sum.
        """
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        if values.is_cuda:
            work.wait()  # makes the stream wait, not the host
            return _nothing
        return functools.partial(_wait_for, work)

    def sum(self, values: Tensor) -> Tensor:
        if self.is_divided:
            self.start_sum(values)()
        return values

    def hand_out(self, value: Any) -> Any:
        """Rank 0's value, to all. What travels is pickled."""
        if not self.is_divided:
            return value
        box = [value]
        with _stand_still():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """The value of every rank, to all."""
        if not self.is_divided:
            return [value]
        values: list[Any] = [None] * self.n_ranks
        with _stand_still():
            dist.all_gather_object(values, value)
        return values

    def arrive(self) -> None:
        """Note, for whoever watches, that this rank waits for the others from here on, before its first step."""
        link = find_link()
        if self.is_divided and link is not None:
            link.lap("start")

    def meet(self) -> None:
        """Wait until all ranks are here. On the host: what is queued on a device goes on."""
        if self.is_divided:
            self.sum(torch.zeros(1))

    def copy_buffers(self, model: nn.Module) -> None:
        """Rank 0's buffers (running statistics of BatchNorm) to all: what is evaluated is what is saved."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers() if self.is_divided else ():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            with _stand_still():
                dist.broadcast(flat.view(torch.uint8), src=0)  # as bytes: complex and bool buffers travel too
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))

    def work_alone(self) -> contextlib.AbstractContextManager[None]:
        """What this rank does now may take long, and the others wait for it: it does not hang."""
        link = find_link()
        return contextlib.nullcontext() if link is None else link.work_alone()

    def agree_on(self, stop: Stop) -> Stop:
        """``stop`` for all ranks at once, and with the parent's wish in it."""
        return stop if not self.is_divided and find_link() is None else AgreedStop(self, stop)


ALONE = World()


def join_world(config: Config, device: str | None = None) -> tuple[World, str]:
    """The world of this process and its device's name; waits for the other ranks the first time.

    Raises:
        ConfigError: as many ranks were started as the configuration has no devices for.
    """
    return join_devices(plan_devices(config, device))


def join_devices(devices: Sequence[str]) -> tuple[World, str]:
    """``join_world`` for ranks whose devices are known."""
    if not is_rank():
        return ALONE, devices[0]
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = _choose_device(devices, int(os.environ.get("LOCAL_RANK", rank)))
    world = World(rank=rank, n_ranks=n_ranks)
    if world.is_divided:
        world.arrive()
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


def _join_group(device: torch.device) -> None:
    if dist.is_initialized():
        return
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        # Small things that live on the host go through gloo: they never wait for the device.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=GROUP_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)


class AgreedStop:
    """A request to stop that all ranks see between the same two steps: a rank that left alone would leave the others in
    an all-reduce for ever.

    Asked (``bool``) equally often on every rank. Now and then, about every quarter of a second, an asking starts an
    exchange on the host, and the next one reads it: nothing waits for the device, and hardly for another rank.
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
        link = find_link()
        return bool(self._own) or (link is not None and link.is_stop_wanted)

    def _ask(self) -> None:
        now_s = time.monotonic()
        seconds = (now_s - self._asked_s) / (self._n_apart + 1)
        self._asked_s = now_s
        self._values[0], self._values[1] = float(self._is_wanted()), seconds
        self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, async_op=True)

    def _read(self) -> None:
        _wait_for(self._work)
        self._work = None
        is_wanted, seconds = self._values.tolist()
        self._is_agreed = is_wanted > 0
        self._n_apart = self._n_left = max(1, min(MAX_POLLS_APART, int(AGREE_EVERY_S / max(seconds, 1e-6))))


def _nothing() -> None:
    pass


def _wait_for(work: Any) -> None:
    with _stand_still():
        work.wait()


def _stand_still() -> contextlib.AbstractContextManager[None]:
    link = find_link()
    return contextlib.nullcontext() if link is None else link.wait_for_others()


def choose_device(config: Config, device: str | None = None) -> str:
    """The first device that ``device``, else ``run.device``, names; ``auto`` is the first GPU or the CPU."""
    return plan_devices(config, device)[0]
