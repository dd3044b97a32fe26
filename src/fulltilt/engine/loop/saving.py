"""Checkpoints of a session: in the foreground or beside training, and what a full disk means for the run."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from fulltilt.engine.announce import is_out_of_memory
from fulltilt.engine.checkpoints import checkpoint
from fulltilt.engine.checkpoints.background import Written
from fulltilt.engine.checkpoints.files import NEWEST
from fulltilt.engine.loop.bad_batch import save_bad_batch, suggest_stability
from fulltilt.engine.loop.session import Session
from fulltilt.errors import NonFiniteLossError, StorageError
from fulltilt.records import CheckpointSaved, CheckpointStarted


def save_session(s: Session, *, is_last: bool) -> None:
    """Do what ``duties.save`` says; the figures read back so far are told already."""
    world = s.run.world
    if s.run.device.type == "cuda":
        torch.cuda.synchronize(s.run.device)  # steps still queued are training time; the weights are read next anyway
    s.watch.stop()
    collect_checkpoint(s)
    if world.hand_out(s.saved_position == s.position):  # rank 0 knows: a full disk is told there only
        s.watch.start()
        return
    s.announce(CheckpointStarted, epoch=s.progress.epoch, step=s.progress.step)
    began_s = time.perf_counter()
    _check_weights(s)
    s.writing_position = s.position
    state = s.capture()
    if is_last or not _start_writing(s, state, began_s):
        written = Written(path=s.folder / NEWEST)
        if world.is_first:  # the others wait for it at the next thing they do together
            try:
                with world.work_alone():
                    checkpoint.save_checkpoint(s.folder, state)
            except StorageError as error:
                written.error = error
        written.seconds = written.stall_s = time.perf_counter() - began_s
        _finish_checkpoint(s, written, is_last=is_last)
    s.watch.start()


def collect_checkpoint(s: Session) -> None:
    """Wait for the checkpoint that is being written, if there is one, and tell how it ended.

    Raises:
        StorageError: as for ``duties.save``.
    """
    if s.writer is not None and s.writer.is_busy:
        _finish_checkpoint(s, s.writer.collect(), is_last=False)


def settle_checkpoint(s: Session) -> None:
    """Do the same where the run fails already: a checkpoint that fails too is a note beside that."""
    try:
        collect_checkpoint(s)
    except Exception as error:  # whatever ended the writer's thread
        s.announce.note(str(error), level="warning")


def describe_saved(s: Session) -> str:
    saved = s.saved_position
    return f"the checkpoint of step {saved.step} is kept" if saved else "no checkpoint was written yet"


def _start_writing(s: Session, state: Mapping[str, Any], began_s: float) -> bool:
    """Begin to write beside training; false where that cannot be done."""
    if s.writer is None:
        return False
    try:
        s.writer.start(s.folder, state, began_s=began_s)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        s.announce.note("host memory holds no copy of the state: this checkpoint is written in the foreground")
        return False
    return True


def _finish_checkpoint(s: Session, written: Written, *, is_last: bool) -> None:
    position, s.writing_position = s.writing_position, None
    assert position is not None
    if isinstance(written.error, StorageError):
        message = f"no checkpoint of step {position.step}: {written.error}; {describe_saved(s)}"
        if is_last or s.limits.on_full_disk == "stop":
            remedy = ", --resume goes on from there" if s.saved_position else ""
            raise StorageError(f"{message}{remedy}") from written.error
        if not s.is_over:  # else the last checkpoint follows, and says it
            s.announce.note(f"{message}; training goes on (run.on_full_disk: continue)", level="warning")
        return
    if written.error is not None:
        raise written.error
    s.saved_position = position
    s.announce(
        CheckpointSaved,
        epoch=position.epoch,
        step=position.step,
        path=str(written.path),
        seconds=written.seconds,
        stall_s=written.stall_s,
        waited_s=written.waited_s,
    )


def _check_weights(s: Session) -> None:
    """Raise NonFiniteLossError for weights that are not finite: the loss of the next step would have shown it."""
    problem = None
    try:
        checkpoint.check_finite(s.run.setup.model, step=s.progress.step)
    except NonFiniteLossError as error:
        problem = str(error)
    problem = next(filter(None, s.run.world.collect(problem)), None)  # ranks may hold different weights
    if problem is None:
        return
    remedy = suggest_stability(s.run.plan["precision"])
    if s.progress.step_in_epoch:
        stored, remedy = save_bad_batch(s, step=s.progress.step, loss=math.nan)
        problem = f"{problem}; {stored}"
    raise NonFiniteLossError(f"{problem}; {remedy}")
