"""Out of memory in a run: on from the last step, with smaller micro-batches and the same effective batch.

The loop knows nothing of it. ``train`` asks ``plan_replan`` what an error means; the window in progress is dropped, the
state after the last whole step is saved, and the session opens again from there with other ``Sizes``. An update that
was interrupted half-way cannot be taken back: the run then goes on from the newest checkpoint, and says how many steps
it trains again. No batch is ever left out.

Of several ranks the one that ran out cannot say so to the others, which wait for it in a collective: it ends with a
``RankReplanError``, and the process that started the ranks starts all of them again from the newest checkpoint
(``launch.py``).
"""

from __future__ import annotations

import dataclasses

from torch import nn

from fulltilt.engine.loop.session import Session
from fulltilt.engine.loop.sizes import Sizes, find_obstacle, plan_evaluation_sizes, plan_sizes
from fulltilt.engine.step.train_step import Doing
from fulltilt.errors import DeviceMemoryError
from fulltilt.records import Evidence, classify_outcome

MAX_REPLANS = 8  # of one process


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """How a run goes on.

    Attributes:
        keeps_step: The state after the last whole step is intact. Else the newest checkpoint is what is left.
        reason: What ran out of memory, in a sentence.
    """

    sizes: Sizes
    keeps_step: bool
    reason: str


class RankReplanError(DeviceMemoryError):
    """A rank ran out of memory, and says how all of them can go on.

    Attributes:
        step: Optimizer steps before it.
        first_step: The step that this rank went on from when it started.
        n_replans, attempt, started_s: As the next ``Restart`` has them.
    """

    def __init__(
        self,
        message: str,
        *,
        replan: Replan | None = None,
        step: int = 0,
        first_step: int = 0,
        n_replans: int = 0,
        attempt: int = 0,
        started_s: float = 0.0,
    ):
        super().__init__(message)  # the rest travels as attributes
        self.replan, self.step, self.first_step = replan, step, first_step
        self.n_replans, self.attempt, self.started_s = n_replans, attempt, started_s


def build_rank_error(s: Session, replan: Replan) -> RankReplanError:
    return RankReplanError(
        describe_replan(s, replan, n_steps_lost=0),
        replan=replan,
        step=s.progress.step,
        first_step=s.first_step,
        n_replans=s.n_replans + 1,
        attempt=s.attempt + 1,
        started_s=s.started_s,
    )


def is_out_of_memory(error: BaseException) -> bool:
    evidence = Evidence(exception_type=type(error).__name__, message=str(error))
    return isinstance(error, Exception) and classify_outcome(evidence)[0] == "out_of_memory"


def plan_replan(s: Session, error: BaseException) -> Replan | None:
    """Plan how to go on after ``error``; None when smaller batches are no answer to it, or not a possible one.

    Raises:
        RankReplanError: the same, of one rank of several.
    """
    if s.limits.on_out_of_memory == "stop" or s.n_replans >= MAX_REPLANS or not is_out_of_memory(error):
        return None
    place = s.run.doing
    sizes = plan_sizes_at(s, place)
    if sizes is None or find_obstacle(s.run) is not None:
        return None
    plan = s.run.plan
    where = {"step": "in a step", "update": "in the update", "evaluation": "in an evaluation"}[place]
    sizes_now = f"batch_size {plan['batch_size']} × accumulate {plan['accumulate']}"
    reason = f"out of memory {where} after step {s.progress.step} with {sizes_now} ({read_first_line(error)})"
    if s.run.world.is_divided:
        raise build_rank_error(s, Replan(sizes=sizes, keeps_step=False, reason=reason)) from error
    return Replan(sizes=sizes, keeps_step=place != "update", reason=reason)


def describe_hopeless(s: Session, error: BaseException) -> str:
    """What the user can do where the run does not go on by itself."""
    place, plan = s.run.doing, s.run.plan
    message = (
        f"out of memory on {s.run.device} after step {s.progress.step} with batch_size {plan['batch_size']} "
        f"({read_first_line(error)})"
    )
    if place == "assessment":  # it reads its samples by itself
        return (
            f"{message} in the assessment of {s.run.workload.name} (workload.assess), which no batch size changes; let "
            "it take fewer samples at a time, or set run.evaluate_every to null; --resume goes on from the last "
            "checkpoint"
        )
    rest = (
        "activation_checkpointing, with which --resume goes on from the last checkpoint; or, as another run in another "
        "folder, precision bf16 or a smaller model"
    )
    sizes = plan_sizes_at(s, place)
    if sizes is None:
        return f"{message}; there is no smaller batch that would help: try {rest}"
    smaller = f"batch_size {sizes.batch_size} × accumulate {sizes.accumulate}"
    if s.limits.on_out_of_memory == "stop" and find_obstacle(s.run) is None:
        return f"{message}; --resume with run.on_out_of_memory=replan goes on with {smaller}; or try {rest}"
    if obstacle := find_obstacle(s.run):
        message = f"{message}, and the run does not replan by itself: {obstacle}"
    elif s.n_replans >= MAX_REPLANS:
        message = f"{message}, after {s.n_replans} replans"
    return f"{message}; try {rest}, or {smaller}"


def read_first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def plan_sizes_at(s: Session, place: Doing) -> Sizes | None:
    if place == "evaluation":
        return plan_evaluation_sizes(s.run, s.sizes)
    return plan_sizes(s.run, s.sizes) if place in ("step", "update") else None


def describe_replan(s: Session, replan: Replan, *, n_steps_lost: int) -> str:
    """What the user reads: what happened, what changes, what stays."""
    plan, sizes = s.run.plan, replan.sizes
    old, new = (plan["batch_size"], plan["accumulate"]), (sizes.batch_size, sizes.accumulate)
    if new == old:
        return f"{replan.reason}: validation batches hold {sizes.val_batch_size} samples from now on"
    parts = [
        f"{replan.reason}: batch_size {new[0]} × accumulate {new[1]} from now on, the effective batch stays "
        f"{new[0] * new[1]}"
    ]
    if n_steps_lost:
        parts.append(f"{n_steps_lost} steps since the newest checkpoint are trained again")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in s.run.setup.model.modules()):
        parts.append(f"BatchNorm sees {new[0]} samples at a time instead of {old[0]}")
    return "; ".join(parts)
