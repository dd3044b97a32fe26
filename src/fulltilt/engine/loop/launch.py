"""``train`` in processes of its own: over several devices, or after memory ran out; how they come back to ``train``."""

import contextlib
import ctypes
import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from fulltilt.config import Config, plan_of
from fulltilt.engine.announce import Announcer, read_first_line
from fulltilt.engine.build.builder import check_device
from fulltilt.engine.interrupt import SAID
from fulltilt.engine.loop.endings import TrainResult
from fulltilt.engine.loop.replan import MAX_REPLANS, RankReplanError
from fulltilt.engine.loop.session import Restart
from fulltilt.engine.loop.sizes import plan_sizes_after_crash
from fulltilt.engine.ranks.causes import Cause
from fulltilt.engine.ranks.process import find_link
from fulltilt.engine.ranks.world import is_rank, plan_devices
from fulltilt.levers import list_environment
from fulltilt.records import (
    CheckpointSaved,
    Event,
    Evidence,
    Listener,
    Replanned,
    RunStarted,
    StepsDone,
    classify_outcome,
)
from fulltilt.tasks import Workload

COMPILE_HANG_LIMIT_S = 600.0  # a rank may compile alone, for a batch of another size


def must_launch(config: Config, device: str | None = None) -> bool:
    """Tell whether a run needs processes of its own: several devices, or a start anew when it dies."""
    return not is_rank() and (len(plan_devices(config, device)) > 1 or config.run.max_restarts > 0)


def find_obstacle_to_leaving(workload: Workload | None) -> str | None:
    """Say why a run cannot leave this process for a fresh one; None where it can."""
    if is_rank():  # the process that started this one starts the next
        return None if find_link() is not None else "torchrun started it, and only torchrun can start another one"
    try:
        cloudpickle.dumps(workload)
    except Exception as error:  # whatever the objects of a user do when they are pickled
        return f"the workload cannot be sent to another one ({type(error).__name__}: {read_first_line(error)})"
    return None


def give_back_memory() -> None:
    """Give what objects have left behind to the system: another process needs it."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def choose_hang_limit_s(wanted_s: float | None, *, compiles: bool) -> float:
    """Choose how long one rank may stand still while the others wait for it; ``wanted_s`` is the user's choice."""
    from fulltilt.engine.ranks.group import HANG_LIMIT_S

    return wanted_s or (COMPILE_HANG_LIMIT_S if compiles else HANG_LIMIT_S)


def train_in_ranks(
    body: Callable[..., TrainResult | Restart], config: Config, listeners: Sequence[Listener], given: Mapping[str, Any]
) -> TrainResult:
    """Run ``body(config, **given)`` in one process a device; ``listeners`` stay in this one.

    One process alone that runs out of memory returns what the next one starts with, as ``given["after"]``.

    Raises:
        DeviceError: a device is not there. RankFailedError and others: see ``ranks.run_ranks``.
    """
    from fulltilt.engine.ranks.group import run_ranks

    saved_step = told_step = 0  # of the newest checkpoint, and of the newest interval
    after: Restart | None = given.get("after")

    def note_steps(event: Event) -> None:
        nonlocal saved_step, told_step
        if isinstance(event, RunStarted):
            saved_step = told_step = event.first_step
        elif isinstance(event, CheckpointSaved):
            saved_step = event.step
        elif isinstance(event, StepsDone):
            told_step = event.step

    def answer(cause: Cause) -> Mapping[str, Any] | None:
        nonlocal after
        again = plan_again(cause, saved_step, announcer)
        if again is None and after is not None and len(devices) == 1:
            again = plan_after_crash(cause, after, saved_step, told_step, announcer)
        after = again["after"] if again is not None else after
        return again

    announcer = Announcer([note_steps, *listeners])
    devices = [str(check_device(name)) for name in plan_devices(config, given["device"])]
    while True:
        result = run_ranks(
            body,
            {"config": config, **given, "after": after},
            devices=devices,
            announcer=announcer,
            max_restarts=config.run.max_restarts,
            restarted_with={"resume": True},
            plan_again=answer,
            hang_limit_s=choose_hang_limit_s(config.run.hang_timeout_s, compiles=config.speed.compile),
            start_limit_s=config.run.start_timeout_s,
            environment=list_environment(plan_of(config)),
            said=SAID,
        )
        if isinstance(result, TrainResult):
            return dataclasses.replace(result, notes=(*announcer.notes, *result.notes))
        after = result


def plan_after_crash(
    cause: Cause, after: Restart, saved_step: int, told_step: int, announcer: Announcer
) -> Mapping[str, Any] | None:
    """Return what to start again with where the process that went on with smaller batches crashed, and tell it."""
    evidence = Evidence(exit_code=cause.exit_code, had_run_out=True)
    sizes = plan_sizes_after_crash(after.sizes)
    if after.n_replans >= MAX_REPLANS or sizes is None or classify_outcome(evidence)[0] != "out_of_memory":
        return None
    step = max(saved_step, after.step)
    n_lost = max(0, told_step - step)
    announcer(Replanned, step=step, n_steps_lost=n_lost, reason=cause.text, **dataclasses.asdict(sizes))
    now = f"batch_size {sizes.batch_size} × accumulate {sizes.accumulate}"
    announcer.note(
        f"{cause.text}, as libraries do that are refused memory, and memory had run out before: the run goes on from "
        f"the checkpoint of step {step} with {now}, the effective batch stays {sizes.batch_size * sizes.accumulate}"
        + (f", {n_lost} steps or more are trained again" if n_lost else ""),
        level="warning",
    )
    n_replans, attempt = after.n_replans + 1, after.attempt + 1
    restart = dataclasses.replace(
        after, sizes=sizes, reason=cause.text, n_replans=n_replans, attempt=attempt, step=step
    )
    return {"after": restart}


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
