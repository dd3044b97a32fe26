"""What the loop does beside training: log, evaluate, save, tell. None of it happens inside a step."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import torch

from fulltilt.data import explain_loader_error
from fulltilt.engine.announce import Announcer
from fulltilt.engine.build.budget import estimate_host_budget
from fulltilt.engine.build.facts import count_dataset
from fulltilt.engine.build.startup import describe_start
from fulltilt.engine.interrupt import Stop
from fulltilt.engine.loop.bad_batch import find_bad_step, save_bad_batch, suggest_stability
from fulltilt.engine.loop.evaluate import evaluate
from fulltilt.engine.loop.replan import Replan, describe_hopeless, describe_replan, is_out_of_memory
from fulltilt.engine.loop.saving import collect_checkpoint, describe_saved, save_session, settle_checkpoint
from fulltilt.engine.loop.session import OpenInterval, Restart, Session
from fulltilt.errors import DataError, DeviceMemoryError, FulltiltError, NonFiniteLossError, UsageError
from fulltilt.levers import find_reports
from fulltilt.records import (
    EpochDone,
    Evaluated,
    Listener,
    Replanned,
    RunEnded,
    RunStarted,
    StepsDone,
)

_NOT_DETERMINISTIC = re.compile(r"(?P<operator>\S+) does not have a deterministic implementation")
_NO_SUCH_CLASS = re.compile(r"Target (?P<target>-?\d+) is out of bounds")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What training came to.

    Attributes:
        metrics: Of the newest evaluation; empty when there was none.
        loss: Mean training loss of the newest whole epoch.
        epoch: Whole epochs.
        seconds: Of this process, from build to end.
        training_seconds: Of the whole run, evaluation and checkpoints left out.
        samples_per_s: Over those.
        reason: "finished" or "interrupted".
        evaluations: All of the run, in order: the way to a time to accuracy.
        n_validation_samples: Of the set that they are made on; None without one, and where its length is not known.
    """

    metrics: dict[str, float]
    loss: float | None
    epoch: int
    step: int
    seconds: float
    training_seconds: float
    samples_per_s: float
    out_dir: str
    reason: str
    evaluations: tuple[Evaluated, ...] = ()
    n_validation_samples: int | None = None
    notes: tuple[str, ...] = ()


def announce_start(s: Session) -> None:
    run, progress = s.run, s.progress
    budget = estimate_host_budget(run)
    s.announce(
        RunStarted,
        name=(run.config.run.name if run.config else None) or run.workload.name,
        out_dir=str(s.folder),
        device=str(run.device),
        plan=run.plan.to_json(),
        n_parameters=sum(p.numel() for p in run.setup.model.parameters()),
        n_samples=run.n_samples,
        steps_per_epoch=run.steps_per_epoch,
        n_epochs=s.limits.n_epochs,
        first_epoch=progress.epoch,
        first_step=progress.step,
        config=run.config.to_values() if run.config else {},
        config_digest=run.config.digest if run.config else None,
        n_ranks=run.world.n_ranks,
        pid=os.getpid(),
        report=describe_start(run, budget),
    )
    if budget is not None and (problem := budget.find_problem()):
        s.announce.note(problem, level="warning")
    for note in run.notes:
        s.announce.note(note)


def log_interval(s: Session, *, has_phases: bool = False) -> None:
    """Close the logging interval: its sums start on their way to the host, those of the one before are told.

    Args:
        has_phases: Its last step was timed by phase; one that an epoch's end cuts short has no such step.
    """
    if s.meter.n_steps == 0:
        return
    at = s.progress
    lr = s.learning_rate.compute_lr(at.step - 1)
    interval = OpenInterval(
        s.meter.take(), s.watch.take_interval(), lr, at.epoch, at.step, at.step_in_epoch, has_phases
    )
    flush_log(s)
    s.pending = interval
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
        raise _describe_non_finite(s, loss, interval, reading.losses)
    for name, total in sums.items():
        epoch_sums[name] = epoch_sums.get(name, 0.0) + total
    if s.promise is not None and (message := s.promise.observe(reading.n_samples, seconds)):
        s.announce.note(message, level="warning")
    if s.announce.has_listeners:
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


