"""How batches are cut: as the configuration says, or smaller where memory ran out."""

from __future__ import annotations

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
    """How a run's batches are cut where memory did not allow what the configuration says. Saved with checkpoints."""

    batch_size: int
    accumulate: int
    val_batch_size: int | None


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
    if run.world.is_divided and run.world.link is None:
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
