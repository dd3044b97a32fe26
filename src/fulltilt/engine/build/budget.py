"""Compares the host memory that batches and checkpoints of a run take with what is free."""

import dataclasses
import os
from typing import Any

from torch.utils.data import IterableDataset

from fulltilt.data.loading.placement import read_free_ram_bytes
from fulltilt.engine.build.run import Run
from fulltilt.engine.step.rng import capture_rng, restore_rng
from fulltilt.hardware import read_shm
from fulltilt.measure.nested import list_tensors
from fulltilt.records import format_bytes

TIGHT_PCT = 80.0  # of free memory: the caches of the file system live in the rest
DEFAULT_PREFETCH = 2  # of torch's DataLoader


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """Holds estimated host memory of queued batches and a checkpoint's copy, and what is free; not workers' own use."""

    n_workers: int  # of all ranks on this machine
    prefetch_factor: int
    batch_bytes: int  # of a worker's training batch: the largest rank's part
    batches_bytes: int  # of batches that workers have ready or hand over, in training and an evaluation beside it
    checkpoint_bytes: int  # of the copy that run.async_checkpoint writes from, once the optimizer has its state
    free_bytes: int
    shm_free_bytes: int | None  # of /dev/shm, where workers hand batches over; None where there is none

    @property
    def total_bytes(self) -> int:
        return self.batches_bytes + self.checkpoint_bytes

    def describe(self) -> str:
        """Say in one line what is needed and what is free."""
        text = "no batches beside the one in use"
        if self.n_workers:
            workers = f"{self.n_workers} worker{'s' if self.n_workers > 1 else ''}"
            each = f"{workers} × {self.prefetch_factor} batches of {format_bytes(self.batch_bytes)}"
            training_bytes = self.n_workers * self.prefetch_factor * self.batch_bytes
            beside = " and those of an evaluation" if self.batches_bytes > training_bytes else ""
            text = f"{format_bytes(self.batches_bytes)} for {each}{beside}"
        if self.checkpoint_bytes:
            text += f", {format_bytes(self.checkpoint_bytes)} for the copy that a checkpoint is written from"
        return f"{text}; {format_bytes(self.free_bytes)} are free"

    def find_problem(self) -> str | None:
        """Say what there is too little of, with the remedy; return None when all fits."""
        if self.n_workers and self.shm_free_bytes is not None and self.batches_bytes > self.shm_free_bytes:
            return (
                f"the workers' batches need {format_bytes(self.batches_bytes)} of /dev/shm, which has "
                f"{format_bytes(self.shm_free_bytes)} free: enlarge it (docker: --shm-size), or use fewer "
                "data.num_workers or a smaller data.prefetch_factor"
            )
        if self.total_bytes <= self.free_bytes * TIGHT_PCT / 100:
            return None
        remedies = ["fewer data.num_workers", "a smaller data.prefetch_factor"] if self.n_workers else []
        remedies += ["run.async_checkpoint: false"] if self.checkpoint_bytes else []
        return f"host memory is short: {self.describe()}; use {' or '.join(remedies)}"


def estimate_host_budget(run: Run, n_ranks: int | None = None) -> HostBudget | None:
    """Estimate the budget of a built run; with workers, None for a stream or an unreadable first sample.

    Args:
        n_ranks: On this machine, of a run that only one process has built; None: those that have.

    Cost: reads one sample, with the random generators put back as they were.
    """
    n_workers = run.loader.num_workers
    sample_bytes = _measure_sample_bytes(run) if n_workers else 0
    if sample_bytes is None:
        return None
    prefetch = run.loader.prefetch_factor or DEFAULT_PREFETCH
    val_batch_size = 0
    if run.workload.validation is not None:
        val_batch_size = run.config.data.val_batch_size or run.batch_size
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", run.world.n_ranks)) if run.world.is_divided else n_ranks or 1
    n_ranks = n_ranks or run.world.n_ranks
    n_workers *= n_local
    part, val_part = -(-run.batch_size // n_ranks), -(-val_batch_size // n_ranks)
    shm = read_shm()
    return HostBudget(
        n_workers=n_workers,
        prefetch_factor=prefetch,
        batch_bytes=sample_bytes * part,
        batches_bytes=n_workers * prefetch * sample_bytes * (part + val_part),
        checkpoint_bytes=estimate_state_bytes(run) if run.config.run.async_checkpoint else 0,
        free_bytes=read_free_ram_bytes(),
        shm_free_bytes=None if shm.total_bytes is None or shm.used_bytes is None else shm.total_bytes - shm.used_bytes,
    )


def _measure_sample_bytes(run: Run) -> int | None:
    if isinstance(run.dataset, IterableDataset):
        return None
    rng = capture_rng({})
    try:
        batch = run.loader.collate_fn(run.loader.dataset.__getitems__([0]))  # type: ignore[attr-defined]
    except Exception:  # boundary to the user's own data: the run itself says what is wrong with it, and where
        return None
    finally:
        restore_rng(rng, {})
    return count_bytes(batch)


def estimate_state_bytes(run: Run) -> int:
    """Estimate the bytes of weights, buffers and the two moments that most optimizers keep."""
    model = run.setup.model
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return 2 * trained + sum(v.nbytes for v in (*model.parameters(), *model.buffers()))


def count_bytes(value: Any) -> int:
    """Return the bytes of the tensors in a nested batch."""
    return sum(tensor.nbytes for tensor in list_tensors(value))
