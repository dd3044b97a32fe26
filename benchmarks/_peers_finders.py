"""The peers' batch-size finders, each at its documented settings. A peer is imported when it runs.

A finder is ``(job, largest) -> batch size``; ``largest`` is where those start that only search downwards.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks._peers_job import Job

TIMM_WARMUP_STEPS, TIMM_STEPS = 10, 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finder:
    """A peer's way to a batch size."""

    package: str
    loads: str | None  # imported before the memory limit is set
    n_steps: int  # a trial has, by the peer's default where it has one
    find: Callable[[Job, int], int]
    settings: str  # as in the result file, with the link


def find_with_lightning(job: Job, largest: int, *, mode: str) -> int:
    """Search up from 2, to a limit of Lightning's own; ``largest`` is left unused."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        trainer = pl.Trainer(
            accelerator="gpu" if job.device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=10,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        found = Tuner(trainer).scale_batch_size(build_lightning_module(job), mode=mode, steps_per_trial=job.n_steps)
    assert found is not None
    return found


def build_lightning_module(job: Job) -> Any:
    """Build the job as a LightningModule with the attribute ``batch_size`` that the finder sets."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model = job.build_model()

        def train_dataloader(self) -> Any:
            return job.build_loader(self.batch_size)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.build_optimizer(self.model)

        def on_train_start(self) -> None:
            job.open_attempt(self.batch_size)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            return job.workload.loss(self.model(inputs), targets)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with job.watch():  # the closure in it runs forward and backward
                super().optimizer_step(*args, **kwargs)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            job.attempts[-1].count_step(len(batch[1]))

        def on_train_end(self) -> None:
            job.attempts[-1].status = "ok"

    return Module()


def find_with_accelerate(job: Job, largest: int, *, start: int | None) -> int:
    """Search from ``start``, or from ``largest``, down by a tenth each time."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=job.device.type == "cpu")

    def train(batch_size: int) -> int:
        accelerator.free_memory()
        job.run_steps(batch_size, accelerator.prepare)
        return batch_size

    return find_executable_batch_size(train, starting_batch_size=start or largest)()


def find_with_timm(job: Job, largest: int) -> int:
    """Retry as timm's ``benchmark.py`` does, which is not in the wheel; the two functions that decide are.

    Raises:
        RuntimeError: an error that timm does not take for a lack of memory.
    """
    timm = load_timm_decay()
    batch_size = largest
    while batch_size:
        try:
            job.run_steps(batch_size)
        except RuntimeError as error:
            if not timm.check_batch_size_retry(str(error)):
                raise
            batch_size = timm.decay_batch_step(batch_size)
        else:
            return batch_size
    raise RuntimeError("timm decayed the batch size to 0")


def load_timm_decay() -> ModuleType:
    """Load ``timm.utils.decay_batch`` from its file.

    timm as a whole needs a torchvision built for this torch, and a CPU build of torch has none on the package index.

    Raises:
        ModuleNotFoundError: timm is not installed.
    """
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("timm is not installed here")
    path = Path(found.submodule_search_locations[0]) / "utils" / "decay_batch.py"
    spec = importlib.util.spec_from_file_location("timm_decay_batch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_LIGHTNING = "https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#batch-size-finder"
_ACCELERATE = "https://huggingface.co/docs/accelerate/usage_guides/memory#find_executable_batch_size"
_TIMM = "https://github.com/huggingface/pytorch-image-models/blob/main/benchmark.py"

FINDERS: dict[str, Finder] = {
    **{
        f"lightning, {mode}": Finder(
            package="lightning",
            loads="lightning.pytorch",
            n_steps=3,
            find=functools.partial(find_with_lightning, mode=mode),
            settings=f"Tuner.scale_batch_size(mode={mode!r}), all else by default: {_LIGHTNING}",
        )
        for mode in ("power", "binsearch")
    },
    **{
        f"accelerate, {name} start": Finder(
            package="accelerate",
            loads="accelerate",
            n_steps=3,
            find=functools.partial(find_with_accelerate, start=start),
            settings=f"find_executable_batch_size{said}; 3 steps a trial: {_ACCELERATE}",
        )
        for name, start, said in (
            ("default", 128, "(starting_batch_size=128), its default"),
            ("largest", None, " from the largest batch of the space"),
        )
    },
    "timm": Finder(
        package="timm",
        loads=None,
        n_steps=TIMM_WARMUP_STEPS + TIMM_STEPS,
        find=find_with_timm,
        settings=(
            "decay_batch_step and check_batch_size_retry of timm.utils in the loop of benchmark.py, from the largest "
            f"batch of the space, {TIMM_WARMUP_STEPS} + {TIMM_STEPS} steps a trial, its default: {_TIMM}"
        ),
    ),
}


def is_available(finder: Finder) -> bool:
    return importlib.util.find_spec(finder.package) is not None
