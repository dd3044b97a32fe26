"""Opens a run's folder and its session: built anew, from its newest checkpoint, or after memory ran out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fulltilt.config import Config, plan_of
from fulltilt.engine.announce import Announcer, describe_resume
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.checkpoints import checkpoint
from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS, find_checkpoint
from fulltilt.engine.loop.endings import announce_lost
from fulltilt.engine.loop.limits import Limits
from fulltilt.engine.loop.long_wait import watch_loaders
from fulltilt.engine.loop.promise import build_watch
from fulltilt.engine.loop.replan import is_out_of_memory
from fulltilt.engine.loop.session import Restart, Session, assemble_session
from fulltilt.engine.loop.sizes import Sizes, apply_sizes, leave_out_tail
from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.errors import DeviceMemoryError, FulltiltError, RunFolderError
from fulltilt.levers import load_catalogue
from fulltilt.records import Listener
from fulltilt.records.run_folder import RunFolder
from fulltilt.tasks import Workload

RESULTS = (NEWEST, PREVIOUS)


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
        after: The attempt before this one, which ran out of memory. Listeners are told when no other can follow it.
    """
    with contextlib.ExitStack() as stack:
        try:
            loaded = _find_start(out_dir, resume or after is not None, world)
            sizes = after.sizes if after is not None else None
            if sizes is None and loaded is not None and loaded.state.get("sizes"):
                sizes = Sizes(**loaded.state["sizes"])
            started_with = None if loaded is None else loaded.state.get("placement", "stream")
            run = stack.enter_context(_build(apply_sizes(config, sizes), device, workload, world, started_with))
            leave_out_tail(config, run, sizes)
            session = assemble_session(run, limits, out_dir, training_metrics=training_metrics)
            session.sizes = sizes
            if loaded is not None:
                loaded = _restore(session, loaded, out_dir)
                session.first_step = session.progress.step
            if after is not None:
                session.attempt = max(session.attempt, after.attempt)
                session.started_s, session.n_replans = after.started_s, after.n_replans
            if world.link is not None:
                world.link.set_step(session.progress.step)
            session.announce = Announcer(listeners if world.is_first else (), attempt=session.attempt)
            watch_loaders(session)
            session.promise, note = build_watch(run)
            run.notes += [note] if note else []
            if after is not None:
                session.announce.notes += after.notes
            else:
                run.notes += _describe_start(session, loaded, resume)
            if loaded is not None and loaded.note:
                run.notes.append(loaded.note)
        except Exception as error:  # told to the listeners, and raised again
            if after is not None and world.is_first:
                announce_lost(after, listeners, error)
            raise
        yield session


def _describe_start(s: Session, loaded: checkpoint.LoadedCheckpoint | None, resume: bool) -> Iterator[str]:
    """Say where a run starts, of its first attempt."""
    if s.sizes is not None:
        yield (
            f"going on with batch_size {s.sizes.batch_size} × accumulate {s.sizes.accumulate}: memory ran out earlier"
        )
    if loaded is not None:
        yield describe_resume(s.progress.step, s.progress.epoch, s.limits.n_epochs, s.limits.max_steps)
    elif resume:
        yield f"there is no checkpoint in {s.folder} yet: starting at the first step"


def _restore(session: Session, loaded: checkpoint.LoadedCheckpoint, out_dir: Path) -> checkpoint.LoadedCheckpoint:
    """Restore ``loaded``, or the checkpoint before it where that one is of another model and this one is not."""
    try:
        session.restore(loaded)
    except checkpoint.OtherModelError as error:
        if loaded.path.name != NEWEST:
            raise
        earlier = checkpoint.load_previous(out_dir)
        if earlier is None or earlier.state.get("sizes") != loaded.state.get("sizes"):
            raise
        try:
            session.restore(earlier)
        except RunFolderError:
            raise error from None
        if session.run.world.is_first:
            checkpoint.set_aside(out_dir)
        return dataclasses.replace(
            earlier, note=f"{error.args[0].partition(';')[0]}; going on from {earlier.path.name}"
        )
    return loaded


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


def _find_start(out_dir: Path, resume: bool, world: World) -> checkpoint.LoadedCheckpoint | None:
    """The checkpoint to go on from. The first rank chooses it; the others read the same one."""
    if resume:
        loaded = checkpoint.load_checkpoint(out_dir, holds_lock=True) if world.is_first else None
        path = world.hand_out(None if loaded is None else loaded.path)
        if path is None or world.is_first:
            return loaded
        return checkpoint.LoadedCheckpoint(state=checkpoint.read_state(path), path=path, note=None)
    if find_checkpoint(out_dir):
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
