"""The training loop. Read ``fit`` first: it holds both loops, over epochs and over optimizer steps.

No step waits for the device: losses stay there and are read once a logging interval, one interval late.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fulltilt.config import Config
from fulltilt.engine.announce import Announcer
from fulltilt.engine.build.builder import check_device
from fulltilt.engine.interrupt import SAID, Stop, catch_signals
from fulltilt.engine.loop import duties
from fulltilt.engine.loop.endings import TrainResult, finish, tell_failure
from fulltilt.engine.loop.launch import find_obstacle_to_leaving, give_back_memory, must_launch, train_in_ranks
from fulltilt.engine.loop.limits import read_limits
from fulltilt.engine.loop.opening import Job, keep_words, open_folder, open_session
from fulltilt.engine.loop.replan import plan_replan, prepare_restart
from fulltilt.engine.loop.session import Restart, Session
from fulltilt.engine.ranks.process import find_link
from fulltilt.engine.ranks.world import join_devices, plan_devices
from fulltilt.measure import apply_memory_limit
from fulltilt.records import Listener
from fulltilt.tasks import Workload


def fit(s: Session, stop: Stop) -> None:
    """Train until the last epoch has ended, ``max_steps`` are taken, or ``stop`` is true.

    ``s.step`` takes one optimizer step (``step/train_step.py``); ``duties`` is all that happens between steps.
    """
    progress, limits = s.progress, s.limits
    duties.announce_start(s)
    while progress.epoch < limits.n_epochs:
        s.watch.start()
        batches = s.start_epoch()
        while duties.may_step(s, stop):
            s.learning_rate.set_step(progress.step)
            outcome = s.step(batches, s.phase_sample.start_step(progress.step))
            if outcome is None:
                break  # the epoch is over
            progress.count(outcome)
            s.last_step.keep()
            s.watch.keep()
            s.meter.add(outcome.loss, outcome.n_samples)
            if progress.step % limits.log_every == 0:
                s.phase_sample.end_step(outcome.n_samples)
                duties.log_interval(s, has_phases=True)
        else:
            break  # the run is left in the middle of an epoch
        if not duties.finish_epoch(s, stop):
            break
    duties.save(s, is_last=True)


def train(
    config: Config,
    *,
    out_dir: str | Path,
    listeners: Sequence[Listener] = (),
    resume: bool = False,
    epochs: int | None = None,
    device: str | None = None,
    workload: Workload | None = None,
    max_steps: int | None = None,
    training_metrics: bool = False,
    memory_limit_bytes: int | None = None,
) -> TrainResult:
    """Train to the end, or to the first Ctrl-C or SIGTERM; the checkpoint in ``out_dir`` goes on from there.

    Where the configuration names several devices, one process a device is started, and each runs ``_train_as_rank``.

    Args:
        listeners: Called with every event, in order.
        resume: Go on from the checkpoint in ``out_dir``, if there is one.
        epochs, device, workload: Instead of what ``config`` says.
        max_steps: Leave after so many optimizer steps of the whole run. Schedules keep to the epochs.
        training_metrics: Compute the workload's metrics on training batches too; costs a few operators per step.
        memory_limit_bytes: What this process may use from now on: imitates a smaller card, or a smaller machine.

    Raises:
        NonFiniteLossError: the loss or a weight became NaN or infinite; the last checkpoint is from before that, and
            the batch is in ``nan_batch.pt``.
        DeviceMemoryError: memory ran out, and no smaller micro-batch is left (``replan.py``).
        RunFolderError: the folder is in use, of another run, or holds a checkpoint and ``resume`` is false.
        StorageError: no space for a checkpoint; the one before is kept.
        RankFailedError: a process of several died, hung or failed, and ``run.max_restarts`` did not help.
        KeyboardInterrupt: Ctrl-C, after the step in progress and a checkpoint. SIGTERM takes its course likewise.
    """
    read_limits(config, epochs, max_steps)  # for its error: before a device is asked for, or a process started
    kept = str(Path(out_dir).absolute())  # code of the model or the data may change the working folder
    given = {"out_dir": kept, "resume": resume, "epochs": epochs, "device": device, "max_steps": max_steps}
    given |= {"workload": workload, "training_metrics": training_metrics, "memory_limit_bytes": memory_limit_bytes}
    after = None
    if not must_launch(config, device):
        ended = _train_here(config, listeners=listeners, **given)
        if isinstance(ended, TrainResult):
            return ended
        after = ended
        give_back_memory()
    return train_in_ranks(_train_as_rank, config, listeners, {**given, "after": after})


def _train_here(
    config: Config,
    *,
    out_dir: str | Path,
    listeners: Sequence[Listener],
    resume: bool,
    epochs: int | None,
    device: str | None,
    workload: Workload | None,
    max_steps: int | None,
    training_metrics: bool,
    memory_limit_bytes: int | None,
    after: Restart | None = None,
) -> TrainResult | Restart:
    """Train in this process; where memory runs out, return what a fresh one goes on with.

    Args:
        after: What this process takes over from the one before it, which ran out of memory.
    """
    world, name = join_devices(plan_devices(config, device))
    chosen = check_device(name)  # first: a device that is not there leaves no folder behind
    if memory_limit_bytes is not None:
        apply_memory_limit(chosen, memory_limit_bytes)
    job = Job(
        config=config,
        limits=read_limits(config, epochs, max_steps),
        device=chosen,
        out_dir=Path(out_dir),
        listeners=listeners if world.is_first else (),
        resume=resume,
        workload=workload,
        training_metrics=training_metrics,
        world=world,
    )
    ended = _take_attempts(job, after)
    world.leave_at_exit()
    return ended


def _take_attempts(job: Job, after: Restart | None) -> TrainResult | Restart:
    """Train until an attempt ends otherwise than by a want of memory that smaller micro-batches answer here."""
    said = SAID if job.world.is_first and job.world.link is None else None  # else another process says it
    with catch_signals(said=said) as stop, open_folder(job):
        while True:
            with open_session(job, after) as session:
                if job.world.is_first:
                    keep_words(job.out_dir, session.run.dataset)
                with tell_failure(session):
                    after = _fit_or_replan(session, job.world.agree_on(stop))
                if after is None:
                    ended = finish(session)
                    break
            del session  # the next attempt has the memory for itself
            is_stopping = bool(job.world.agree_on(stop))  # then an attempt here has nothing to do but to say so
            if after.in_fresh_process and not is_stopping:
                obstacle = find_obstacle_to_leaving(job.workload)
                if obstacle is None:
                    ended = after
                    break
                after = _tell_stay(job, after, obstacle)
    stop.deliver()
    return ended


def _tell_stay(job: Job, after: Restart, obstacle: str) -> Restart:
    """Tell once a command why the run goes on where a library was refused memory."""
    announce = Announcer(job.listeners, attempt=after.attempt)
    announce.notes += after.notes
    announce.note_once(
        f"the run goes on in this process, where a library may fail again, as {obstacle}", level="warning"
    )
    return dataclasses.replace(after, notes=tuple(announce.notes))


def _fit_or_replan(s: Session, stop: Stop) -> Restart | None:
    """Run ``fit``; where memory ran out, return what the next attempt goes on with."""
    try:
        fit(s, stop)
    except Exception as error:  # of whatever kind: only want of memory has an answer here
        replan = plan_replan(s, error)
        if replan is None:
            raise
    else:
        return None
    return prepare_restart(s, replan)  # the error and its frames are gone here, and so is what they held of the device


def _train_as_rank(config: Config, **given: Any) -> TrainResult | Restart:
    """Train as a process that another one started; the first of several tells that one."""
    link = find_link()
    assert link is not None
    return _train_here(config, listeners=[link.send_event] if link.rank == 0 else (), **given)
