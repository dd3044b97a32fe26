"""Goes on with smaller micro-batches, and the same effective batch, where a run has run out of memory.

``plan_replan`` decides whether that is an answer to an error, ``prepare_restart`` saves the state after the last whole
step, and the next attempt opens from there with other ``Sizes``. An update that was interrupted cannot be taken back:
the run then goes on from the newest checkpoint, and says how many steps it trains again. No batch is left out.

On a CPU the next attempt is a process of its own, as one rank (``launch.py``): a library that was refused memory may be
left in any state, and oneDNN then fails or crashes at sizes that fit. An allocator of a device refuses before anything
is done, and a second process would take its own context from the device: there this process goes on.

Of several ranks the one that ran out cannot tell the others, which wait for it in a collective. It ends with a
``RankReplanError``, and the process that started the ranks starts all of them again from the newest checkpoint
(``launch.py``).
"""

import dataclasses
import gc

import torch
from torch import nn

from fulltilt.engine.announce import is_out_of_memory, read_first_line
from fulltilt.engine.loop.duties import save
from fulltilt.engine.loop.saving import collect_checkpoint
from fulltilt.engine.loop.session import Restart, Session
from fulltilt.engine.loop.sizes import Sizes, find_obstacle, plan_evaluation_sizes, plan_sizes
from fulltilt.errors import DeviceMemoryError
from fulltilt.records import Replanned

MAX_REPLANS = 8  # of one command
PLACES = {"step": "in a step", "update": "in the update"} | dict.fromkeys(
    ("evaluation", "assessment"), "in an evaluation"
)


class RankReplanError(DeviceMemoryError):
    """A rank ran out of memory, and all of them can go on with smaller batches.

    Attributes:
        restart: What the ranks take over; its ``step`` is the last whole one of this rank.
        first_step: The step that this rank went on from when it started.
    """

    def __init__(self, message: str, *, restart: Restart | None = None, first_step: int = 0):
        super().__init__(message)  # the rest travels as attributes
        self.restart, self.first_step = restart, first_step


def plan_replan(s: Session, error: BaseException) -> Restart | None:
    """Plan how to go on after ``error``; None when smaller batches are no answer to it, or not a possible one.

    Raises:
        RankReplanError: the same, of one rank of several.
    """
    if s.limits.on_out_of_memory == "stop" or s.n_replans >= MAX_REPLANS or not is_out_of_memory(error):
        return None
    sizes = _plan_smaller(s)
    if sizes is None or find_obstacle(s.run) is not None:
        return None
    plan, step = s.run.plan, s.progress.step
    sizes_now = f"batch_size {plan['batch_size']} × accumulate {plan['accumulate']}"
    reason = f"out of memory {PLACES[s.run.doing]} after step {step} with {sizes_now} ({read_first_line(error)})"
    attempt, n_replans = s.announce.attempt + 1, s.n_replans + 1
    restart = Restart(
        sizes=sizes,
        reason=reason,
        n_replans=n_replans,
        attempt=attempt,
        started_s=s.started_s,
        step=step,
        in_fresh_process=s.run.device.type == "cpu" and not isinstance(error, torch.OutOfMemoryError),
    )
    if s.run.world.is_divided:
        raise RankReplanError(_describe_change(s, restart), restart=restart, first_step=s.first_step) from error
    return restart


def prepare_restart(s: Session, restart: Restart) -> Restart:
    """Drop the step in progress, save the state after the last whole step, and tell what changes.

    Call it when the error is gone: what its frames held of the device has to be free.

    Raises:
        StorageError: the state cannot be saved.
    """
    gc.collect()
    s.run.setup.optimizer.zero_grad(set_to_none=True)
    if s.run.device.type == "cuda":
        torch.cuda.empty_cache()  # blocks of the old sizes are of no use to the new ones
    collect_checkpoint(s)
    saved_step = s.saved_position.step if s.saved_position is not None else 0
    n_steps_lost = s.progress.step - saved_step if s.run.doing == "update" else 0
    message = _describe_change(s, restart, n_steps_lost)
    if s.run.doing != "update":  # the state after the last whole step is intact
        s.last_step.bring_back()
        s.meter.bring_back()
        s.watch.bring_back()
        s.sizes, s.saved_position = restart.sizes, None
        save(s, is_last=True)
    step, sizes = s.progress.step - n_steps_lost, dataclasses.asdict(restart.sizes)
    s.announce(Replanned, step=step, n_steps_lost=n_steps_lost, reason=restart.reason, **sizes)
    s.announce.note(message, level="warning")
    return dataclasses.replace(restart, step=step, notes=tuple(s.announce.notes), metrics=s.last_metrics)


def describe_hopeless(s: Session, error: BaseException) -> str:
    """Say what the user can do where the run does not go on by itself."""
    run, at = s.run, f"after step {s.progress.step} with batch_size {s.run.plan['batch_size']}"
    message = f"out of memory on {run.device} {at} ({read_first_line(error)})"
    if run.doing == "assessment" and not hasattr(run.workload.assess, "batch_size"):  # it reads its samples by itself
        return (
            f"{message} in the assessment of {run.workload.name} (workload.assess), which no batch size changes; let "
            "it take fewer samples at a time, or set run.evaluate_every to null; --resume goes on from the last "
            "checkpoint"
        )
    precision = "precision bf16 or " if run.plan["precision"] in ("fp32", "tf32") else ""
    rest = f"as another run in another folder, {precision}a smaller model"
    if run.plan["activation_checkpointing"] in (None, False, "off"):
        rest = f"activation_checkpointing, with which --resume goes on from the last checkpoint; or, {rest}"
    sizes = _plan_smaller(s)
    if sizes is None:
        return f"{message}; there is no smaller batch that would help: try {rest}"
    smaller = f"batch_size {sizes.batch_size} × accumulate {sizes.accumulate}"
    if obstacle := find_obstacle(run):
        message = f"{message}, and the run does not replan by itself: {obstacle}"
    elif s.limits.on_out_of_memory == "stop":
        return f"{message}; --resume with run.on_out_of_memory=replan goes on with {smaller}; or try {rest}"
    elif s.n_replans >= MAX_REPLANS:
        message = f"{message}, after {s.n_replans} replans"
    return f"{message}; try {rest}, or {smaller}"


def _plan_smaller(s: Session) -> Sizes | None:
    """Plan smaller batches for what the run does now; None where batches are not what it needs memory for."""
    if s.run.doing in ("evaluation", "assessment"):
        return plan_evaluation_sizes(s.run, s.sizes)
    return plan_sizes(s.run, s.sizes) if s.run.doing in ("step", "update") else None


def _describe_change(s: Session, restart: Restart, n_steps_lost: int = 0) -> str:
    """Say what happened, what changes and what stays."""
    plan, sizes, reason = s.run.plan, restart.sizes, restart.reason
    old, new = (plan["batch_size"], plan["accumulate"]), (sizes.batch_size, sizes.accumulate)
    if new == old:
        return f"{reason}: validation batches hold {sizes.val_batch_size} samples from now on"
    effective = new[0] * new[1]
    parts = [f"{reason}: batch_size {new[0]} × accumulate {new[1]} from now on, the effective batch stays {effective}"]
    if n_steps_lost:
        parts.append(f"{n_steps_lost} steps since the newest checkpoint are trained again")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in s.run.setup.model.modules()):
        parts.append(f"BatchNorm sees {new[0]} samples at a time instead of {old[0]}")
    return "; ".join(parts)
