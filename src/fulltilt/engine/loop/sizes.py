"""How batches are cut: as the configuration says, or smaller where memory ran out."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from fulltilt.config import Config
from fulltilt.engine.build.run import Run

SHRINK = 0.75  # of the micro-batch at most: a start for less than a quarter of it seldom pays


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Batch sizes of a run that memory did not allow the configured ones. Saved with checkpoints."""

    batch_size: int
    accumulate: int
    val_batch_size: int | None

    def is_other_than(self, config: Config) -> bool:
        """Tell whether micro-batches are cut otherwise than ``config`` says."""
        return (self.batch_size, self.accumulate) != (config.data.batch_size, config.speed.accumulate)


class LastStep:
    """Copies what a step changes before its update, after every step: buffers, as BatchNorm's running statistics.

    Args:
        model: None: no replan can follow, and nothing has to be kept.

    Cost: one copy of the model's buffers a step, on the device; nothing for a model without.
    """

    def __init__(self, model: nn.Module | None):
        groups: dict[Any, list[Tensor]] = {}
        for buffer in model.buffers() if model is not None else ():
            groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._pairs = [(buffers, [buffer.clone() for buffer in buffers]) for buffers in groups.values()]

    def keep(self) -> None:
        for buffers, copies in self._pairs:
            torch._foreach_copy_(copies, buffers)

    def bring_back(self) -> None:
        for buffers, copies in self._pairs:
            torch._foreach_copy_(buffers, copies)


def plan_sizes(run: Run, sizes: Sizes | None) -> Sizes | None:
    """Plan the next smaller micro-batch that divides the effective batch; None where a rank would get no sample."""
    now = (run.plan["batch_size"], run.plan["accumulate"])
    return _divide(*now, sizes.val_batch_size if sizes is not None else None, at_least=run.world.n_ranks)


def plan_sizes_after_crash(sizes: Sizes) -> Sizes | None:
    """Plan smaller batches of both kinds where a process could not say what it needed memory for."""
    val_batch_size = max(1, (sizes.val_batch_size or sizes.batch_size) // 2)
    return _divide(sizes.batch_size, sizes.accumulate, val_batch_size)


def _divide(batch_size: int, accumulate: int, val_batch_size: int | None, at_least: int = 1) -> Sizes | None:
    effective = batch_size * accumulate
    for smaller in range(int(batch_size * SHRINK), at_least - 1, -1):
        if effective % smaller == 0:
            return Sizes(batch_size=smaller, accumulate=effective // smaller, val_batch_size=val_batch_size)
    return None


def plan_evaluation_sizes(run: Run, sizes: Sizes | None) -> Sizes | None:
    """Halve the validation batch and leave training as it is: means over samples do not depend on it."""
    known = sizes.val_batch_size if sizes is not None else None
    now = known or run.config.data.val_batch_size or run.batch_size
    val_batch_size = now // 2
    if run.doing == "assessment":
        val_batch_size = min(now, getattr(run.workload.assess, "batch_size", 0) // 2)
    if not val_batch_size:
        return None
    plan = run.plan
    return Sizes(batch_size=plan["batch_size"], accumulate=plan["accumulate"], val_batch_size=val_batch_size)


def find_obstacle(run: Run) -> str | None:
    """Say why this run cannot go on with other sizes as if it had been started with them; None where it can."""
    if run.world.is_divided and run.world.link is None:
        return "torchrun started its processes, and only torchrun can start all of them again"
    if isinstance(run.dataset, IterableDataset) and (run.loader.num_workers > 1 or run.loader.drop_last):
        return "a stream that several workers share, or that drops its last batch, would be cut in other places"
    return None


def apply_sizes(config: Config, sizes: Sizes | None) -> Config:
    """Return ``config`` with other batch sizes."""
    if sizes is None:
        return config
    drop_last = config.data.drop_last and not sizes.is_other_than(config)  # else see leave_out_tail
    data: dict[str, Any] = {"batch_size": sizes.batch_size, "drop_last": drop_last}
    if sizes.val_batch_size is not None:
        data["val_batch_size"] = sizes.val_batch_size
    speed = {"accumulate": sizes.accumulate}
    changed = {"data": config.data.model_copy(update=data), "speed": config.speed.model_copy(update=speed)}
    return config.model_copy(update=changed)


def leave_out_tail(config: Config, run: Run, sizes: Sizes | None) -> None:
    """Give an epoch with ``drop_last`` the samples and steps that it had with the configured micro-batch.

    A smaller one would divide what was dropped, and the epoch would have another step.
    """
    if sizes is None or run.n_samples is None or not config.data.drop_last or not sizes.is_other_than(config):
        return
    run.loader.sampler.n_left_out = run.n_samples % config.data.batch_size
    run.steps_per_epoch = -(-len(run.loader) // run.setup.accumulate)
