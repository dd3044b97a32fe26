"""Stores the batch whose loss was not finite, for whoever looks into it.

The loss is read an interval late, when its batch is long gone. Its samples are known by their place in the epoch, so
the loader is asked for them again: what data workers draw at random comes out the same, and what a stream draws as it
begins. What a dataset draws later from the global generators of the training process does not.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from fulltilt.data.loading.sampler import EpochSampler
from fulltilt.engine.announce import read_first_line
from fulltilt.engine.checkpoints.background import HostCopies
from fulltilt.engine.checkpoints.checkpoint import make_plain
from fulltilt.engine.loop.session import Session, skip_to
from fulltilt.engine.step.rng import restore_rng
from fulltilt.errors import FulltiltError
from fulltilt.measure.nested import count_samples, list_tensors
from fulltilt.records.run_folder import open_atomic

FILE = "nan_batch.pt"
N_SHOWN = 5
MEND_DATA = "mend these samples, or leave them out of the data set"


def describe_loss(loss: float, where: str, lr: float, precision: object) -> str:
    """Say of which step a loss is not finite, and under what."""
    return f"the loss is {loss} in {where} (learning rate {lr:.3g}, precision {precision})"


def suggest_stability(precision: object, step: int | None = None) -> str:
    """Say what makes losses finite again, beside what is in force. In the first step the rate had no part yet."""
    if step == 1:
        other = ", or use precision bf16 or fp32" if precision in ("fp16", "auto") else ""
        return f"no update came before it: look at the values that the model starts with, and at the loss{other}"
    if precision in ("fp16", "auto"):
        return "lower optim.lr, set optim.clip_norm, or use precision bf16 or fp32"
    return "lower optim.lr, or set optim.clip_norm"


def find_bad_step(losses: Sequence[float], *, last_step: int) -> int | None:
    """Find the first step whose loss is not finite; None where only their sum is not.

    Args:
        losses: Of consecutive steps, the newest last.
        last_step: The step of that one.
    """
    first_step = last_step - len(losses) + 1
    return next((step for step, loss in enumerate(losses, first_step) if not math.isfinite(loss)), None)


def save_bad_batch(s: Session, *, step: int, loss: float, is_kept: bool = True) -> tuple[str, str]:
    """Store the batches of a step → where they are and what they show, and a remedy.

    ``nan_batch.pt`` holds tensors and plain values only, for ``torch.load(path, weights_only=True)``: ``step``,
    ``epoch``, ``loss``, ``first_sample`` (place in the epoch's order), ``indices`` (of the samples in the dataset, None
    for a stream) and ``batches``, one entry a micro-batch as the loader gave it. Of several ranks the first one stores
    the whole batches, and all call this.

    Args:
        step: One of the epoch under way.
        is_kept: Whether they are stored; else they are only looked at.
    """
    world, found = s.run.world, ("", "")
    if world.is_first:
        with world.work_alone(), s.run.undivided():
            found = _save_batch(s, step, loss, is_kept)
    return world.hand_out(found)


def _save_batch(s: Session, step: int, loss: float, is_kept: bool) -> tuple[str, str]:
    path, run = s.folder / FILE, s.run
    remedy = suggest_stability(run.plan["precision"], step)
    step_in_epoch = s.progress.step_in_epoch - (s.progress.step - step)
    first_sample = (step_in_epoch - 1) * run.batch_size * run.setup.accumulate
    try:
        if s.loader_state is not None:
            run.loader_generator.set_state(s.loader_state)
        if s.epoch_rng is not None:
            restore_rng(s.epoch_rng, {})
        rest = skip_to(run, s.progress.epoch, first_sample, first_sample // run.batch_size)
        batches = list(itertools.islice(rest, run.setup.accumulate))
        n_samples, sampler, indices = sum(map(count_samples, batches)), run.loader.sampler, None
        if isinstance(sampler, EpochSampler):
            indices = sampler.compute_order()[first_sample : first_sample + n_samples].tolist()
        remedy = MEND_DATA if _list_bad_samples(batches) else remedy
        if not is_kept:
            return f"the batch of step {step}: {describe_batch(batches, indices)}", remedy
        content = {
            "step": step,
            "epoch": s.progress.epoch + 1,
            "loss": loss,
            "first_sample": first_sample,
            "indices": indices,
            "batches": [make_plain(batch, "batch") for batch in batches],
        }
        content = HostCopies().copy(content)
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        with open_atomic(path) as stream:
            torch.save(content, stream)
    except (FulltiltError, OSError, RuntimeError, ValueError, TypeError) as error:  # the loss is the news, not this
        return f"the batch of step {step} could not be stored ({read_first_line(error)})", remedy
    return f"the batch of step {step} is in {path}: {describe_batch(batches, indices)}", remedy


def describe_batch(batches: Sequence[Any], indices: Sequence[int] | None) -> str:
    """Say whether the data itself holds the NaN."""
    bad = _list_bad_samples(batches)
    if not bad:
        return "all its values are finite, so the model, the loss or the learning rate made it"
    named = [indices[i] for i in bad] if indices is not None else bad
    more = f" and {len(named) - N_SHOWN} more" if len(named) > N_SHOWN else ""
    what = "of the training set" if indices is not None else "of the batch"
    return f"it holds NaN or infinity in sample {', '.join(map(str, named[:N_SHOWN]))}{more} {what}"


def _list_bad_samples(batches: Sequence[Any]) -> list[int]:
    """Positions in a whole batch, whose micro-batches these are."""
    starts = itertools.accumulate(map(count_samples, batches), initial=0)
    return [start + i for start, batch in zip(starts, batches, strict=False) for i in _find_bad_samples(batch)]


def _find_bad_samples(batch: Any) -> list[int]:
    """Positions along the batch dimension where any tensor holds a value that is not finite."""
    bad: set[int] = set()
    for tensor in list_tensors(batch):
        if tensor.is_floating_point() and tensor.dim() and tensor.numel():
            is_bad = ~torch.isfinite(tensor.float()).reshape(len(tensor), -1).all(1)
            bad.update(is_bad.nonzero().flatten().tolist())
    return sorted(bad)
