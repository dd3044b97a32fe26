"""Learning-rate schedules: pure functions from the optimizer step to a factor of the configured rate.

A resumed run needs only the step number to go on with the same rates. Lengths are optimizer steps unless said so.
"""

import bisect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fulltilt.config import build_component, check_component, parse_call
from fulltilt.config.quantities import parse_warmup
from fulltilt.errors import ConfigError

Schedule = Callable[[int], float]
"""Optimizer steps taken so far → factor of the configured learning rate for the next step."""


def constant(*, total_steps: int) -> Schedule:
    """Keep the configured rate throughout."""
    return lambda step: 1.0


def cosine(*, total_steps: int, final: float = 0.0) -> Schedule:
    """Fall by half a cosine from 1 to ``final`` (Loshchilov & Hutter 2017, without restarts)."""
    _require("final", final, at_least=0.0)
    return lambda step: _cosine_between(1.0, final, _share(step, total_steps))


def linear(*, total_steps: int, final: float = 0.0) -> Schedule:
    """Fall along a straight line from 1 to ``final``."""
    _require("final", final, at_least=0.0)
    return lambda step: 1.0 + (final - 1.0) * _share(step, total_steps)


def step(
    *,
    total_steps: int,
    steps_per_epoch: int,
    milestones: list[float] | None = None,
    size: float | None = None,
    gamma: float = 0.1,
) -> Schedule:
    """Multiply by ``gamma`` at each of ``milestones``, or every ``size``; both in epochs.

    Raises:
        ConfigError: neither or both are given, or one is not positive.
    """
    _require("gamma", gamma, at_least=0.0)
    if (milestones is None) == (size is None):
        raise ConfigError("step needs either milestones or size, both in epochs: step(milestones=[60, 120], gamma=0.2)")
    if size is not None:
        _require("size", size)
        width = size * steps_per_epoch
        return lambda taken: gamma ** int((taken + 1e-9) / width)
    edges = sorted(_require("milestones", m) * steps_per_epoch for m in milestones or ())
    return lambda taken: gamma ** bisect.bisect_right(edges, taken + 1e-9)


def onecycle(
    *,
    total_steps: int,
    steps_per_epoch: int,
    warmup: float | int | str = 0.3,
    start_div: float = 25.0,
    final_div: float = 1e4,
    notes: list[str] | None = None,
) -> Schedule:
    """Rise from ``1 / start_div`` to 1, then fall to ``1 / (start_div × final_div)``, each by half a cosine.

    ``warmup`` is the rising part: a fraction of the run (0.3), steps (500), or epochs ("2 epochs").
    Source: Smith & Topin 2018, in the two-phase form that PyTorch's OneCycleLR has.
    """
    _require("start_div", start_div, at_least=1.0)
    _require("final_div", final_div, at_least=1.0)
    rise = count_warmup_steps(warmup, total_steps, steps_per_epoch, notes)
    start, final = 1.0 / start_div, 1.0 / (start_div * final_div)

    def factor(taken: int) -> float:
        if taken < rise:
            return _cosine_between(start, 1.0, taken / rise)
        return _cosine_between(1.0, final, _share(taken - rise, total_steps - rise))

    return factor


SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {"constant": constant, "cosine": cosine, "linear": linear, "step": step, "onecycle": onecycle}
)


def build_schedule(
    spec: Any,
    *,
    total_steps: int,
    steps_per_epoch: int,
    warmup: float | int | str = 0,
    notes: list[str] | None = None,
) -> Schedule:
    """Build the schedule that ``spec`` (``"cosine(final=0.01)"``) names, with a linear warm-up in front.

    The named schedule runs over the steps that the warm-up leaves, except milestones in epochs, which count
    from the start of training.

    Args:
        total_steps: Optimizer steps of the whole run.
        warmup: A fraction of the run (0.05), optimizer steps (500), or epochs ("1 epoch"); 0: none.
        notes: Gets a sentence where a warm-up is shortened.

    Raises:
        ConfigError: unknown name or argument, or a value out of its range.
    """
    n_warmup = count_warmup_steps(warmup, total_steps, steps_per_epoch, notes)
    given: dict[str, Any] = {"total_steps": max(1, total_steps - n_warmup), "steps_per_epoch": steps_per_epoch}
    given["notes"] = notes
    main = build_component(spec, SCHEDULES, kind="schedule", where="optim.schedule", **given)
    if n_warmup == 0:
        return main
    name = spec if isinstance(spec, str) else spec.name
    shift = 0 if name.partition("(")[0].strip() == "step" else n_warmup

    def factor(taken: int) -> float:
        return (taken + 1) / (n_warmup + 1) if taken < n_warmup else main(taken - shift)

    return factor


def check_schedule(spec: str, *, base_dir: str | None = None) -> None:
    """Raise the ConfigError of ``build_schedule``, whatever the length of the run; a user's own is not called."""
    if parse_call(spec).name in SCHEDULES:
        build_schedule(spec, total_steps=1_000_000, steps_per_epoch=1000)
    else:
        given = ("total_steps", "steps_per_epoch", "notes")
        check_component(spec, SCHEDULES, kind="schedule", where="optim.schedule", base_dir=base_dir, given=given)


def count_warmup_steps(
    warmup: float | int | str, total_steps: int, steps_per_epoch: int, notes: list[str] | None = None
) -> int:
    """Return the optimizer steps of a warm-up; one as long as the run becomes half of it, with a note.

    Raises:
        ConfigError: it is no length of training.
    """
    length = parse_warmup(warmup)
    per_unit = {"steps": 1, "epochs": steps_per_epoch, "fraction": total_steps}[length.unit]
    n_steps = round(length.count * per_unit)
    if not n_steps or n_steps < total_steps:
        return n_steps
    if notes is not None:
        notes.append(
            f"a warm-up of {n_steps:,} steps ({warmup}) leaves nothing of a run of {total_steps:,}: it is shortened to "
            f"{total_steps // 2:,}, half of the run"
        )
    return total_steps // 2


class LearningRate:
    """Writes the schedule's factor into an optimizer's groups, whose rates it notes before a state is loaded."""

    def __init__(self, optimizer: Any, schedule: Schedule):
        self._optimizer = optimizer
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._schedule = schedule
        self._factor: float | None = None  # the one in force

    def set_step(self, steps_taken: int) -> None:
        """Set the rates for the step that comes after ``steps_taken``."""
        factor = self._schedule(steps_taken)
        if factor == self._factor:
            return
        self._factor = factor
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor

    def compute_lr(self, steps_taken: int, schedule: Schedule | None = None) -> float:
        """Return the first group's rate after ``steps_taken`` steps, by ``schedule`` or by its own."""
        return self._base_lrs[0] * (schedule or self._schedule)(steps_taken)


def _share(taken: int, total_steps: int) -> float:
    """Return 0 for the first step and 1 after the last, so that no step has a rate of zero."""
    return min(1.0, max(0.0, taken / max(1, total_steps)))


def _cosine_between(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))


def _require(name: str, value: float, *, at_least: float | None = None) -> float:
    """Refuse a value that is below ``at_least``, or not above 0 without it."""
    if math.isfinite(value) and (value > 0 if at_least is None else value >= at_least):
        return value
    bound = "above 0" if at_least is None else f"at least {at_least:g}"
    raise ConfigError(f"{name} is {value}, expected {bound}", key="optim.schedule")
