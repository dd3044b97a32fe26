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
from fulltilt.data.seeds import compute_seed
from fulltilt.engine import checkpoint
from fulltilt.engine.announce import Announcer, describe_resume
from fulltilt.engine.background import BackgroundWriter
from fulltilt.engine.build import Run, build_run, seed_everything
from fulltilt.engine.cached_step import build_step
from fulltilt.engine.evaluate import build_validation_loader
from fulltilt.engine.phase_sample import PhaseSample
from fulltilt.engine.progress import LossMeter, Progress, Reading, Stopwatch
from fulltilt.engine.promise import DataWaits, PromiseWatch, build_watch
from fulltilt.engine.rank_process import find_link
from fulltilt.engine.replan import LastStep, Sizes, apply_sizes, find_obstacle, is_out_of_memory, leave_out_tail
from fulltilt.engine.schedule import LearningRate, build_schedule
from fulltilt.engine.step import TrainStep
from fulltilt.engine.world import ALONE, World, plan_devices
from fulltilt.errors import ConfigError, DeviceMemoryError, FulltiltError, RunFolderError, UsageError
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
    on_out_of_memory: str = "replan"
    on_full_disk: str = "stop"

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
    data_waits: DataWaits = dataclasses.field(default_factory=DataWaits)
    promise: PromiseWatch | None = None

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
        return self.data_waits.count(batches) if self.promise is not None else batches

    def capture(self) -> dict[str, Any]:
        """Everything that a run in another process needs to go on from here; plain values and tensors.

        Of several ranks all have to call it, and the first one's has everything: it does not tell how many there were.
        """
        setup, world = self.run.setup, self.run.world
        loader_state = self.loader_state if self.progress.step_in_epoch else self.run.loader_generator.get_state()
        rng, *rng_of_ranks = world.collect(checkpoint.capture_rng({"prepare": self.run.generator}))
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
            from fulltilt.engine.parallel import gather_state

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
            from fulltilt.engine.parallel import divide_like, divide_optimizer_state

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


@contextlib.contextmanager
def open_folder(
    config: Config, out_dir: Path, workload: Workload | None, world: World = ALONE
) -> Iterator[RunFolder | None]:
    """The folder of this run, owned until the block ends. Of several ranks the first one owns it, and writes.

    Raises:
        RunFolderError: another process holds it, or it holds the results of another run.
    """
    if not world.is_first:
        yield None
        return
    with RunFolder(
        out_dir, fingerprint_parts=_describe_run(config, workload), command="train", results=RESULTS
    ) as folder:
        yield folder


@contextlib.contextmanager
def open_session(
    config: Config,
    *,
    limits: Limits,
    device: torch.device,
    out_dir: Path,
    listeners: Sequence[Listener],
    resume: bool,
    workload: Workload | None,
    training_metrics: bool,
    after: Restart | None = None,
    world: World = ALONE,
) -> Iterator[Session]:
    """Build the run, and restore its checkpoint when resuming.

    Args:
        after: The attempt before this one, which ran out of memory.
    """
    loaded = _find_start(out_dir, resume or after is not None, world)
    sizes = after.sizes if after is not None else None
    if sizes is None and loaded is not None and loaded.state.get("sizes"):
        sizes = Sizes(**loaded.state["sizes"])
    started_with = None if loaded is None else loaded.state.get("placement", "stream")
    run = _build(apply_sizes(config, sizes), device, workload, world, started_with)
    with run:
        leave_out_tail(config, run, sizes)
        session = assemble_session(run, limits, out_dir, training_metrics=training_metrics)
        session.sizes = sizes
        if loaded is not None:
            session.restore(loaded)
            session.first_step = session.progress.step
        if after is not None:
            session.attempt = max(session.attempt, after.attempt)
            session.started_s, session.n_replans = after.started_s, after.n_replans
        if (link := find_link()) is not None:
            link.set_step(session.progress.step)
        session.announce = Announcer(listeners if world.is_first else (), attempt=session.attempt)
        session.promise, missing = build_watch(run, session.data_waits)
        run.notes += [missing] if missing else []
        if after is not None:
            session.announce.notes += after.notes
        elif sizes is not None:
            run.notes.append(
                f"going on with batch_size {sizes.batch_size} × accumulate {sizes.accumulate}: memory ran out earlier"
            )
        if loaded is not None and after is None:
            at = session.progress
            run.notes.append(describe_resume(at.step, at.epoch, limits.n_epochs, limits.max_steps))
        if loaded is not None and loaded.note:
            run.notes.append(loaded.note)
        elif resume and loaded is None and after is None:
            run.notes.append(f"there is no checkpoint in {out_dir} yet: starting at the first step")
        yield session


def _build(
    config: Config, device: torch.device, workload: Workload | None, world: World, started_with: str | None
) -> Run:
    """The run, before its first step.

    Raises:
        DeviceMemoryError: model, optimizer and data alone do not fit.
    """
    try:
        return build_run(
            config,
            plan_of(config),
            device=device,
            workload=workload,
            strict=False,
            world=world,
            started_with=started_with,
        )
    except Exception as error:  # the boundary to the user's own model and data; all but one kind goes on as it is
        if isinstance(error, FulltiltError) or not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"out of memory on {device} before the first step, while building model and data ({error}); use a smaller "
            "model, data.placement stream or another device: a smaller batch would not help"
        ) from error


def choose_device(config: Config, device: str | None = None) -> str:
    """The first device that ``device``, else ``run.device``, names; ``auto`` is the first GPU or the CPU."""
    return plan_devices(config, device)[0]


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
        phase_sample=PhaseSample(run.device, limits.log_every, find_link()),
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


def _is_due(every: Interval | None, steps: int, epochs: int) -> bool:
    count = 0 if every is None else steps if every.unit == "steps" else epochs
    return every is not None and count > 0 and count % every.count == 0


def read_limits(config: Config, epochs: int | None, max_steps: int | None) -> Limits:
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
        on_out_of_memory=config.run.on_out_of_memory,
        on_full_disk=config.run.on_full_disk,
    )


def _find_start(out_dir: Path, resume: bool, world: World) -> checkpoint.LoadedCheckpoint | None:
    """The checkpoint to go on from. The first rank chooses it; the others read the same one."""
    if resume:
        loaded = checkpoint.load_checkpoint(out_dir) if world.is_first else None
        path = world.hand_out(None if loaded is None else loaded.path)
        if path is None or world.is_first:
            return loaded
        return checkpoint.LoadedCheckpoint(state=checkpoint.read_state(path), path=path, note=None)
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
    for name in ("shard", "static_graph"):  # how devices share the work
        values["speed"].pop(name)
    values["data"].pop("on_bad_sample")  # a run that stopped at a bad sample may go on without it
    for lever in load_catalogue().values():
        section, _, name = lever.key.rpartition(".")
        if set(lever.trades) <= {"speed", "memory"} and not lever.changes_recipe(values[section][name]):
            values[section].pop(name)
    parts = {name: values[name] for name in ("task", "model", "loss", "data", "optim", "speed")}
    return parts | {"seed": config.run.seed, "workload": workload.name if workload is not None else None}
