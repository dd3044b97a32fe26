"""What the training loop holds in its hands, how it is put together, and how it goes on from a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from fulltilt.config import Config, Interval, parse_interval, plan_of
from fulltilt.engine import checkpoint
from fulltilt.engine.announce import Announcer
from fulltilt.engine.build import Run, build_run, check_device
from fulltilt.engine.evaluate import build_validation_loader
from fulltilt.engine.phase_sample import PhaseSample
from fulltilt.engine.progress import LossMeter, Progress, Reading, Stopwatch
from fulltilt.engine.schedule import LearningRate, build_schedule
from fulltilt.engine.step import TrainStep
from fulltilt.errors import ConfigError, DeviceError, RunFolderError, UsageError
from fulltilt.levers import load_catalogue
from fulltilt.records import Evaluated, Listener
from fulltilt.records.run_folder import RunFolder
from fulltilt.tasks import Workload

RESULTS = (checkpoint.NEWEST, checkpoint.PREVIOUS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to train, and how often to say, evaluate and save."""

    n_epochs: int
    max_steps: float  # infinity: no limit
    log_every: int
    evaluate_every: Interval | None
    checkpoint_every: Interval | None

    @functools.cached_property
    def has_step_duties(self) -> bool:
        """Whether anything can fall due in the middle of an epoch; looked up at every step."""
        return any(
            every is not None and every.unit == "steps" for every in (self.evaluate_every, self.checkpoint_every)
        )

    def is_evaluation_due(self, *, steps: int = 0, epochs: int = 0) -> bool:
        """After so many steps, or epochs; the end of the last epoch is always evaluated, unless none is."""
        return _is_due(self.evaluate_every, steps, epochs) or (
            self.evaluate_every is not None and epochs == self.n_epochs
        )

    def is_checkpoint_due(self, *, steps: int = 0, epochs: int = 0) -> bool:
        return _is_due(self.checkpoint_every, steps, epochs)


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


@dataclasses.dataclass(kw_only=True)
class Session:
    """One run of the loop in ``train.py``; plain parts, no behaviour of their own but saving and restoring."""

    run: Run
    step: TrainStep
    learning_rate: LearningRate
    progress: Progress
    meter: LossMeter
    watch: Stopwatch
    phases: PhaseSample
    announce: Announcer
    limits: Limits
    folder: Path
    validation: DataLoader | None
    attempt: int = 0
    pending: OpenInterval | None = None
    evaluations: list[Evaluated] = dataclasses.field(default_factory=list)
    started_s: float = dataclasses.field(default_factory=time.perf_counter)
    loader_state: torch.Tensor | None = None  # of run.loader_generator when the epoch began
    restored_rng: Mapping[str, Any] | None = None
    saved_position: Position | None = None

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
            checkpoint.restore_rng(self.restored_rng, {"prepare": run.generator})
            self.restored_rng = None
        return batches

    def capture(self) -> dict[str, Any]:
        """Everything that a run in another process needs to go on from here; plain values and tensors."""
        setup = self.run.setup
        loader_state = self.loader_state if self.progress.step_in_epoch else self.run.loader_generator.get_state()
        return {
            "attempt": self.attempt,
            "progress": dataclasses.asdict(self.progress),
            "model": checkpoint.capture_model(setup.model),
            "optimizer": checkpoint.make_plain(setup.optimizer.state_dict(), "optimizer"),
            "scaler": setup.scaler.state_dict() if setup.scaler is not None else None,
            "meter": self.meter.state_dict(),
            "rng": checkpoint.capture_rng({"prepare": self.run.generator}),
            "loader_rng": loader_state,
            "n_dataset": self.run.n_samples,
            "evaluations": [dataclasses.asdict(evaluated) for evaluated in self.evaluations],
        }

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
        checkpoint.load_model_state(setup.model, state["model"], loaded.path)
        checkpoint.load_part_state("optimizer", setup.optimizer, state["optimizer"], loaded.path)
        if setup.scaler is not None and state["scaler"] is not None:
            checkpoint.load_part_state("scaler", setup.scaler, state["scaler"], loaded.path)
        self.meter.load_state_dict(state["meter"])
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        self.watch.restart()
        self.run.loader_generator.set_state(state["loader_rng"])
        self.restored_rng = state["rng"]
        self.evaluations = [Evaluated(**fields) for fields in state["evaluations"]]
        self.attempt = state["attempt"] + 1
        self.saved_position = self.position


