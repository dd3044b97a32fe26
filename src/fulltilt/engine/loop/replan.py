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
import traceback
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from fulltilt.config import Config
from fulltilt.engine.loop.evaluate import evaluate, run_assessment
from fulltilt.engine.ranks.process import find_link
from fulltilt.errors import DeviceMemoryError
from fulltilt.records import Evidence, classify_outcome

if TYPE_CHECKING:
    from fulltilt.engine.build.run import Run
    from fulltilt.engine.loop.session import Session

MAX_REPLANS = 8  # of one process
SHRINK = 0.75  # of the micro-batch at most: a start for less than a quarter of it seldom pays

Place = Literal["step", "update", "evaluation", "assessment", "elsewhere"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How a run's batches are cut where memory did not allow what the configuration says. Saved with checkpoints."""

    batch_size: int
    accumulate: int
    val_batch_size: int | None


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


class LastStep:
    """What a step changes before its update: buffers, as BatchNorm's running statistics. Kept after every step.

    Args:
        model: None: no replan can follow, and nothing has to be kept.

    Cost: one copy of the model's buffers a step, on the device; nothing for a model without.
    """

    def __init__(self, model: nn.Module | None):
        groups: dict[Any, list[Tensor]] = {}
        for buffer in model.buffers() if model is not None else ():
            groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._buffers = list(groups.values())
        self._copies = [[buffer.clone() for buffer in group] for group in self._buffers]

    def keep(self) -> None:
        for copies, buffers in zip(self._copies, self._buffers, strict=True):
            torch._foreach_copy_(copies, buffers)

    def bring_back(self) -> None:
        for copies, buffers in zip(self._copies, self._buffers, strict=True):
            torch._foreach_copy_(buffers, copies)


def is_out_of_memory(error: BaseException) -> bool:
    evidence = Evidence(exception_type=type(error).__name__, message=str(error))
    return isinstance(error, Exception) and classify_outcome(evidence)[0] == "out_of_memory"


def plan_replan(s: Session, error: BaseException) -> Replan | None:
    """What to go on with after ``error``; None when smaller batches are no answer to it, or not a possible one."""
    if s.limits.on_out_of_memory == "stop" or s.n_replans >= MAX_REPLANS or not is_out_of_memory(error):
        return None
    place = find_place(s, error)
    sizes = plan_sizes_at(s, place)
    if sizes is None or find_obstacle(s.run) is not None:
        return None
    plan = s.run.plan
    where = {"step": "in a step", "update": "in the update", "evaluation": "in an evaluation"}[place]
    sizes_now = f"batch_size {plan['batch_size']} × accumulate {plan['accumulate']}"
    reason = f"out of memory {where} after step {s.progress.step} with {sizes_now} ({read_first_line(error)})"
    return Replan(sizes=sizes, keeps_step=place != "update" and not s.run.world.is_divided, reason=reason)


def describe_hopeless(s: Session, error: BaseException) -> str:
    """What the user can do where the run does not go on by itself."""
    place, plan = find_place(s, error), s.run.plan
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


def plan_sizes_at(s: Session, place: Place) -> Sizes | None:
    if place == "evaluation":
        return plan_evaluation_sizes(s.run, s.sizes)
    return plan_sizes(s.run, s.sizes) if place in ("step", "update") else None


def find_place(s: Session, error: BaseException) -> Place:
    """Where in the loop an error came from, by the frames it passed."""
    place: Place = "elsewhere"
    updaters = (s.run.setup.optimizer, s.run.setup.scaler)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if owner is not None and any(owner is updater for updater in updaters):
            return "update"
        if frame.f_code is run_assessment.__code__:
            return "assessment"
        if frame.f_code is evaluate.__code__:
            place = "evaluation"
        if owner is s.step:
            place = "step"
    return place


def plan_sizes(run: Run, sizes: Sizes | None) -> Sizes | None:
    """The next smaller micro-batch that divides the effective batch; None where some rank would get no sample of it."""
    effective = run.plan["batch_size"] * run.plan["accumulate"]
    for batch_size in range(int(run.plan["batch_size"] * SHRINK), run.world.n_ranks - 1, -1):
        if effective % batch_size == 0:
            return Sizes(
                batch_size=batch_size,
                accumulate=effective // batch_size,
                val_batch_size=sizes.val_batch_size if sizes is not None else None,
            )
    return None


def plan_evaluation_sizes(run: Run, sizes: Sizes | None) -> Sizes | None:
    """Half the validation batch, and training as it is: means over samples do not depend on it."""
    known = sizes.val_batch_size if sizes is not None else None
    configured = run.config.data.val_batch_size if run.config is not None else None
    val_batch_size = (known or configured or run.batch_size) // 2
    if not val_batch_size:
        return None
    plan = run.plan
    return Sizes(batch_size=plan["batch_size"], accumulate=plan["accumulate"], val_batch_size=val_batch_size)


def find_obstacle(run: Run) -> str | None:
    """Why this run cannot go on with other sizes as if it had been started with them."""
    if run.world.is_divided and find_link() is None:
        return "torchrun started its processes, and only torchrun can start all of them again"
    if isinstance(run.dataset, IterableDataset) and (run.loader.num_workers > 1 or run.loader.drop_last):
        return "a stream that several workers share, or that drops its last batch, would be cut in other places"
    return None


def apply_sizes(config: Config, sizes: Sizes | None) -> Config:
    """``config`` as the run goes on with it."""
    if sizes is None:
        return config
    drop_last = config.data.drop_last and not is_cut_anew(config, sizes)  # else see leave_out_tail
    data: dict[str, Any] = {"batch_size": sizes.batch_size, "drop_last": drop_last}
    if sizes.val_batch_size is not None:
        data["val_batch_size"] = sizes.val_batch_size
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "speed": config.speed.model_copy(update={"accumulate": sizes.accumulate}),
        }
    )


def is_cut_anew(config: Config, sizes: Sizes) -> bool:
    return (sizes.batch_size, sizes.accumulate) != (config.data.batch_size, config.speed.accumulate)


def leave_out_tail(config: Config, run: Run, sizes: Sizes | None) -> None:
    """With ``drop_last`` an epoch keeps the samples and steps it had with the configured micro-batch.

    A smaller one would divide what was dropped, and the epoch would have another step.
    """
    if sizes is None or run.n_samples is None or not config.data.drop_last or not is_cut_anew(config, sizes):
        return
    run.loader.sampler.n_left_out = run.n_samples % config.data.batch_size
    run.steps_per_epoch = -(-len(run.loader) // run.setup.accumulate)


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
