"""How long a run trains, and when evaluations and checkpoints fall due."""

import dataclasses
import functools
import math

from fulltilt.config import Config, Interval, parse_interval
from fulltilt.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to train, and how often to log, evaluate and save."""

    n_epochs: int
    max_steps: float  # infinity: no limit
    log_every: int
    evaluate_every: Interval | None
    checkpoint_every: Interval | None
    on_out_of_memory: str
    on_full_disk: str

    @functools.cached_property
    def has_step_duties(self) -> bool:
        """Whether anything can fall due in the middle of an epoch; looked up at every step."""
        return "steps" in [every.unit for every in (self.evaluate_every, self.checkpoint_every) if every is not None]

    def is_evaluation_due(self, *, steps: int = 0, epochs: int = 0) -> bool:
        """Tell whether to evaluate after so many steps, or epochs; the last epoch's end always is, unless none is."""
        is_last = self.evaluate_every is not None and epochs == self.n_epochs
        return is_last or _is_due(self.evaluate_every, steps, epochs)

    def is_checkpoint_due(self, *, steps: int = 0, epochs: int = 0) -> bool:
        return _is_due(self.checkpoint_every, steps, epochs)


def read_limits(config: Config, epochs: int | None, max_steps: int | None) -> Limits:
    n_epochs = config.run.epochs if epochs is None else epochs
    for name, value in (("epochs", n_epochs), ("max_steps", max_steps)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; at least 1 is needed")
    return Limits(
        n_epochs=n_epochs,
        max_steps=math.inf if max_steps is None else max_steps,
        log_every=config.run.log_every_n_steps,
        evaluate_every=parse_interval(config.run.evaluate_every),
        checkpoint_every=parse_interval(config.run.checkpoint_every),
        on_out_of_memory=config.run.on_out_of_memory,
        on_full_disk=config.run.on_full_disk,
    )


def _is_due(every: Interval | None, steps: int, epochs: int) -> bool:
    count = 0 if every is None else steps if every.unit == "steps" else epochs
    return every is not None and count > 0 and count % every.count == 0
