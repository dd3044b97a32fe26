"""The events that the engine sends to its listeners while it runs."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What every event carries, so that a listener can tell ranks and restarts apart. Epochs count from 1."""

    rank: int = 0
    attempt: int = 0
    time_s: float = 0.0  # Unix time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted(Event):
    """A training began, or went on."""

    name: str
    out_dir: str
    device: str
    plan: dict[str, Any]
    n_parameters: int
    n_samples: int | None
    steps_per_epoch: int | None
    n_epochs: int
    first_epoch: int = 1  # a later one when resumed
    first_step: int = 0
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # resolved, by section
    config_digest: str | None = None
    n_ranks: int = 1  # processes that train
    pid: int | None = None  # of the one that says this
    report: tuple[str, ...] = ()  # what it runs on and how, one line each


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepsDone(Event):
    """A logging interval ended. No figure of it took a host synchronisation per step."""

    epoch: int
    step: int  # optimizer steps since the start of the run
    step_in_epoch: int
    n_steps: int  # in this interval
    n_samples: int
    seconds: float
    loss: float
    lr: float
    samples_per_s: float
    phases_ms: dict[str, float | None] = dataclasses.field(default_factory=dict)  # of the interval's last step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochDone(Event):
    """An epoch of training ended."""

    epoch: int
    step: int
    loss: float
    metrics: dict[str, float]  # training metrics
    seconds: float
    samples_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(Event):
    """The model was evaluated."""

    epoch: int
    step: int
    split: str
    metrics: dict[str, float]
    seconds: float
    training_seconds: float  # since the start of training, evaluation and checkpoints left out


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointStarted(Event):
    """A checkpoint is about to be written. A resumed run repeats nothing from before: store what is held back."""

    epoch: int  # whole ones so far
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint was written."""

    epoch: int  # whole ones so far
    step: int
    path: str
    seconds: float  # of the write, beside training where asked
    stall_s: float = 0.0  # training stood still until the copy was taken; all of a write in the foreground
    waited_s: float = 0.0  # training stood still later, for the end of the write


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replanned(Event):
    """Memory ran out: the run goes on from ``step`` with smaller micro-batches. ``RunStarted`` follows."""

    step: int
    n_steps_lost: int  # that are trained again: the update itself was interrupted, or a rank of several ran out
    batch_size: int
    accumulate: int
    val_batch_size: int | None
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Noted(Event):
    """Something a person should know: a fallback taken, a lever without effect."""

    message: str
    level: str = "note"  # "note" or "warning"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded(Event):
    """A training ended."""

    reason: str  # "finished", "interrupted", "failed: …"
    step: int  # the last one; of a loss that is not finite the first such one, which is read some steps later
    seconds: float
    metrics: dict[str, float]


Listener = Callable[[Event], None]
