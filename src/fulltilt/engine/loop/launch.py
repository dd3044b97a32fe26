"""``train`` over several devices: whether to start processes of its own, and how they come back to ``train``."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fulltilt.config import Config, plan_of
from fulltilt.engine.announce import Announcer
from fulltilt.engine.build.builder import check_device
from fulltilt.engine.loop.endings import TrainResult
from fulltilt.engine.loop.replan import RankReplanError
from fulltilt.engine.ranks.causes import Cause
from fulltilt.engine.ranks.world import is_rank, plan_devices
from fulltilt.levers import list_environment
from fulltilt.records import CheckpointSaved, Event, Listener, Replanned, RunStarted

COMPILE_HANG_LIMIT_S = 600.0  # a rank may compile alone, for a batch of another size


def must_launch(config: Config, device: str | None = None) -> bool:
    """Tell whether a run needs processes of its own: several devices, or a start anew when it dies."""
    return not is_rank() and (len(plan_devices(config, device)) > 1 or config.run.max_restarts > 0)


def choose_hang_limit_s(wanted_s: float | None, *, compiles: bool) -> float:
    """Choose how long one rank may stand still while the others wait for it; ``wanted_s`` is the user's choice."""
    from fulltilt.engine.ranks.group import HANG_LIMIT_S

    return wanted_s or (COMPILE_HANG_LIMIT_S if compiles else HANG_LIMIT_S)


def train_in_ranks(
    body: Callable[..., TrainResult], config: Config, listeners: Sequence[Listener], given: Mapping[str, Any]
) -> TrainResult:
    """Run ``body(config, **given)`` in one process a device; ``listeners`` stay in this one.

    Raises:
        DeviceError: a device is not there. RankFailedError and others: see ``ranks.run_ranks``.
    """
    from fulltilt.engine.ranks.group import run_ranks

    saved_step = 0  # of the newest checkpoint

    def note_saved(event: Event) -> None:
        nonlocal saved_step
        if isinstance(event, RunStarted | CheckpointSaved):
            saved_step = event.first_step if isinstance(event, RunStarted) else event.step

    announcer = Announcer([note_saved, *listeners])
    result = run_ranks(
        body,
        {"config": config, **given},
        devices=[str(check_device(name)) for name in plan_devices(config, given["device"])],
        announcer=announcer,
        max_restarts=config.run.max_restarts,
        restarted_with={"resume": True},
        plan_again=lambda cause: plan_again(cause, saved_step, announcer),
        hang_limit_s=choose_hang_limit_s(config.run.hang_timeout_s, compiles=config.speed.compile),
        start_limit_s=config.run.start_timeout_s,
        environment=list_environment(plan_of(config)),
    )
    return dataclasses.replace(result, notes=(*announcer.notes, *result.notes))


def plan_again(cause: Cause, saved_step: int, announcer: Announcer) -> Mapping[str, Any] | None:
    """Return what all ranks start again with after one ran out of memory, and tell it; None after anything else.

    Args:
        saved_step: Of the newest checkpoint; 0 where there is none.
    """
    error = cause.failure.error if cause.failure is not None else None
    if not isinstance(error, RankReplanError) or error.restart is None:
        return None
    saved_step = max(saved_step, error.first_step)  # rank 0 may not have told yet where it started
    restart = dataclasses.replace(error.restart, step=saved_step)
    n_steps_lost = max(0, error.restart.step - saved_step)
    reason, sizes = f"rank {cause.rank}: {restart.reason}", dataclasses.asdict(restart.sizes)
    announcer(Replanned, step=saved_step, n_steps_lost=n_steps_lost, reason=reason, **sizes)
    where = f"the checkpoint of step {saved_step}" if saved_step else "the first step, there being no checkpoint"
    again = f", {n_steps_lost} steps are trained again" if n_steps_lost else ""
    announcer.note(f"rank {cause.rank}: {error}; all ranks start again from {where}{again}", level="warning")
    return {"after": restart}
