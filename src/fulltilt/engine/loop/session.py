"""``Session``: the parts of a training run that the loop works with, and how their state is saved and restored."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

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
from fulltilt.engine.step.schedule import LearningRate, Schedule, build_schedule
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
    """What an attempt takes over from the one before, which ran out of memory; the rest is in the checkpoint."""

    sizes: Sizes
    reason: str  # what ran out of memory, in a sentence
    n_replans: int  # how often this command has gone on with smaller batches
    attempt: int  # its number at least
    started_s: float  # when the first attempt began, by ``time.perf_counter``
    step: int  # where the run stands, should the attempt not even begin; with the metrics there
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    in_fresh_process: bool = False  # where that can be: this one was refused memory in the middle of some library


@dataclasses.dataclass(kw_only=True)
class Session:
    """One attempt to train ``run``. ``build_session`` makes it complete, at the first step."""

    run: Run
    limits: Limits
    folder: Path
    announce: Announcer
    step: TrainStep
    learning_rate: LearningRate
    progress: Progress
    meter: LossMeter
    watch: Stopwatch
    phase_sample: PhaseSample
    validation: DataLoader | None
    last_step: LastStep
    writer: BackgroundWriter | None  # with run.async_checkpoint
    promise: PromiseWatch | None
    sizes: Sizes | None  # instead of the configuration's, after a replan
    n_replans: int  # of this command
    started_s: float  # of its first attempt
    # What changes while it trains, beside the parts themselves:
    first_step: int = 0  # of the checkpoint that it went on from
    evaluations: list[Evaluated] = dataclasses.field(default_factory=list)
    pending: OpenInterval | None = None
    loader_state: torch.Tensor | None = None  # of run.loader_generator when the epoch began
    epoch_rng: Mapping[str, Any] | None = None  # the global generators as the epoch began; of a stream only
    restored_rng: Mapping[str, Any] | None = None  # until the epoch goes on
    saved_position: Position | None = None  # of the newest checkpoint
    writing_position: Position | None = None  # of the one that is being written

    @property
    def seconds(self) -> float:
        """Seconds since the first attempt of this process began."""
        return time.perf_counter() - self.started_s

    @property
    def last_metrics(self) -> dict[str, float]:
        return dict(self.evaluations[-1].metrics) if self.evaluations else {}

    @property
    def position(self) -> Position:
        return Position(self.progress.epoch, self.progress.step, self.progress.evaluated_step)

    @property
    def is_over(self) -> bool:
        """Whether the run has trained for as long as it was asked to."""
        return self.progress.epoch >= self.limits.n_epochs or self.progress.step >= self.limits.max_steps

    def start_epoch(self) -> Iterator[Any]:
        """Return the batches from where the epoch was left, with the random generators as they were there."""
        self.loader_state = self.run.loader_generator.get_state()
        at, restored, generators = self.progress, self.restored_rng, {"prepare": self.run.generator}
        is_stream = isinstance(self.run.dataset, IterableDataset)
        if is_stream:  # without workers it draws from the global generators, some as it begins
            if restored is not None:
                restore_rng(restored.get("epoch") or restored, generators)
            self.epoch_rng = capture_rng({})
        batches = skip_to(self.run, at.epoch, at.samples_in_epoch, at.micro_in_epoch)
        if restored is not None and (at.micro_in_epoch or not is_stream):
            restore_rng(restored, generators)
        self.restored_rng = None
        return batches

    def capture(self) -> dict[str, Any]:
        """Collect all that a run in another process needs to go on from here, in plain values and tensors.

        Every rank has to call it; what the first one gets is complete, and the same for any number of ranks.
        """
        run, setup, world = self.run, self.run.setup, self.run.world
        own_rng = capture_rng({"prepare": run.generator})
        own_rng["epoch"] = self.epoch_rng if self.progress.step_in_epoch else None
        rng, *rng_of_ranks = world.collect(own_rng)
        state = {
            "attempt": self.announce.attempt,
            "config_digest": run.config.digest,
            "sizes": dataclasses.asdict(self.sizes) if self.sizes is not None else None,
            "placement": run.plan["placement"],
            "progress": dataclasses.asdict(self.progress),
            "model": checkpoint.capture_model(setup.model),
            "optimizer": checkpoint.make_plain(setup.optimizer.state_dict(), "optimizer"),
            "scaler": setup.scaler.state_dict() if setup.scaler is not None else None,
            "average": None if run.average is None else run.average.state_dict(),
            "meter": self.meter.state_dict(),
            "interval_s": self.watch.interval_s,
            "rng": rng,
            "rng_of_ranks": rng_of_ranks,
            "loader_rng": self.loader_state if self.progress.step_in_epoch else run.loader_generator.get_state(),
            "n_dataset": run.n_samples,
            "n_epochs": self.limits.n_epochs,
            # Their epochs count from 0 here, as in checkpoints of earlier versions.
            "evaluations": [{**dataclasses.asdict(each), "epoch": each.epoch - 1} for each in self.evaluations],
        }
        if run.is_sharded:
            from fulltilt.engine.ranks.parallel import gather_state

            state = gather_state(state, keep=world.is_first)
        return state

    def restore(self, loaded: checkpoint.LoadedCheckpoint) -> None:
        """Bring every part to where ``loaded`` was written.

        Raises:
            RunFolderError: it is of another model, optimizer or data set.
        """
        run, setup, state, path = self.run, self.run.setup, loaded.state, loaded.path
        _check_data(run, loaded)
        divide, optimizer_state = None, state["optimizer"]
        if run.is_sharded:
            from fulltilt.engine.ranks.parallel import divide_like, divide_optimizer_state

            divide, optimizer_state = divide_like, divide_optimizer_state(setup.optimizer, optimizer_state)
        checkpoint.load_model_state(setup.model, state["model"], path, divide)
        parts = {"optimizer": (setup.optimizer, optimizer_state), "scaler": (setup.scaler, state["scaler"])}
        parts["average of the weights"] = run.average, state["average"]
        for name, (part, saved) in parts.items():
            if part is not None and (saved is not None or name != "scaler"):
                checkpoint.load_part_state(name, part, saved, path)
        self.meter.load_state_dict(state["meter"])
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        if self.progress.samples_in_epoch and not self.meter.is_of(state["meter"]):
            self.progress.loss_only_epoch = self.progress.epoch
        if self.sizes is not None and isinstance(run.dataset, IterableDataset):
            self.progress.micro_in_epoch = -(-self.progress.samples_in_epoch // self.sizes.batch_size)
        self.watch.interval_s = state["interval_s"]
        self.last_step.keep()
        run.loader_generator.set_state(state["loader_rng"])
        self._restore_rng(state)
        self.evaluations = [Evaluated(**{**each, "epoch": each["epoch"] + 1}) for each in state["evaluations"]]
        self.first_step, self.saved_position = self.progress.step, self.position

    def _restore_rng(self, state: Mapping[str, Any]) -> None:
        """Give each rank its own random numbers back; one that was not there draws new ones."""
        rank, states = self.run.world.rank, [state["rng"], *state["rng_of_ranks"]]
        if rank < len(states):
            self.restored_rng = states[rank]
            return
        seed = compute_seed(self.run.seed, rank, self.progress.step)
        seed_everything(seed)
        self.run.generator.manual_seed(seed)


def build_session(
    run: Run,
    limits: Limits,
    folder: Path,
    *,
    training_metrics: bool = False,
    announce: Announcer | None = None,
    promise: PromiseWatch | None = None,
    sizes: Sizes | None = None,
    after: Restart | None = None,
) -> Session:
    """Build the session of a run that was built from a configuration, at its first step.

    Args:
        announce: None: it tells nobody anything.
    """
    progress = Progress()
    with_metrics = (training_metrics or run.workload.training_metrics) and bool(run.workload.metrics)
    meter = LossMeter(run.device, run.workload.metrics if with_metrics else None, run.world)
    can_replan = limits.on_out_of_memory != "stop" and find_obstacle(run) is None
    return Session(
        run=run,
        limits=limits,
        folder=folder,
        announce=announce or Announcer(()),
        step=build_step(run, observe=meter.observe if with_metrics else None),
        learning_rate=LearningRate(run.setup.optimizer, plan_schedule(run, limits, run.notes)),
        progress=progress,
        meter=meter,
        watch=Stopwatch(progress),
        phase_sample=PhaseSample(run.device, limits.log_every, run.world.link),
        validation=build_validation_loader(run, batch_size=run.config.data.val_batch_size),
        last_step=LastStep(run.setup.model if can_replan and not run.world.is_divided else None),
        writer=BackgroundWriter() if run.config.run.async_checkpoint and run.world.is_first else None,
        promise=promise,
        sizes=sizes,
        n_replans=after.n_replans if after is not None else 0,
        started_s=after.started_s if after is not None else time.perf_counter(),
    )


def skip_to(run: Run, epoch: int, n_samples: int, n_micro: int) -> Iterator[Any]:
    """Return the batches of an epoch after so many samples; a stream cannot jump, and passes over its batches."""
    if not isinstance(run.dataset, IterableDataset):
        return run.start_epoch(epoch, n_samples)
    batches = run.start_epoch(epoch)
    for _ in range(n_micro):
        next(batches, None)
    return batches


def _check_data(run: Run, loaded: checkpoint.LoadedCheckpoint) -> None:
    """Refuse a checkpoint of other samples, or of another order of them."""
    state = loaded.state
    if state["n_dataset"] != run.n_samples:
        raise RunFolderError(
            f"{loaded.path} was trained on {state['n_dataset']} samples, the training set has {run.n_samples} now; "
            "resume with the data of the start, or give another folder with --out"
        )
    was, now = state["placement"], run.plan["placement"]
    if was != now and "block_shuffled" in (was, now):
        raise RunFolderError(
            f"{loaded.path} was trained with data.placement {was}, and {now} puts the samples in another order; "
            "resume with data.placement=auto, which keeps to it, or give another folder with --out"
        )


def plan_schedule(run: Run, limits: Limits, notes: list[str] | None = None) -> Schedule:
    """Build the learning-rate schedule over the epochs of ``limits``; ``notes`` gets what was shortened.

    Raises:
        ConfigError: it needs a length, and streaming data has none.
    """
    optim = run.config.optim
    # The schedule spans the epochs: max_steps is where to leave, not another recipe.
    total = run.steps_per_epoch * limits.n_epochs if run.steps_per_epoch else limits.max_steps
    if math.isinf(total):
        if optim.schedule != "constant" or optim.warmup:
            raise ConfigError(
                f"schedule {optim.schedule} with warm-up {optim.warmup} needs the length of the run, and streaming "
                "data has none; use schedule constant without warm-up, or in Python train(…, max_steps=N) of "
                "fulltilt.engine.loop.train",
                key="optim.schedule",
            )
        total = 1
    n_steps = int(total)
    per_epoch = run.steps_per_epoch or n_steps
    lengths = {"total_steps": n_steps, "steps_per_epoch": per_epoch}
    return build_schedule(optim.schedule, **lengths, warmup=optim.warmup, notes=notes)
