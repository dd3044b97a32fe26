"""Opens a run's folder and its session: built anew, from its newest checkpoint, or after memory ran out."""

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fulltilt.config import Config, plan_of
from fulltilt.data import GuardedLoader
from fulltilt.engine.announce import Announcer, describe_resume, is_out_of_memory, read_first_line
from fulltilt.engine.build.assemble import build_workload, describe_files
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.checkpoints import checkpoint
from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS, find_checkpoint
from fulltilt.engine.loop.endings import TRACEBACK
from fulltilt.engine.loop.limits import Limits
from fulltilt.engine.loop.promise import build_watch
from fulltilt.engine.loop.session import Restart, Session, build_session, plan_schedule
from fulltilt.engine.loop.sizes import Sizes, apply_sizes, leave_out_tail
from fulltilt.engine.ranks.world import World
from fulltilt.errors import (
    DeviceMemoryError,
    FulltiltError,
    OtherRunError,
    RunFolderError,
    UsageError,
    find_place,
    keep_traceback,
)
from fulltilt.hardware import describe_process_state
from fulltilt.levers import select_recipe
from fulltilt.records import Listener, RunEnded, dumps
from fulltilt.records.run_folder import FolderChoice, RunFolder, find_folders, write_atomic
from fulltilt.records.words import WORDS_FILE, WordTable
from fulltilt.tasks import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What ``train`` was asked for: the same for every attempt."""

    config: Config
    limits: Limits
    device: torch.device
    out_dir: Path
    listeners: Sequence[Listener]  # of the first rank
    resume: bool
    workload: Workload | None
    training_metrics: bool
    world: World


_RESULTS = (NEWEST, PREVIOUS)
_WRITES = ("events.jsonl", "steps.csv", "epochs.csv", "report.html")
_DATA_PATH = "data.path"
"""A part of the fingerprint: other data are another run, but one that goes on may find its own moved."""


def find_run_folders(usual: Path, config: Config, workload: Workload | None = None) -> FolderChoice:
    """Find the folder whose run ``config`` goes on with, and one for it to begin in."""
    parts = _describe_run(config, workload)
    claim: dict[str, Any] = {"command": "train", "results": _RESULTS, "writes": _WRITES}
    return find_folders(usual, fingerprint_parts=parts, aging=(_DATA_PATH,), **claim)


@contextlib.contextmanager
def open_folder(job: Job) -> Iterator[None]:
    """Own the folder of this run until the block ends. Of several ranks the first one does, and writes.

    Raises:
        RunFolderError: another process holds it, or it holds the results of another run.
    """
    with contextlib.ExitStack() as stack:
        if job.world.is_first:
            claim: dict[str, Any] = {"command": "train", "results": _RESULTS, "writes": _WRITES}
            parts = _describe_run(job.config, job.workload)
            try:
                folder = RunFolder(job.out_dir, fingerprint_parts=parts, moving=(_DATA_PATH,), **claim)
            except OtherRunError:  # another folder would not help where the data are wrong
                (job.workload or build_workload(job.config)).dataset()
                raise
            stack.enter_context(folder)
        yield


def keep_words(folder: Path, dataset: Any) -> None:
    """Keep the words of a text dataset beside the weights: the numbers of words are theirs.

    Raises:
        RunFolderError: the run began with other words.
        StorageError: they cannot be written.
    """
    table, path = getattr(dataset, "word_table", None), folder / WORDS_FILE
    if not isinstance(table, WordTable):
        return
    if WordTable.read(folder) not in (None, table):
        raise RunFolderError(
            f"{path} holds other words than the data now, and the weights know those; resume with the text that the "
            "run began with (Python's own documentation differs between its releases), or begin in another folder"
        )
    write_atomic(path, dumps(table))


@contextlib.contextmanager
def open_session(job: Job, after: Restart | None) -> Iterator[Session]:
    """Build the run, and restore its checkpoint when resuming.

    After an attempt that ran out of memory, listeners are told when no other one can follow it.

    Raises:
        UsageError: code of the model or the data called ``sys.exit``; and whatever else building raises.
    """
    with contextlib.ExitStack() as stack:
        try:
            session = _build(job, after, stack)
        except SystemExit as error:  # it would end the program, by 0 as if all were well
            raise UsageError(
                f"code of the model or the data called sys.exit({error.code!r}) as it was built"
            ) from error
        except Exception as error:  # told to the listeners, and raised again
            if job.world.is_first and find_place(error):
                error.add_note(keep_traceback(error, job.out_dir / TRACEBACK))
            if after is not None:
                announce = Announcer(job.listeners, attempt=after.attempt)
                reason = f"failed: {type(error).__name__}: {error}"
                seconds = time.perf_counter() - after.started_s
                announce(RunEnded, reason=reason, step=after.step, seconds=seconds, metrics=dict(after.metrics))
            raise
        yield session


def _build(job: Job, after: Restart | None, stack: contextlib.ExitStack) -> Session:
    """Build an attempt's session; its run is closed with ``stack``."""
    loaded = _find_start(job, resume=job.resume or after is not None)
    state = {} if loaded is None else loaded.state
    saved_sizes = Sizes(**state["sizes"]) if state.get("sizes") else None
    sizes = after.sizes if after is not None else saved_sizes
    run = stack.enter_context(_build_run(job, sizes, state.get("placement")))
    leave_out_tail(job.config, run, sizes)
    attempt = max(state["attempt"] + 1 if state else 0, after.attempt if after is not None else 0)
    promise, promise_note = build_watch(run)
    session = build_session(
        run,
        job.limits,
        job.out_dir,
        training_metrics=job.training_metrics,
        announce=Announcer(job.listeners, attempt=attempt),
        promise=promise,
        sizes=sizes,
        after=after,
    )
    watch_loaders(session)
    if loaded is not None:
        loaded = _restore(session, loaded)
    if run.world.link is not None:
        run.world.link.set_step(session.progress.step)
    notes = [promise_note]
    if after is not None:
        session.announce.notes += after.notes
    else:
        notes += _describe_start(session, loaded, job.resume)
    notes += [loaded.note] if loaded is not None else []
    run.notes += [note for note in notes if note]
    return session


