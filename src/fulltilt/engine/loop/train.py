"""The training loop. Read from the top: ``train`` sets the stage, ``_train_epoch`` is the loop.

    for each epoch
        for each step       forward, backward, optimizer (step.py); count it; now and then log, evaluate, save
        evaluate, save      and tell the listeners (duties.py)

Nothing in a step waits for the device. Losses stay there and are read once per logging interval, one interval late.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fulltilt.config import Config
from fulltilt.engine.build.builder import check_device
from fulltilt.engine.interrupt import Stop, StopRequest, catch_signals
from fulltilt.engine.loop import duties
from fulltilt.engine.loop.duties import TrainResult
from fulltilt.engine.loop.launch import must_launch, train_in_ranks
from fulltilt.engine.loop.limits import Limits, read_limits
from fulltilt.engine.loop.opening import open_folder, open_session
from fulltilt.engine.loop.replan import RankReplanError, Replan, build_rank_error, plan_replan
from fulltilt.engine.loop.saving import settle_checkpoint
from fulltilt.engine.loop.session import Restart, Session
from fulltilt.engine.ranks.world import join_world
from fulltilt.errors import UsageError
from fulltilt.measure import apply_memory_limit
from fulltilt.records import Listener
from fulltilt.tasks import Workload


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

    Where the configuration names several devices, one process a device is started, which runs this function too.

    Args:
        listeners: Called with every event, in order.
        resume: Go on from the checkpoint in ``out_dir``, if there is one.
        epochs: Instead of ``run.epochs``.
        device: Instead of ``run.device``.
        workload: Instead of what ``config`` names.
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
    limits = read_limits(config, epochs, max_steps)
    if must_launch(config, device):
        given = {"resume": resume, "epochs": epochs, "workload": workload, "max_steps": max_steps}
        given |= {"training_metrics": training_metrics, "memory_limit_bytes": memory_limit_bytes}
        return train_in_ranks(config, out_dir=out_dir, listeners=listeners, device=device, **given)
    return train_here(
        config,
        limits=limits,
        out_dir=Path(out_dir),
        listeners=listeners,
        resume=resume,
        device=device,
        workload=workload,
        training_metrics=training_metrics,
        memory_limit_bytes=memory_limit_bytes,
    )


def train_here(
    config: Config,
    *,
    limits: Limits,
    device: str | None,
    memory_limit_bytes: int | None,
    after: Restart | None = None,
    **options: Any,
) -> TrainResult:
    """``train`` in this process: the only one, or one of several ranks.

    Args:
        after: What a start of all ranks before this one came to.
        options: Of ``_run_attempt``.
    """
    world, name = join_world(config, device)
    chosen = check_device(name)  # first: a device that is not there leaves no folder behind
    if memory_limit_bytes is not None:
        apply_memory_limit(chosen, memory_limit_bytes)
    attempt = functools.partial(_run_attempt, config, limits=limits, device=chosen, world=world, **options)
    with catch_signals() as stop, open_folder(config, options["out_dir"], options["workload"], world):
        outcome = attempt(stop, after=after)
        while isinstance(outcome, Restart):
            outcome = attempt(stop, after=outcome)
    stop.deliver()
    return outcome


def _run_attempt(config: Config, stop: StopRequest, **options: Any) -> TrainResult | Restart:
    """One session; nothing of it is left when this returns, so that the next one has the memory for itself."""
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(open_session(config, **options))
        except Exception as error:  # told to the listeners, and raised again
            if options.get("after") is not None and options["world"].is_first:
                duties.announce_lost(options["after"], options["listeners"], error)
            raise
        return _run_session(session, session.run.world.agree_on(stop))


def _run_session(s: Session, stop: Stop) -> TrainResult | Restart:
    reason: str | None = "interrupted"
    try:
        replan = _train_to_end(s, stop)
        if replan is not None:
            restart = duties.prepare_restart(s, replan)
            reason = None  # it goes on
            return restart
        is_over = s.progress.epoch >= s.limits.n_epochs or s.progress.step >= s.limits.max_steps
        reason = "finished" if is_over else "interrupted"
    except SystemExit as error:  # of the user's model or data: it would end the program, by 0 as if all were well
        reason = f"failed: sys.exit({error.code!r}) was called"
        raise UsageError(
            f"code of the model or the data called sys.exit({error.code!r}) after step {s.progress.step}"
        ) from error
    except RankReplanError:  # the process that started the ranks tells how it goes on
        reason = None
        settle_checkpoint(s)
        raise
    except Exception as error:  # told to the listeners, and raised again
        explained = duties.explain_error(s, error) or error
        reason = f"failed: {type(explained).__name__}: {explained}"
        if explained is not error:
            raise explained from error
        raise
    finally:
        if reason is not None:
            duties.announce_end(s, reason)
    return duties.summarize(s, reason)


def _train_to_end(s: Session, stop: Stop) -> Replan | None:
    """None at the end of the run, or when a signal came; else how to go on after memory ran out."""
    try:
        duties.announce_start(s)
        while s.progress.epoch < s.limits.n_epochs and _train_epoch(s, stop) and _finish_epoch(s, stop):
            pass
        duties.save(s, is_last=True)
    except Exception as error:  # of whatever kind: only want of memory has an answer here
        replan = plan_replan(s, error)
        if replan is None:
            raise
        if s.run.world.is_divided:
            raise build_rank_error(s, replan) from error
        return replan
    return None


def _train_epoch(s: Session, stop: Stop) -> bool:
    """Train to the end of the epoch; False when the run has to be left before."""
    progress, limits, sample = s.progress, s.limits, s.phase_sample
    s.watch.start()
    batches = s.start_epoch()
    while not limits.has_step_duties or _do_due_work(s, stop):
        if stop or (progress.step >= limits.max_steps and progress.step_in_epoch != s.run.steps_per_epoch):
            return False
        s.learning_rate.set_step(progress.step)
        outcome = s.step(batches, sample.start_step(progress.step))
        if outcome is None:
            return True
        progress.count(outcome)
        s.last_step.keep()
        s.meter.add(outcome.loss, outcome.n_samples)
        if progress.step % limits.log_every == 0:
            sample.end_step(outcome.n_samples)
            duties.log_interval(s, has_phases=True)
    return False


def _do_due_work(s: Session, stop: Stop) -> bool:
    """What is due by a number of steps; False when a signal ended the evaluation."""
    progress, limits = s.progress, s.limits
    if limits.is_evaluation_due(steps=progress.step) and not duties.evaluate_once(s, stop):
        return False
    if limits.is_checkpoint_due(steps=progress.step):
        duties.save(s)
    return True


def _finish_epoch(s: Session, stop: Stop) -> bool:
    """Tell, evaluate, save; False when the run has to be left."""
    progress, limits = s.progress, s.limits
    n_done = progress.epoch + 1
    duties.announce_epoch(s)
    if limits.is_evaluation_due(epochs=n_done) and not duties.evaluate_once(s, stop):
        return False
    progress.next_epoch()
    if limits.is_checkpoint_due(epochs=n_done):
        duties.save(s)
    return not stop and progress.step < limits.max_steps
