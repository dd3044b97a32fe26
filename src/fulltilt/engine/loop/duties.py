"""What the loop does beside training: log, evaluate, save, tell. None of it happens inside a step."""

import contextlib
import math
import os
import time

import torch

from fulltilt.engine.announce import is_out_of_memory
from fulltilt.engine.build.budget import estimate_host_budget
from fulltilt.engine.build.startup import describe_start
from fulltilt.engine.interrupt import Stop
from fulltilt.engine.loop.bad_batch import describe_loss, find_bad_step, save_bad_batch, suggest_stability
from fulltilt.engine.loop.evaluate import add_derived, evaluate
from fulltilt.engine.loop.saving import collect_checkpoint, describe_saved, save_session, settle_checkpoint
from fulltilt.engine.loop.session import OpenInterval, Session
from fulltilt.errors import NonFiniteLossError, StorageError
from fulltilt.records import EpochDone, Evaluated, RunStarted, StepsDone


def announce_start(s: Session) -> None:
    """Tell what will be trained and on what, and what the user should know of it."""
    run, config = s.run, s.run.config
    budget = estimate_host_budget(run)
    s.announce(
        RunStarted,
        name=config.run.name or run.workload.name,
        out_dir=str(s.folder),
        device=str(run.device),
        plan=run.plan.to_json(),
        n_parameters=sum(p.numel() for p in run.setup.model.parameters()),
        n_samples=run.n_samples,
        steps_per_epoch=run.steps_per_epoch,
        n_epochs=s.limits.n_epochs,
        first_epoch=s.progress.epoch + 1,
        first_step=s.progress.step,
        config=config.to_values(),
        config_digest=config.digest,
        n_ranks=run.world.n_ranks,
        pid=os.getpid(),
        report=describe_start(run, budget),
    )
    if budget is not None and (problem := budget.find_problem()):
        s.announce.note_once(problem, level="warning")
    for note in run.notes:
        s.announce.note_once(note)


def may_step(s: Session, stop: Stop) -> bool:
    """Do what falls due by a number of steps; false when the run has to be left before another one."""
    progress, limits = s.progress, s.limits
    if limits.has_step_duties:
        if limits.is_evaluation_due(steps=progress.step) and not evaluate_once(s, stop):
            return False
        if limits.is_checkpoint_due(steps=progress.step):
            save(s)
    return not stop and (progress.step < limits.max_steps or progress.step_in_epoch == s.run.steps_per_epoch)


def log_interval(s: Session, *, has_phases: bool = False) -> None:
    """Close the logging interval: its sums start on their way to the host, those of the one before are told.

    Args:
        has_phases: Its last step was timed by phase; one that an epoch's end cuts short has no such step.
    """
    if s.meter.n_steps == 0:
        return
    at = s.progress
    lr = s.learning_rate.compute_lr(at.step - 1)
    reading, seconds = s.meter.take(), s.watch.take_interval()
    flush_log(s)
    s.pending = OpenInterval(reading, seconds, lr, at.epoch + 1, at.step, at.step_in_epoch, has_phases)
    if s.writer is not None and s.writer.is_done:
        collect_checkpoint(s)


def flush_log(s: Session) -> None:
    """Read the interval that is on its way, and tell it.

    Raises:
        NonFiniteLossError: its loss is NaN or infinite.

    Device: waits for the interval's last step, not for what was queued after it.
    """
    if s.pending is None:
        return
    interval, s.pending = s.pending, None
    reading, seconds = interval.reading, interval.seconds
    sums, epoch_sums = reading.read_sums(), s.progress.epoch_sums
    phases_ms = s.phase_sample.take_ms() if interval.has_phases else {}
    loss = sums["loss"] / reading.n_samples
    if not math.isfinite(loss):
        raise _build_non_finite_error(s, loss, interval)
    for name, total in sums.items():
        epoch_sums[name] = epoch_sums.get(name, 0.0) + total
    if s.promise is not None and (message := s.promise.observe(reading.n_samples, seconds)):
        s.announce.note(message, level="warning")
    s.announce(
        StepsDone,
        epoch=interval.epoch,
        step=interval.step,
        step_in_epoch=interval.step_in_epoch,
        n_steps=reading.n_steps,
        n_samples=reading.n_samples,
        seconds=seconds,
        loss=loss,
        lr=interval.lr,
        samples_per_s=reading.n_samples / seconds if seconds > 0 else 0.0,
        phases_ms=phases_ms,
    )


def finish_epoch(s: Session, stop: Stop) -> bool:
    """Tell, evaluate, save; false when the run has to be left."""
    progress, limits = s.progress, s.limits
    n_done = progress.epoch + 1
    if not progress.is_epoch_announced:  # else it was resumed before this epoch's evaluation
        _announce_epoch(s)
    if limits.is_evaluation_due(epochs=n_done) and not evaluate_once(s, stop):
        return False
    progress.next_epoch()
    if limits.is_checkpoint_due(epochs=n_done):
        save(s)
    return not stop and progress.step < limits.max_steps