def watch_loaders(s: Session) -> None:
    """Have both loaders of a run say why, when they wait long for a batch."""
    for split, loader in (("training", s.run.loader), ("validation", s.validation)):
        if isinstance(loader, GuardedLoader):
            # Not the session: the loader would keep it, and its model, until the collector comes by.
            loader.on_long_wait = functools.partial(_tell_long_wait, s.announce, split)


def _tell_long_wait(announce: Announcer, split: str, seconds: float, pids: Sequence[int], due_from: int | None) -> None:
    workers = "; ".join(
        f"data worker {number} of {len(pids)} (pid {pid}) {describe_process_state(pid)}"
        for number, pid in enumerate(pids, start=1)
    )
    due = "" if due_from is None else f"; the next one is due from data worker {due_from + 1}"
    said = (
        f"no {split} batch came for {seconds:.0f} s, and batches come in order: {workers}{due}; with data.num_workers "
        "0 the data set is read in the training process, where Ctrl-C shows the line"
    )
    announce.note(said, level="warning")
    if not announce.listeners:  # a rank that is not the first: its last words are told where it is found to hang
        print(said, file=sys.stderr, flush=True)


def _describe_start(s: Session, loaded: checkpoint.LoadedCheckpoint | None, resume: bool) -> Iterator[str]:
    """Say where the first attempt of a run starts, and which data it leaves out."""
    yield describe_files(s.run.config)
    if s.sizes is not None:
        cut = f"batch_size {s.sizes.batch_size} × accumulate {s.sizes.accumulate}"
        yield f"going on with {cut}: memory ran out earlier"
    if loaded is not None:
        yield describe_resume(s.progress.step, s.progress.epoch, s.limits.n_epochs, s.limits.max_steps)
        yield _describe_schedule(s, loaded.state.get("n_epochs"))
    elif resume:
        yield f"there is no checkpoint in {s.folder} yet: starting at the first step"


