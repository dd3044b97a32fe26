"""The training loop. Read from the top: ``train`` sets the stage, ``_train_epoch`` is the loop.

    for each epoch
        for each step       forward, backward, optimizer (step.py); count it; now and then log, evaluate, save
        evaluate, save      and tell the listeners (duties.py)

Nothing in a step waits for the device. The loss is summed there and read once per logging interval, one interval late.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fulltilt.config import Config
from fulltilt.engine import duties
from fulltilt.engine.duties import TrainResult
from fulltilt.engine.interrupt import Stop, catch_signals
from fulltilt.engine.launch import must_launch, train_in_ranks
from fulltilt.engine.session import Session, open_session
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

    Raises:
        NonFiniteLossError: the loss or a weight became NaN or infinite; the last checkpoint is from before that.
        RunFolderError: the folder is in use, of another run, or holds a checkpoint and ``resume`` is false.
        StorageError: no space for a checkpoint; the one before is kept.
        RankFailedError: a process of several died, hung or failed, and ``run.max_restarts`` did not help.
        KeyboardInterrupt: Ctrl-C, after the step in progress and a checkpoint. SIGTERM takes its course likewise.
    """
    if must_launch(config, device):
        given = {"resume": resume, "epochs": epochs, "device": device, "workload": workload}
        given |= {"max_steps": max_steps, "training_metrics": training_metrics}
        return train_in_ranks(config, out_dir=out_dir, listeners=listeners, **given)
    with (
        catch_signals() as stop,
        open_session(
            config,
            out_dir=Path(out_dir),
            listeners=listeners,
            resume=resume,
            epochs=epochs,
            device=device,
            workload=workload,
            max_steps=max_steps,
            training_metrics=training_metrics,
        ) as session,
    ):
        result = _run_session(session, session.run.world.agree_on(stop))
    stop.deliver()
    return result


def _run_session(s: Session, stop: Stop) -> TrainResult:
    reason = "interrupted"
    try:
        duties.announce_start(s)
        while s.progress.epoch < s.limits.n_epochs and _train_epoch(s, stop) and _finish_epoch(s, stop):
            pass
        duties.save(s)
        is_over = s.progress.epoch >= s.limits.n_epochs or s.progress.step >= s.limits.max_steps
        reason = "finished" if is_over else "interrupted"
    except Exception as error:  # told to the listeners, and raised again
        explained = duties.explain_error(s, error) or error
        reason = f"failed: {type(explained).__name__}: {explained}"
        if explained is not error:
            raise explained from error
        raise
    finally:
        duties.announce_end(s, reason)
    return duties.summarize(s, reason)


def _train_epoch(s: Session, stop: Stop) -> bool:
    """Train to the end of the epoch; False when the run has to be left before."""
    progress, limits, timer = s.progress, s.limits, s.timer
    s.watch.start()
    batches = s.start_epoch()
    while not limits.has_step_duties or _do_due_work(s, stop):
        if stop or (progress.step >= limits.max_steps and progress.step_in_epoch != s.run.steps_per_epoch):
            return False
        s.learning_rate.set_step(progress.step)
        outcome = s.step(batches, timer)
        if outcome is None:
            return True
        progress.count(outcome)
        s.meter.add(outcome.loss, outcome.n_samples)
        if progress.step % limits.log_every == 0:
            duties.log_interval(s)
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