def evaluate_once(s: Session, stop: Stop) -> bool:
    """Evaluate and tell, unless this step has been; false when a signal ended it.

    Without a validation set, and nothing that the workload assesses by itself, there is nothing to do.
    """
    progress = s.progress
    has_nothing = s.validation is None and s.run.workload.assess is None
    if has_nothing or progress.evaluated_step == progress.step:
        return True
    flush_log(s)
    if s.run.device.type == "cuda":
        torch.cuda.synchronize(s.run.device)  # steps still queued are training time, not evaluation
    s.watch.stop()
    began_s = time.perf_counter()
    try:
        metrics = evaluate(s.run, s.validation, should_stop=stop.__bool__)
    except Exception as error:  # whatever the user's code raises: what was trained before it is kept
        if not s.run.world.is_divided and not is_out_of_memory(error):  # ranks would have to fail alike
            with contextlib.suppress(StorageError):  # the first error says more
                save(s)
        raise
    if metrics is None:
        return False
    progress.evaluated_step = progress.step
    means = [name for name in ("loss", *s.run.workload.metrics) if not math.isfinite(metrics.get(name, 0.0))]
    for name in means[:1] if means[:1] == ["loss"] else means:  # figures that follow from the loss say the same
        s.announce.note_once(
            f"the validation {name} is {metrics[name]}; look for values that are not finite in the validation set, and "
            "for a layer that differs in evaluation mode",
            level="warning",
        )
    _tell_late_notes(s)
    evaluated = s.announce(
        Evaluated,
        epoch=progress.epoch + 1,
        step=progress.step,
        split="val",
        metrics=metrics,
        seconds=time.perf_counter() - began_s,
        training_seconds=progress.training_seconds,
    )
    s.evaluations.append(evaluated)
    s.watch.start()
    return True


def save(s: Session, *, is_last: bool = False) -> None:
    """Write a checkpoint, unless this position is saved already; with ``run.async_checkpoint`` beside training.

    After the last one nothing follows: its file is whole when this returns, and a full disk is an error in any case.

    Raises:
        StorageError: no space; the checkpoint before is kept.
        NonFiniteLossError: the loss or a weight is NaN or infinite; nothing is written.
    """
    flush_log(s)
    save_session(s, is_last=is_last)


def _announce_epoch(s: Session) -> None:
    progress = s.progress
    if progress.step_in_epoch == 0:
        raise s.run.build_empty_error(progress.epoch + 1)
    log_interval(s)
    flush_log(s)
    s.watch.read()
    _tell_late_notes(s)
    means = progress.compute_epoch_means()
    try:
        means = means and add_derived(s.run.workload, means)
    except KeyError as error:
        s.announce.note_once(
            f"training has no {error} for derive of {s.run.workload.name}: its figures come of evaluations alone"
        )
    progress.last_loss = means.pop("loss", progress.last_loss)
    progress.is_epoch_announced = True
    seconds = progress.epoch_seconds
    s.announce(
        EpochDone,
        epoch=progress.epoch + 1,
        step=progress.step,
        loss=progress.last_loss,
        metrics=means,
        seconds=seconds,
        samples_per_s=progress.samples_in_epoch / seconds if seconds > 0 else 0.0,
    )


def _tell_late_notes(s: Session) -> None:
    """Tell what came up since the last time: a fallback taken in a step, samples that could not be read."""
    notes = list(s.run.notes)
    for split, loader in (("training", s.run.loader), ("validation", s.validation)):
        bad_samples = getattr(getattr(loader, "dataset", None), "bad_samples", None)
        if bad_samples is not None and (skipped := bad_samples.describe(split)):
            notes.append(skipped)
    for note in notes:
        s.announce.note_once(note)


def _build_non_finite_error(s: Session, loss: float, interval: OpenInterval) -> NonFiniteLossError:
    """Describe a loss that is not finite, and store the batch it happened on."""
    settle_checkpoint(s)
    losses, precision = interval.reading.losses, s.run.plan["precision"]
    step = find_bad_step(losses, last_step=interval.step)
    if step is None:
        where = f"steps {interval.step - interval.reading.n_steps + 1} to {interval.step}"
        stored, remedy = "", suggest_stability(precision)
    else:
        where = f"step {step}"
        stored, remedy = save_bad_batch(s, step=step, loss=losses[step - interval.step - 1])
    said = [describe_loss(loss, where, interval.lr, precision), stored, describe_saved(s), remedy]
    return NonFiniteLossError("; ".join(filter(None, said)), step=step)
