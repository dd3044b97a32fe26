"""What the training loop holds in its hands, and how that is saved and restored."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from fulltilt.config import Config
from fulltilt.data.seeds import compute_seed
from fulltilt.engine.announce import Announcer
from fulltilt.engine.build.run import Run
from fulltilt.engine.checkpoints import checkpoint
from fulltilt.engine.checkpoints.background import BackgroundWriter
from fulltilt.engine.loop.evaluate import build_validation_loader
from fulltilt.engine.loop.limits import Limits
from fulltilt.engine.loop.progress import LossMeter, Progress, Reading, Stopwatch
from fulltilt.engine.loop.promise import PromiseWatch
from fulltilt.engine.loop.sizes import LastStep, Sizes, find_obstacle
from fulltilt.engine.step.cached_step import build_step
from fulltilt.engine.step.phase_sample import PhaseSample
from fulltilt.engine.step.rng import capture_rng, restore_rng, seed_everything
from fulltilt.engine.step.schedule import LearningRate, build_schedule
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import ConfigError, RunFolderError
from fulltilt.records import Evaluated


class Position(NamedTuple):
    """What tells two checkpoints of a run apart."""

    epoch: int
    step: int
    evaluated_step: int


class OpenInterval(NamedTuple):
    """A logging interval whose sums are on their way from the device, and where it ended."""

    reading: Reading
    seconds: float
    lr: float  # of its last step
    epoch: int
    step: int
    step_in_epoch: int
    has_phases: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
    """What the next attempt of a run takes over from the one that ran out of memory; the rest is in the checkpoint."""

    sizes: Sizes
    n_replans: int
    attempt: int
    started_s: float
    notes: tuple[str, ...]
    step: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(kw_only=True)
class Session:
    """One run of the loop in ``train.py``; plain parts, no behaviour of their own but saving and restoring."""

    run: Run
    step: TrainStep
    learning_rate: LearningRate
    progress: Progress
    meter: LossMeter
    watch: Stopwatch
    phase_sample: PhaseSample
    announce: Announcer
    limits: Limits
    folder: Path
    validation: DataLoader | None
    last_step: LastStep
    sizes: Sizes | None = None  # instead of the configuration's, after a replan
    n_replans: int = 0  # of this process
    attempt: int = 0
    first_step: int = 0  # of the checkpoint that it went on from
    pending: OpenInterval | None = None
    evaluations: list[Evaluated] = dataclasses.field(default_factory=list)
    started_s: float = dataclasses.field(default_factory=time.perf_counter)
    loader_state: torch.Tensor | None = None  # of run.loader_generator when the epoch began
    restored_rng: Mapping[str, Any] | None = None
    saved_position: Position | None = None
    writer: BackgroundWriter | None = None  # with run.async_checkpoint
    writing_position: Position | None = None
    promise: PromiseWatch | None = None

    @property
    def seconds(self) -> float:
        """Of this process, from the start of its first attempt."""
        return time.perf_counter() - self.started_s

    @property
    def last_metrics(self) -> dict[str, float]:
        return dict(self.evaluations[-1].metrics) if self.evaluations else {}

    @property
    def position(self) -> Position:
        return Position(self.progress.epoch, self.progress.step, self.progress.evaluated_step)

    def start_epoch(self) -> Iterator[Any]:
        """Batches from where the epoch was left; the random generators are then as they were there."""
        run, at = self.run, self.progress
        self.loader_state = run.loader_generator.get_state()
        streams = isinstance(run.dataset, IterableDataset)
        batches = run.start_epoch(at.epoch, 0 if streams else at.samples_in_epoch)
        if streams:
            for _ in range(at.micro_in_epoch):
                next(batches, None)
        if self.restored_rng is not None:
            restore_rng(self.restored_rng, {"prepare": run.generator})
            self.restored_rng = None
        return batches

    def capture(self) -> dict[str, Any]:
        """Everything that a run in another process needs to go on from here; plain values and tensors.

        Of several ranks all have to call it, and the first one's has everything: it does not tell how many there were.
        """
        setup, world = self.run.setup, self.run.world
        loader_state = self.loader_state if self.progress.step_in_epoch else self.run.loader_generator.get_state()
        rng, *rng_of_ranks = world.collect(capture_rng({"prepare": self.run.generator}))
        state = {
            "attempt": self.attempt,
            "config_digest": self.run.config.digest if self.run.config is not None else None,
            "sizes": dataclasses.asdict(self.sizes) if self.sizes is not None else None,
            "placement": self.run.plan["placement"],
            "progress": dataclasses.asdict(self.progress),
            "model": checkpoint.capture_model(setup.model),
            "optimizer": checkpoint.make_plain(setup.optimizer.state_dict(), "optimizer"),
            "scaler": setup.scaler.state_dict() if setup.scaler is not None else None,
            "average": None if self.run.average is None else self.run.average.state_dict(),
            "meter": self.meter.state_dict(),
            "interval_s": self.watch.interval_s,
            "rng": rng,
            "rng_of_ranks": rng_of_ranks,
            "loader_rng": loader_state,
            "n_dataset": self.run.n_samples,
            "evaluations": [dataclasses.asdict(evaluated) for evaluated in self.evaluations],
        }
        if self.run.is_sharded:
            from fulltilt.engine.ranks.parallel import gather_state

            state = gather_state(state, keep=world.is_first)
        return state

    def restore(self, loaded: checkpoint.LoadedCheckpoint) -> None:
        """Go on from ``loaded``.

        Raises:
            RunFolderError: it is of another model, optimizer or data set.
        """
        state, setup = loaded.state, self.run.setup
        if state["n_dataset"] != self.run.n_samples:
            raise RunFolderError(
                f"{loaded.path} was trained on {state['n_dataset']} samples, the training set has "
                f"{self.run.n_samples} now; resume with the data of the start, or give another folder with --out"
            )
        was, now = state.get("placement", self.run.plan["placement"]), self.run.plan["placement"]
        if was != now and "block_shuffled" in (was, now):
            raise RunFolderError(
                f"{loaded.path} was trained with data.placement {was}, and {now} puts the samples in another order; "
                "resume with data.placement=auto, which keeps to it, or give another folder with --out"
            )
        divide, optimizer_state = None, state["optimizer"]
        if self.run.is_sharded:
            from fulltilt.engine.ranks.parallel import divide_like, divide_optimizer_state

            divide, optimizer_state = divide_like, divide_optimizer_state(setup.optimizer, optimizer_state)
        checkpoint.load_model_state(setup.model, state["model"], loaded.path, divide)
        checkpoint.load_part_state("optimizer", setup.optimizer, optimizer_state, loaded.path)
        if setup.scaler is not None and state["scaler"] is not None:
            checkpoint.load_part_state("scaler", setup.scaler, state["scaler"], loaded.path)
        if self.run.average is not None:
            checkpoint.load_part_state("average of the weights", self.run.average, state["average"], loaded.path)
        self.meter.load_state_dict(state["meter"])
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        if self.progress.samples_in_epoch and not self.meter.is_of(state["meter"]):
            self.progress.loss_only_epoch = self.progress.epoch
        if self.sizes is not None and isinstance(self.run.dataset, IterableDataset):
            self.progress.micro_in_epoch = -(-self.progress.samples_in_epoch // self.sizes.batch_size)
        self.watch.restart(state.get("interval_s", 0.0))
        self.last_step.keep()
        self.run.loader_generator.set_state(state["loader_rng"])
        self._restore_rng(state)
        self.evaluations = [Evaluated(**fields) for fields in state["evaluations"]]
        self.attempt = state["attempt"] + 1
        self.saved_position = self.position

    def _restore_rng(self, state: Mapping[str, Any]) -> None:
        """Each rank goes on with its own random numbers; one that was not there draws new ones."""
        rank, others = self.run.world.rank, state.get("rng_of_ranks", [])
        if rank <= len(others):
            self.restored_rng = others[rank - 1] if rank else state["rng"]
            return
        seed = compute_seed(self.run.seed, rank, self.progress.step)
        seed_everything(seed)
        self.run.generator.manual_seed(seed)


def assemble_session(run: Run, limits: Limits, folder: Path, *, training_metrics: bool) -> Session:
    """A session at the first step of ``run``, which was built from a configuration; it tells nobody anything yet."""
    assert run.config is not None
    progress = Progress()
    training_metrics = training_metrics or run.workload.training_metrics
    meter = LossMeter(run.device, run.workload.metrics if training_metrics else None, run.world)
    can_replan = limits.on_out_of_memory != "stop" and find_obstacle(run) is None
    return Session(
        run=run,
        step=build_step(run, observe=meter.observe if training_metrics and run.workload.metrics else None),
        learning_rate=_build_learning_rate(run.config, run, limits),
        progress=progress,
        meter=meter,
        watch=Stopwatch(progress),
        phase_sample=PhaseSample(run.device, limits.log_every, run.world.link),
        announce=Announcer(()),
        limits=limits,
        folder=folder,
        validation=build_validation_loader(run, batch_size=run.config.data.val_batch_size),
        last_step=LastStep(run.setup.model if can_replan and not run.world.is_divided else None),
        writer=BackgroundWriter() if run.config.run.async_checkpoint and run.world.is_first else None,
    )


def _build_learning_rate(config: Config, run: Run, limits: Limits) -> LearningRate:
    optim = config.optim
    # The schedule spans the epochs: max_steps is where to leave, not another recipe.
    total = run.steps_per_epoch * limits.n_epochs if run.steps_per_epoch else limits.max_steps
    if math.isinf(total):
        if optim.schedule != "constant" or optim.warmup:
            raise ConfigError(
                f"schedule {optim.schedule} with warm-up {optim.warmup} needs the length of the run, and streaming "
                "data has none; give max_steps, or schedule constant without warm-up",
                key="optim.schedule",
            )
        total = 1
    schedule = build_schedule(
        optim.schedule,
        total_steps=int(total),
        steps_per_epoch=run.steps_per_epoch or int(total),
        warmup=optim.warmup,
    )
    return LearningRate(run.setup.optimizer, schedule)
