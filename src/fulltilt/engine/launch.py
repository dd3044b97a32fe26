"""``train`` over several devices: whether to start processes of its own, and how they come back to ``train``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.config import Config
from fulltilt.engine.announce import Announcer
from fulltilt.engine.build import check_device
from fulltilt.engine.rank_process import find_link
from fulltilt.engine.world import is_rank, plan_devices
from fulltilt.records import Listener

if TYPE_CHECKING:
    from fulltilt.engine.duties import TrainResult

COMPILE_HANG_LIMIT_S = 600.0  # a rank may compile alone, for a batch of another size


def must_launch(config: Config, device: str | None = None) -> bool:
    """Whether a run needs processes of its own: it has several devices, or is to be started again when it dies."""
    return not is_rank() and (len(plan_devices(config, device)) > 1 or config.run.max_restarts > 0)


def train_in_ranks(
    config: Config, *, out_dir: str | Path, listeners: Sequence[Listener], device: str | None, **given: Any
) -> TrainResult:
    """``train`` in one process a device; ``listeners`` stay in this one.

    Raises:
        DeviceError: a device is not there. RankFailedError and others: see ``ranks.run_ranks``.
    """
    from fulltilt.engine.ranks import HANG_LIMIT_S, run_ranks

    devices = [str(check_device(name)) for name in plan_devices(config, device)]
    announcer = Announcer(listeners)
    default_s = COMPILE_HANG_LIMIT_S if config.speed.compile else HANG_LIMIT_S
    result = run_ranks(
        train_as_rank,
        {"config": config, "out_dir": str(out_dir), "device": device, "has_listeners": bool(listeners), **given},
        devices=devices,
        announcer=announcer,
        max_restarts=config.run.max_restarts,
        restarted_with={"resume": True},
        hang_limit_s=config.run.hang_timeout_s or default_s,
    )
    return dataclasses.replace(result, notes=(*announcer.notes, *result.notes))


def train_as_rank(config: Config, *, has_listeners: bool, **given: Any) -> TrainResult:
    """What each of the processes runs."""
    from fulltilt.engine.train import train

    link = find_link()
    assert link is not None
    return train(config, listeners=[link.send_event] if has_listeners and link.rank == 0 else (), **given)