def announce_epoch(s: Session) -> None:
    """Tell the epoch's figures, once: a run resumed before its evaluation comes here again."""
    progress = s.progress
    if progress.is_epoch_announced:
        return
    log_interval(s)
    flush_log(s)
    s.watch.read()
    tell_late_notes(s)
    means = progress.compute_epoch_means()
    if means and s.run.workload.derive is not None:
        means |= s.run.workload.derive(means)
    progress.last_loss = means.pop("loss", progress.last_loss)
    progress.is_epoch_announced = True
    seconds = progress.epoch_seconds
    s.announce(
        EpochDone,
        epoch=progress.epoch,
        step=progress.step,
        loss=progress.last_loss,
        metrics=means,
        seconds=seconds,
        samples_per_s=progress.samples_in_epoch / seconds if seconds > 0 else 0.0,
    )


def tell_late_notes(s: Session) -> None:
    """What came up since the last time: a fallback taken in a step, samples that could not be read."""
    loaders = {"training": s.run.loader, "validation": s.validation}
    skipped = [
        loader.dataset.bad_samples.describe(split)
        for split, loader in loaders.items()
        if getattr(getattr(loader, "dataset", None), "bad_samples", None) is not None
    ]
    for note in (*s.run.notes, *filter(None, skipped)):
        if note not in s.announce.notes:
            s.announce.note(note)


