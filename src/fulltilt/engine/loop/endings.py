"""How an attempt to train ends: what its listeners are told, what the caller gets, and errors in the user's terms."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

from fulltilt.data import explain_loader_error
from fulltilt.engine.announce import is_out_of_memory, read_first_line
from fulltilt.engine.build.facts import count_dataset
from fulltilt.engine.loop.replan import RankReplanError, describe_hopeless
from fulltilt.engine.loop.saving import settle_checkpoint
from fulltilt.engine.loop.session import Session
from fulltilt.errors import (
    IN_EVALUATION,
    DataError,
    DeviceMemoryError,
    FulltiltError,
    UsageError,
    find_place,
    keep_traceback,
)
from fulltilt.levers import find_reports
from fulltilt.records import Evaluated, RunEnded

_NOT_DETERMINISTIC = re.compile(r"(?P<operator>\S+) does not have a deterministic implementation")
TRACEBACK = "traceback.log"
_NO_SUCH_CLASS = re.compile(r"Target (?P<target>-?\d+) is out of bounds")
_TWO_WIDTHS = re.compile(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<given>\d+) and (?P<taken>\d+)x\d+\)")
_NO_TARGETS = re.compile(r"argument 'target' .*must be Tensor, not (?P<kind>\w+)")
_ONE_VALUE = "Expected more than 1 value per channel when training"
_TWO_SHAPES = re.compile(r"[Tt]arget size|size of tensor b|match target batch_size|1D target tensor expected")
_TWO_TYPES = re.compile(r"have the same dtype, but got|type \(.+\) should be the same|Found dtype \w+ but expected")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What training came to."""

    metrics: dict[str, float]  # of the newest evaluation; empty when there was none
    loss: float | None  # mean over the newest whole epoch
    epoch: int  # whole epochs
    step: int
    seconds: float  # of this process, from build to end
    training_seconds: float  # of the whole run, evaluation and checkpoints left out
    samples_per_s: float  # over those
    out_dir: str
    reason: str  # "finished" or "interrupted"
    evaluations: tuple[Evaluated, ...] = ()  # all of the run, in order: the way to a time to accuracy
    n_validation_samples: int | None = None  # None without such a set, and where its length is not known
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def tell_failure(s: Session) -> Iterator[None]:
    """Tell the listeners what ended the block, and raise it in the user's terms.

    Raises:
        UsageError: the model's or the data's code called ``sys.exit``.
        DeviceMemoryError, DataError: for torch's own errors.
    """
    try:
        yield
    except SystemExit as error:  # it would end the program, by 0 as if all were well
        called = f"sys.exit({error.code!r})"
        _announce_end(s, f"failed: {called} was called")
        raise UsageError(f"code of the model or the data called {called} after step {s.progress.step}") from error
    except RankReplanError:  # the process that started the ranks tells how it goes on
        settle_checkpoint(s)
        raise
    except Exception as error:  # told to the listeners, and raised again
        explained = _explain(s, error) or error
        cause = explained.__cause__ or error
        is_users = isinstance(explained, DataError) and not isinstance(cause, FulltiltError)
        if is_users and explain_loader_error(cause):
            explained = DataError(f"{explained}{keep_traceback(cause, s.folder / TRACEBACK)}")
        elif is_users or find_place(explained):
            explained.add_note(keep_traceback(cause if is_users else explained, s.folder / TRACEBACK))
        if s.run.doing == "evaluation":
            explained.add_note(IN_EVALUATION)
        _announce_end(s, f"failed: {type(explained).__name__}: {explained}", getattr(explained, "step", None))
        if explained is not error:
            raise explained from error
        raise
    except BaseException:
        _announce_end(s, "interrupted")
        raise


def finish(s: Session) -> TrainResult:
    """Tell that training is over, or left by a signal, and sum it up."""
    progress, reason = s.progress, "finished" if s.is_over else "interrupted"
    _announce_end(s, reason)
    seconds = progress.training_seconds
    return TrainResult(
        metrics=s.last_metrics,
        loss=progress.last_loss,
        epoch=progress.epoch,
        step=progress.step,
        seconds=s.seconds,
        training_seconds=seconds,
        samples_per_s=progress.n_samples / seconds if seconds > 0 else 0.0,
        out_dir=str(s.folder),
        reason=reason,
        evaluations=tuple(s.evaluations),
        n_validation_samples=None if s.validation is None else count_dataset(s.validation.dataset),
        notes=tuple(s.announce.notes),
    )


def _announce_end(s: Session, reason: str, step: int | None = None) -> None:
    s.watch.stop()
    for report in find_reports(s.run.plan, s.run.setup):
        s.announce.note(report)
    settle_checkpoint(s)
    step = s.progress.step if step is None else step
    s.announce(RunEnded, reason=reason, step=step, seconds=s.seconds, metrics=s.last_metrics)


def _explain(s: Session, error: Exception) -> FulltiltError | None:
    """Put an error of torch in the user's terms: no memory left, a data worker that died. None for any other.

    A dead worker can be reported from anywhere in the main thread: torch raises it from its signal handler.
    """
    if isinstance(error, FulltiltError):
        return None
    if is_out_of_memory(error):
        return DeviceMemoryError(describe_hopeless(s, error))
    return explain_error(error, s.run.device.type)


def explain_error(error: Exception, device: str = "this device") -> FulltiltError | None:
    """Put an error of torch or of the data in the user's terms, as training and trials do; None for any other."""
    if found := _NOT_DETERMINISTIC.match(str(error)):
        return UsageError(
            f"{found['operator']} has no form on {device} that repeats bit for bit, and run.deterministic "
            "asks for one; set run.deterministic to false, or leave that operator out of the model"
        )
    if isinstance(error, IndexError) and (found := _NO_SUCH_CLASS.match(str(error))):
        if found["target"].startswith("-"):
            return DataError(
                f"a target is {found['target']}, and classes are counted from 0; mend the targets, or leave such ones "
                f"out of the loss: CrossEntropyLoss(ignore_index={found['target']})"
            )
        return DataError(
            f"a target is {found['target']}, and the model has fewer outputs; give the model as many as there are "
            "classes, counted from 0, or mend the targets of the data set"
        )
    if explained := explain_loader_error(error):
        return explained
    said, place = read_first_line(error), find_place(error) or "in torch"
    if isinstance(error, ValueError) and _ONE_VALUE in said:
        remedy = "data.drop_last=true, or another data.batch_size, keeps batches larger"
        return DataError(f"BatchNorm cannot train on one value per channel ({place}); {remedy}")
    if isinstance(error, RuntimeError) and (found := _TWO_WIDTHS.search(said)):
        return DataError(
            f"{found['given']} features meet weights for {found['taken']} ({place}); give the model the width of the "
            "data, and layers that fit each other"
        )
    if isinstance(error, RuntimeError | ValueError | UserWarning) and "Loss(" in place and _TWO_SHAPES.search(said):
        return DataError(
            f"the outputs and the targets of a batch do not fit each other: {said} ({place}); give targets of the "
            "shape that this loss takes, or another loss"
        )
    if isinstance(error, TypeError) and (found := _NO_TARGETS.search(said)):
        return DataError(f"the targets of a batch are a {found['kind']} ({place}); give numbers, such as class indices")
    if isinstance(error, RuntimeError) and _TWO_TYPES.search(said) and said.count("cuda") != 1:  # else two devices
        return DataError(
            f"the data and the model's parameters differ in type: {said} ({place}); have the "
            "data set, or the workload's prepare, give the parameters' type, most often float32"
        )
    return None
