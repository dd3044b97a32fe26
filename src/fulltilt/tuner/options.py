"""The flags of a search: parsed, checked, and what follows from them on this machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fulltilt.config import Config, parse_bytes, parse_duration_s
from fulltilt.errors import ConfigError, UsageError
from fulltilt.hardware import compute_usable_device_bytes, resolve_device
from fulltilt.records import Machine
from fulltilt.tuner.recommend import LearningRateRule

CPU_LIMIT_SHARE = 0.9  # of the memory that is available at the start, where no limit was asked for


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """The flags of a search, parsed and checked."""

    batch_sizes: tuple[int, ...] | None
    num_workers: tuple[int, ...] | None
    n_steps: int
    device: str
    memory_limit_bytes: int | None
    strategy: str
    budget_s: float | None
    free_batch: bool
    lr_rule: LearningRateRule
    deadline_s: float
    max_measure_s: float

    @property
    def is_quick(self) -> bool:
        return self.strategy == "quick"


def build_options(
    config: Config,
    *,
    batch_sizes: Sequence[int] | None,
    num_workers: Sequence[int] | None,
    steps: int | None,
    device: str | None,
    memory_limit: str | int | None,
    exhaustive: bool,
    quick: bool,
    budget: str | float | None,
    free_batch: bool,
    lr_rule: LearningRateRule,
    deadline_s: float | None,
) -> TuneOptions:
    if exhaustive and quick:
        raise UsageError("--exhaustive and --quick contradict each other; give one of them")
    if lr_rule not in ("sqrt", "linear", "none"):
        raise UsageError(f"--lr-rule {lr_rule} is unknown; valid: sqrt, linear, none")
    _check_values("--batch-sizes", batch_sizes, smallest=1)
    _check_values("--num-workers", num_workers, smallest=0)
    n_steps = config.benchmark.steps_per_test if steps is None else steps
    _check_values("--steps", [n_steps], smallest=1)
    budget_s = _parse("--budget", budget, parse_duration_s)
    if budget_s is not None and budget_s <= 0:
        raise UsageError(f"--budget {budget} leaves no time; give for instance --budget 6m")
    usual_s = deadline_s or (60.0 if quick else 120.0)
    return TuneOptions(
        batch_sizes=tuple(batch_sizes) if batch_sizes else None,
        num_workers=tuple(num_workers) if num_workers else None,
        n_steps=n_steps,
        device=resolve_device(_select_device(config, device)),
        memory_limit_bytes=_parse("--memory-limit", memory_limit, parse_bytes),
        strategy="exhaustive" if exhaustive else "quick" if quick else "model_first",
        budget_s=90.0 if quick and budget_s is None else budget_s,
        free_batch=free_batch,
        lr_rule=lr_rule,
        deadline_s=usual_s if budget_s is None else min(usual_s, budget_s),
        max_measure_s=2.0 if quick else 8.0,
    )


def _check_values(flag: str, values: Sequence[int] | None, *, smallest: int) -> None:
    for value in values or ():
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise UsageError(f"{flag} {value!r} cannot be tried; give whole numbers of at least {smallest}")


def _parse(flag: str, value: Any, parse: Callable[[str], Any]) -> Any:
    """A quantity that was given as text, read; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ConfigError as error:
        raise UsageError(f"{flag} {error}") from None


def _select_device(config: Config, device: str | None) -> str:
    """One device to measure on; of a list of GPUs the first."""
    value = config.run.device if device is None else device
    if isinstance(value, list | tuple):
        return f"cuda:{value[0]}"
    return f"cuda:{value}" if isinstance(value, int) else value


def count_ranks(config: Config, device: str | None = None) -> int:
    """Training processes of a run with ``config``, one a device."""
    named = config.run.device if device is None else device
    return max(config.run.n_ranks or 1, len(named) if isinstance(named, list) else 1)


def note_ranks(config: Config, device: str | None, measured_on: str) -> tuple[str, ...]:
    """What a search on one device does not say about a run over several."""
    n_ranks = count_ranks(config, device)
    if n_ranks == 1:
        return ()
    return (
        f"the configuration trains in {n_ranks} processes, and everything here was measured in one, on {measured_on}: "
        "speed and memory are those of the whole batch on one device, not of this run, and --apply writes no "
        "run.promise for it",
    )


def choose_trial_limit_bytes(options: TuneOptions, machine: Machine) -> int | None:
    """The limit each trial runs under. Without one asked for: what keeps the machine itself alive."""
    if options.memory_limit_bytes is not None:
        return _cut_asked_limit(options, machine)
    if options.device == "cpu":
        return int(CPU_LIMIT_SHARE * min(machine.memory_available_bytes, machine.memory_limit_bytes or sys.maxsize))
    return _find_device_memory_bytes(options, machine) if machine.is_wsl else None


def find_memory_gib(options: TuneOptions, machine: Machine) -> float | None:
    """What the picks are held against: the limit asked for, else the memory of the device."""
    if options.memory_limit_bytes is not None:
        return _cut_asked_limit(options, machine) / 2**30
    if options.device == "cpu":
        return min(machine.memory_total_bytes, machine.memory_limit_bytes or sys.maxsize) / 2**30
    total_bytes = _find_device_memory_bytes(options, machine)
    return total_bytes / 2**30 if total_bytes else None


def _cut_asked_limit(options: TuneOptions, machine: Machine) -> int:
    """The limit asked for; under WSL no more than the GPU has before the driver spills."""
    assert options.memory_limit_bytes is not None
    usable_bytes = _find_device_memory_bytes(options, machine) if machine.is_wsl and options.device != "cpu" else None
    return min(options.memory_limit_bytes, usable_bytes or sys.maxsize)


def _find_device_memory_bytes(options: TuneOptions, machine: Machine) -> int | None:
    """What the GPU has, under WSL what it has before the driver spills; None: not known."""
    index = int(options.device.partition(":")[2] or 0)
    total_bytes = machine.devices[index].memory_total_bytes if index < len(machine.devices) else None
    return compute_usable_device_bytes(total_bytes, is_wsl=machine.is_wsl) if total_bytes else None