@contextlib.contextmanager
def open_session(
    config: Config,
    *,
    out_dir: Path,
    listeners: Sequence[Listener],
    resume: bool,
    epochs: int | None,
    device: str | None,
    workload: Workload | None,
    max_steps: int | None,
    training_metrics: bool,
) -> Iterator[Session]:
    """Lock the folder, build the run, and restore its checkpoint when resuming."""
    limits = _read_limits(config, epochs, max_steps)
    parts = _describe_run(config, workload)
    chosen_device = check_device(
        choose_device(config, device)
    )  # first: a device that is not there leaves no folder behind
    with RunFolder(out_dir, fingerprint_parts=parts, command="train", results=RESULTS):
        loaded = _find_start(out_dir, resume)
        run = build_run(config, plan_of(config), device=chosen_device, workload=workload, strict=False)
        with run:
            session = _assemble(config, run, limits, out_dir, training_metrics)
            if loaded is not None:
                session.restore(loaded)
            session.announce = Announcer(listeners, attempt=session.attempt)
            if resume and loaded is None:
                run.notes.append(f"there is no checkpoint in {out_dir} yet: starting at the first step")
            elif loaded is not None and loaded.note:
                run.notes.append(loaded.note)
            yield session


def choose_device(config: Config, device: str | None = None) -> str:
    """The device that ``device``, else ``run.device``, names; ``auto`` is the first GPU or the CPU.

    Raises:
        DeviceError: several devices: one process trains on one.
    """
    wanted = config.run.device if device is None else device
    if isinstance(wanted, list):
        if len(wanted) != 1:
            raise DeviceError(f"run.device names {len(wanted)} GPUs, train uses one; give --device cuda:{wanted[0]}")
        wanted = wanted[0]
    if isinstance(wanted, int):
        return f"cuda:{wanted}"
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _assemble(config: Config, run: Run, limits: Limits, folder: Path, training_metrics: bool) -> Session:
    progress = Progress()
    training_metrics = training_metrics or run.workload.training_metrics
    meter = LossMeter(run.device, run.workload.metrics if training_metrics else None)
    return Session(
        run=run,
        step=TrainStep(run, observe=meter.observe if training_metrics and run.workload.metrics else None),
        learning_rate=_build_learning_rate(config, run, limits),
        progress=progress,
        meter=meter,
        watch=Stopwatch(progress),
        phases=PhaseSample(run.device, limits.log_every),
        announce=Announcer(()),
        limits=limits,
        folder=folder,
        validation=build_validation_loader(run, batch_size=config.data.val_batch_size),
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


def _is_due(every: Interval | None, steps: int, epochs: int) -> bool:
    count = 0 if every is None else steps if every.unit == "steps" else epochs
    return every is not None and count > 0 and count % every.count == 0


def _read_limits(config: Config, epochs: int | None, max_steps: int | None) -> Limits:
    n_epochs = config.run.epochs if epochs is None else epochs
    for name, value in (("epochs", n_epochs), ("max_steps", max_steps)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; at least 1 is needed")
    return Limits(
        n_epochs=n_epochs,
        max_steps=math.inf if max_steps is None else max_steps,
        log_every=config.run.log_every_n_steps,
        evaluate_every=parse_interval(config.run.evaluate_every),
        checkpoint_every=parse_interval(config.run.checkpoint_every),
    )


def _find_start(out_dir: Path, resume: bool) -> checkpoint.LoadedCheckpoint | None:
    if resume:
        return checkpoint.load_checkpoint(out_dir)
    if checkpoint.find_checkpoint(out_dir):
        raise RunFolderError(
            f"{out_dir} holds a checkpoint of this run; go on with --resume, or give another folder with --out"
        )
    return None


def _describe_run(config: Config, workload: Workload | None) -> dict[str, Any]:
    """What must stay the same when a run is resumed: what decides its losses.

    How long it trains, how often it logs, where the data lies and levers that trade speed and memory only may change.
    """
    values = config.to_values()
    values["data"].pop("path")
    for lever in load_catalogue().values():
        section, _, name = lever.key.rpartition(".")
        if set(lever.trades) <= {"speed", "memory"} and not lever.changes_recipe(values[section][name]):
            values[section].pop(name)
    parts = {name: values[name] for name in ("task", "model", "loss", "data", "optim", "speed")}
    return parts | {"seed": config.run.seed, "workload": workload.name if workload is not None else None}