def evaluate_once(s: Session, stop: Stop) -> bool:
    """Evaluate and tell, unless this step has been; False when a signal ended it.

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
    metrics = evaluate(s.run, s.validation, should_stop=stop.__bool__)
    if metrics is None:
        return False
    progress.evaluated_step = progress.step
    tell_late_notes(s)
    fields: dict[str, Any] = {
        "epoch": progress.epoch,
        "step": progress.step,
        "split": "val",
        "metrics": metrics,
        "seconds": time.perf_counter() - began_s,
        "training_seconds": progress.training_seconds,
    }
    s.evaluations.append(Evaluated(attempt=s.attempt, time_s=time.time(), **fields))
    s.announce(Evaluated, **fields)
    s.watch.start()
    return True


def save(s: Session, *, is_last: bool = False) -> None:
    """Write a checkpoint, unless this position is saved already; with ``run.async_checkpoint`` beside training.

    Args:
        is_last: Nothing follows: the file is whole when this returns, and a full disk is an error whatever
            ``run.on_full_disk`` says.

    Raises:
        StorageError: no space; the checkpoint before is kept.
        NonFiniteLossError: the loss or a weight is NaN or infinite; nothing is written.
    """
    flush_log(s)
    save_session(s, is_last=is_last)


def prepare_restart(s: Session, replan: Replan) -> Restart:
    """Drop the window in progress, save the state after the last whole step, and tell what changes.

    Call it when the error is gone: what its frames held of the device has to be free.

    Raises:
        StorageError: the state cannot be saved.
    """
    gc.collect()
    s.run.setup.optimizer.zero_grad(set_to_none=True)
    if s.run.device.type == "cuda":
        torch.cuda.empty_cache()  # blocks of the old sizes are of no use to the new ones
    collect_checkpoint(s)
    saved_step = s.saved_position.step if s.saved_position is not None else 0
    n_steps_lost = 0 if replan.keeps_step else s.progress.step - saved_step
    message = describe_replan(s, replan, n_steps_lost=n_steps_lost)
    if replan.keeps_step:
        s.last_step.bring_back()
        s.meter.bring_back()
        s.sizes, s.saved_position = replan.sizes, None
        save(s, is_last=True)
    fields = dataclasses.asdict(replan.sizes)
    s.announce(
        Replanned, step=s.progress.step - n_steps_lost, n_steps_lost=n_steps_lost, reason=replan.reason, **fields
    )
    s.announce.note(message, level="warning")
    return Restart(
        sizes=replan.sizes,
        n_replans=s.n_replans + 1,
        attempt=s.attempt + 1,
        started_s=s.started_s,
        notes=tuple(s.announce.notes),
        step=s.progress.step - n_steps_lost,
        metrics=_last_metrics(s),
    )


def announce_lost(restart: Restart, listeners: Sequence[Listener], error: Exception) -> None:
    """The run ended between two attempts: the next one could not be opened."""
    Announcer(listeners, attempt=restart.attempt)(
        RunEnded,
        reason=f"failed: {type(error).__name__}: {error}",
        step=restart.step,
        seconds=time.perf_counter() - restart.started_s,
        metrics=dict(restart.metrics),
    )


def announce_end(s: Session, reason: str) -> None:
    s.watch.stop()
    for report in find_reports(s.run.plan, s.run.setup):
        s.announce.note(report)
    settle_checkpoint(s)
    s.announce(RunEnded, reason=reason, step=s.progress.step, seconds=_compute_seconds(s), metrics=_last_metrics(s))


def summarize(s: Session, reason: str) -> TrainResult:
    progress = s.progress
    seconds = progress.training_seconds
    return TrainResult(
        metrics=_last_metrics(s),
        loss=progress.last_loss,
        epoch=progress.epoch,
        step=progress.step,
        seconds=_compute_seconds(s),
        training_seconds=seconds,
        samples_per_s=progress.n_samples / seconds if seconds > 0 else 0.0,
        out_dir=str(s.folder),
        reason=reason,
        evaluations=tuple(s.evaluations),
        n_validation_samples=None if s.validation is None else count_dataset(s.validation.dataset),
        notes=tuple(s.announce.notes),
    )


def explain_error(s: Session, error: Exception) -> FulltiltError | None:
    """An error of torch in the user's terms: no memory left, a data worker that died; None for any other.

    A dead worker can be reported from anywhere in the main thread: torch raises it from its signal handler.
    """
    if isinstance(error, FulltiltError):
        return None
    if is_out_of_memory(error):
        return DeviceMemoryError(describe_hopeless(s, error))
    if found := _NOT_DETERMINISTIC.match(str(error)):
        return UsageError(
            f"{found['operator']} has no form on {s.run.device.type} that repeats bit for bit, and run.deterministic "
            "asks for one; set run.deterministic to false, or leave that operator out of the model"
        )
    if isinstance(error, IndexError) and (found := _NO_SUCH_CLASS.match(str(error))):
        return DataError(
            f"a target is {found['target']}, and the model has fewer outputs; give the model as many as there are "
            "classes, counted from 0, or mend the targets of the data set"
        )
    return explain_loader_error(error)


def _describe_non_finite(s: Session, loss: float, interval: OpenInterval, losses: list[float]) -> NonFiniteLossError:
    """Also stores the batch it happened on."""
    settle_checkpoint(s)
    first = interval.step - interval.reading.n_steps + 1
    step = find_bad_step(losses, last_step=interval.step)
    where = f"step {step}" if step is not None else f"steps {first} to {interval.step}"
    stored = "" if step is None else f"{save_bad_batch(s, step=step, loss=losses[step - interval.step - 1])}; "
    return NonFiniteLossError(
        f"the loss is {loss} in {where} (learning rate {interval.lr:.3g}, precision {s.run.plan['precision']}); "
        f"{stored}{describe_saved(s)}. {suggest_stability(s.run.plan['precision'])}"
    )


def _last_metrics(s: Session) -> dict[str, float]:
    return dict(s.evaluations[-1].metrics) if s.evaluations else {}


def _compute_seconds(s: Session) -> float:
    return time.perf_counter() - s.started_s
