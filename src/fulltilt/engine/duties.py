"""What the loop does beside training: log, evaluate, save, tell. None of it happens inside a step."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch

from fulltilt.data import explain_loader_error
from fulltilt.engine import checkpoint
from fulltilt.engine.evaluate import evaluate
from fulltilt.engine.interrupt import Stop
from fulltilt.engine.session import OpenInterval, Session
from fulltilt.errors import DeviceMemoryError, FulltiltError, NonFiniteLossError, StorageError
from fulltilt.records import (
    CheckpointSaved,
    CheckpointStarted,
    EpochDone,
    Evaluated,
    Evidence,
    RunEnded,
    RunStarted,
    StepsDone,
    classify_outcome,
)


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
    notes: tuple[str, ...] = ()


def announce_start(s: Session) -> None:
    run, progress = s.run, s.progress
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
    )
    for note in run.notes:
        s.announce.note(note)


def log_interval(s: Session) -> None:
    """Close the logging interval: its sums start on their way to the host, those of the one before are told."""
    if s.meter.n_steps == 0:
        return
    at = s.progress
    lr = s.learning_rate.compute_lr(at.step - 1)
    interval = OpenInterval(s.meter.take(), s.watch.take_interval(), lr, at.epoch, at.step, at.step_in_epoch)
    flush_log(s)
    s.pending = interval


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
    loss = sums["loss"] / reading.n_samples
    if not math.isfinite(loss):
        raise _describe_non_finite(s, loss, interval)
    for name, total in sums.items():
        epoch_sums[name] = epoch_sums.get(name, 0.0) + total
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
        )


def announce_epoch(s: Session) -> None:
    """Tell the epoch's figures, once: a run resumed before its evaluation comes here again."""
    progress = s.progress
    if progress.is_epoch_announced:
        return
    log_interval(s)
    flush_log(s)
    s.watch.read()
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


def save(s: Session) -> None:
    """Write a checkpoint, unless this position is saved already.

    Raises:
        StorageError: no space; the checkpoint before is kept.
        NonFiniteLossError: the loss or a weight is NaN or infinite; nothing is written.
    """
    flush_log(s)
    if s.saved_position == s.position:
        return
    s.watch.stop()
    s.announce(CheckpointStarted, epoch=s.progress.epoch, step=s.progress.step)
    began_s = time.perf_counter()
    checkpoint.check_finite(s.run.setup.model, step=s.progress.step)
    try:
        path = _write_checkpoint(s)
    except StorageError as error:
        raise StorageError(f"no checkpoint of step {s.progress.step}: {error}; {_describe_saved(s)}") from error
    s.saved_position = s.position
    fields = {"epoch": s.progress.epoch, "step": s.progress.step, "path": str(path)}
    s.announce(CheckpointSaved, seconds=time.perf_counter() - began_s, **fields)
    s.watch.start()


def _write_checkpoint(s: Session) -> Path:
    """Of several ranks all bring their parts, and the first one writes."""
    state, world = s.capture(), s.run.world
    if not world.is_first:
        return s.folder / checkpoint.NEWEST
    with world.work_alone():
        return checkpoint.save_checkpoint(s.folder, state)


def announce_end(s: Session, reason: str) -> None:
    s.watch.stop()
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
        notes=tuple(s.announce.notes),
    )


def explain_error(s: Session, error: Exception) -> FulltiltError | None:
    """An error of torch in the user's terms: no memory left, a data worker that died; None for any other.

    A dead worker can be reported from anywhere in the main thread: torch raises it from its signal handler.
    """
    if isinstance(error, FulltiltError):
        return None
    text = str(error)
    if classify_outcome(Evidence(exception_type=type(error).__name__, message=text))[0] != "out_of_memory":
        return explain_loader_error(error)
    batch_size, accumulate = s.run.plan["batch_size"], s.run.plan["accumulate"]
    smaller = f"batch_size {batch_size // 2} with accumulate {accumulate * 2}, " if batch_size > 1 else ""
    return DeviceMemoryError(
        f"out of memory on {s.run.device} after step {s.progress.step} with batch_size {batch_size} "
        f"({text.strip().splitlines()[0] if text.strip() else type(error).__name__}); try {smaller}precision bf16 or "
        "activation_checkpointing, and --resume from the last checkpoint"
    )


def _describe_non_finite(s: Session, loss: float, interval: OpenInterval) -> NonFiniteLossError:
    first = interval.step - interval.reading.n_steps + 1
    return NonFiniteLossError(
        f"the loss is {loss} in steps {first} to {interval.step} (learning rate {interval.lr:.3g}, "
        f"precision {s.run.plan['precision']}); {_describe_saved(s)}. Lower optim.lr, set optim.clip_norm, or use "
        "precision bf16 or fp32"
    )


def _describe_saved(s: Session) -> str:
    saved = s.saved_position
    return f"the checkpoint of step {saved.step} is kept" if saved else "no checkpoint was written yet"


def _last_metrics(s: Session) -> dict[str, float]:
    return dict(s.evaluations[-1].metrics) if s.evaluations else {}


def _compute_seconds(s: Session) -> float:
    return time.perf_counter() - s.started_s