def _describe_schedule(s: Session, n_epochs_before: int | None) -> str:
    """Say what becomes of the learning rate where a run goes on with another number of epochs."""
    n_epochs, schedule, step = s.limits.n_epochs, s.run.config.optim.schedule, s.progress.step
    if n_epochs_before in (None, n_epochs) or not s.run.steps_per_epoch or s.is_over:
        return ""
    before = plan_schedule(s.run, dataclasses.replace(s.limits, n_epochs=n_epochs_before))
    compute_lr = s.learning_rate.compute_lr
    rates = f"{compute_lr(step):.3g} where it stood at {compute_lr(max(0, step - 1), before):.3g}"
    length = f"the run has {n_epochs} epochs, {n_epochs_before} when it was saved"
    last = min(n_epochs, n_epochs_before) * s.run.steps_per_epoch - 1
    if all(compute_lr(at, before) == compute_lr(at) for at in (step, max(step, last))):
        return f"{length}: schedule {schedule} does not depend on that, its learning rates stay"
    return (
        f"{length}: schedule {schedule} spans all {n_epochs} now, so the learning rate goes on at {rates}; another "
        f"folder (--out) trains {n_epochs} epochs from the start"
    )


def _restore(session: Session, loaded: checkpoint.LoadedCheckpoint) -> checkpoint.LoadedCheckpoint:
    """Restore ``loaded``, or the checkpoint before it where that one is of another model and this one is not."""
    try:
        session.restore(loaded)
        return loaded
    except checkpoint.OtherModelError as error:
        earlier = checkpoint.load_previous(session.folder) if loaded.path.name == NEWEST else None
        if earlier is None or earlier.state["sizes"] != loaded.state["sizes"]:
            raise
        try:
            session.restore(earlier)
        except RunFolderError:
            raise error from None
        if session.run.world.is_first:
            checkpoint.set_aside(session.folder)
        why = error.args[0].partition(";")[0]
        return dataclasses.replace(earlier, note=f"{why}; going on from {earlier.path.name}")


def _build_run(job: Job, sizes: Sizes | None, started_with: str | None) -> Run:
    """Build the run, before its first step.

    Raises:
        DeviceMemoryError: model, optimizer and data alone do not fit.
    """
    config = apply_sizes(job.config, sizes)
    try:
        return build_run(
            config,
            plan_of(config),
            device=job.device,
            workload=job.workload,
            strict=False,
            world=job.world,
            started_with=started_with,
        )
    except Exception as error:  # the boundary to the user's own model and data; all but one kind goes on as it is
        if isinstance(error, FulltiltError) or not is_out_of_memory(error):
            raise
        stream = "" if plan_of(config)["placement"] == "stream" else " data.placement stream,"
        raise DeviceMemoryError(
            f"out of memory on {job.device} before the first step, while building model and data "
            f"({read_first_line(error)}); use{stream} a smaller model or another device: a smaller batch would not help"
        ) from error


def _find_start(job: Job, *, resume: bool) -> checkpoint.LoadedCheckpoint | None:
    """Find the checkpoint to go on from. The first rank chooses it; the others read the same one."""
    out_dir, world = job.out_dir, job.world
    if not resume:
        if find_checkpoint(out_dir):
            raise RunFolderError(
                f"{out_dir} holds a checkpoint of this run; go on with --resume, or give another folder with --out"
            )
        return None
    loaded = checkpoint.load_checkpoint(out_dir, holds_lock=True) if world.is_first else None
    path = world.hand_out(None if loaded is None else loaded.path)
    if path is None or world.is_first:
        return loaded
    return checkpoint.LoadedCheckpoint(state=checkpoint.read_state(path), path=path, note=None)


def _describe_run(config: Config, workload: Workload | None) -> dict[str, Any]:
    """List what must stay the same when a run is resumed: what decides its losses.

    How long it trains, how often it logs and levers that trade speed and memory only may change.
    """
    values = config.to_values()
    path = values["data"].pop("path")
    values["data"].pop("on_bad_sample")  # a run that stopped at a bad sample may go on without it
    for name in ("shard", "static_graph"):  # how devices share the work
        values["speed"].pop(name)
    described = {"seed": config.run.seed, "workload": workload.name if workload else None}
    if path is not None:
        described[_DATA_PATH] = os.path.abspath(os.path.join(config.base_dir, path))
    return select_recipe(values) | described
