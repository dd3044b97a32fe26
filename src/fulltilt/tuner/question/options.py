"""Parse and check the flags of a search, and derive limits from them and the machine."""

import dataclasses
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fulltilt.config import Config, parse_bytes, parse_duration_s
from fulltilt.errors import ConfigError, UsageError
from fulltilt.hardware import compute_usable_device_bytes, list_rank_devices, resolve_device
from fulltilt.records import Machine
from fulltilt.tuner.question.default_budget import DEFAULT_BUDGET_S, QUICK_BUDGET_S

LearningRateRule = Literal["sqrt", "linear", "none"]

CPU_LIMIT_SHARE = 0.9  # of the memory that is available at the start, where no limit was asked for
MIN_LIMIT_BYTES = 2**20  # a number without a unit was meant otherwise
RANK_START_S = 60.0  # more for a trial over ranks, each of which loads torch for itself


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """The flags of a search, parsed and checked."""

    batch_sizes: tuple[int, ...] | None
    num_workers: tuple[int, ...] | None
    n_steps: int
    device: str
    memory_limit_bytes: int | None  # of each rank
    strategy: str
    budget_s: float | None  # None: until all that is to run has run
    free_batch: bool
    lr_rule: LearningRateRule
    deadline_s: float
    deadline_asked_s: float | None  # what --deadline said; None: nothing
    max_measure_s: float
    named_only: bool = False  # vary what is named, and nothing else
    is_budget_default: bool = False  # then it is longer where single runs are long
    rank_devices: tuple[str, ...] = ()  # of the processes that train together; empty: one, on ``device``

    @property
    def n_ranks(self) -> int:
        return max(1, len(self.rank_devices))

    @property
    def is_quick(self) -> bool:
        return self.strategy == "quick"


def build_options(
    config: Config,
    *,
    batch_sizes: Sequence[int] | None = None,
    num_workers: Sequence[int] | None = None,
    steps: int | None = None,
    device: str | None = None,
    memory_limit: str | int | None = None,
    exhaustive: bool = False,
    named_only: bool = False,
    quick: bool = False,
    budget: str | float | None = None,
    free_batch: bool = False,
    lr_rule: LearningRateRule = "sqrt",
    deadline: str | float | None = None,
) -> TuneOptions:
    """Check the flags as ``tune`` takes them; the configuration says what they leave open.

    Raises:
        UsageError: a flag cannot be meant; says which value, and what to give.
    """
    if exhaustive and quick:
        raise UsageError("--exhaustive and --quick contradict each other; give one of them")
    if lr_rule not in ("sqrt", "linear", "none"):
        raise UsageError(f"--lr-rule {lr_rule} is unknown; valid: sqrt, linear, none")
    _check_values("--batch-sizes", batch_sizes, smallest=1)
    _check_values("--num-workers", num_workers, smallest=0)
    n_steps = config.benchmark.steps_per_test if steps is None else steps
    _check_values("--steps", [n_steps], smallest=1)
    budget_s = _parse("--budget", budget, parse_duration_s)
    asked_s = _parse("--deadline", deadline, parse_duration_s)
    if budget_s is not None and budget_s <= 0:
        raise UsageError(f"--budget {budget} leaves no time; give for instance --budget 6m")
    if asked_s is not None and asked_s <= 0:
        raise UsageError(f"--deadline {deadline} leaves a trial no time; give for instance --deadline 10m")
    limit_bytes = _parse("--memory-limit", memory_limit, parse_bytes)
    if limit_bytes is not None and limit_bytes < MIN_LIMIT_BYTES:
        said = f"{memory_limit} is {limit_bytes} bytes, in which nothing runs"
        raise UsageError(f"--memory-limit {said}; write a unit: 12GiB")
    # One a rank, as ``train`` takes them.
    wanted = config.run.device if device is None else device
    names = list_rank_devices(wanted, config.run.n_ranks, has_gpu=lambda: resolve_device("auto") != "cpu")
    devices = [resolve_device(name) for name in names]
    runs_all = exhaustive or (named_only and not quick and bool(batch_sizes or num_workers))
    is_default = budget_s is None and not (quick or runs_all)
    budget_s = DEFAULT_BUDGET_S if is_default else QUICK_BUDGET_S if quick and budget_s is None else budget_s
    usual_s = asked_s or (60.0 if quick else 120.0) + (RANK_START_S if len(devices) > 1 else 0.0)
    return TuneOptions(
        batch_sizes=tuple(batch_sizes) if batch_sizes else None,
        num_workers=tuple(num_workers) if num_workers else None,
        n_steps=n_steps,
        device=devices[0],
        memory_limit_bytes=limit_bytes,
        strategy="exhaustive" if runs_all else "quick" if quick else "model_first",
        budget_s=budget_s,
        free_batch=free_batch,
        lr_rule=lr_rule,
        deadline_s=usual_s,
        deadline_asked_s=asked_s,
        max_measure_s=2.0 if quick else 8.0,
        named_only=named_only,
        is_budget_default=is_default,
        rank_devices=tuple(devices) if len(devices) > 1 else (),
    )


def _check_values(flag: str, values: Sequence[int] | None, *, smallest: int) -> None:
    if values is not None and (isinstance(values, str) or not isinstance(values, Sequence) or not values):
        raise UsageError(f"{flag} {values!r} cannot be tried; give a list of whole numbers of at least {smallest}")
    for value in values or ():
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise UsageError(f"{flag} {value!r} cannot be tried; give whole numbers of at least {smallest}")


def _parse(flag: str, value: Any, parse: Callable[[str], Any]) -> Any:
    """Parse a quantity that was given as text; return a number as it is."""
    if value is None or (isinstance(value, numbers.Real) and value is not True and math.isfinite(value)):
        return value
    if not isinstance(value, str):
        raise UsageError(f"{flag} {value!r} is no quantity; give a number, or text with a unit")
    try:
        return parse(value)
    except ConfigError as error:
        raise UsageError(f"{flag} {error}") from None


def count_ranks(config: Config) -> int:
    """Count the training processes of a run with ``config``, one a device."""
    named = config.run.device
    return max(config.run.n_ranks or 1, len(named) if isinstance(named, list) else 1)


def note_ranks(options: TuneOptions) -> tuple[str, ...]:
    """Explain what the figures of a search over several devices count; empty for one device."""
    if not options.rank_devices:
        return ()
    return (
        f"whole runs are measured in {options.n_ranks} processes ({', '.join(options.rank_devices)}), as train starts "
        "them: batch_size and samples/s are those of all together, num_workers, threads and memory those of one; "
        "probes measure one rank's part on one device",
    )


def find_limits(options: TuneOptions, machine: Machine) -> tuple[int | None, float | None]:
    """Find the memory limit of each trial process in bytes, and the memory that picks must fit in GiB.

    Both are the limit that was asked for; under WSL at most what the GPU has before the driver spills. Without one a
    trial has a limit only where it would take the machine down, and picks must fit the device, or a rank's part of it.
    """
    on_cpu, asked_bytes = options.device == "cpu", options.memory_limit_bytes
    device_bytes = None if on_cpu else _find_device_memory_bytes(options, machine)
    spill_bytes = device_bytes if machine.is_wsl else None
    if asked_bytes is not None:
        limit_bytes = min(asked_bytes, spill_bytes or sys.maxsize)
        return limit_bytes, limit_bytes / 2**30
    if on_cpu:
        available, total = machine.memory_available_bytes, machine.memory_total_bytes
        free_bytes, all_bytes = (min(found, machine.memory_limit_bytes or sys.maxsize) for found in (available, total))
        return int(CPU_LIMIT_SHARE * free_bytes / options.n_ranks), all_bytes / options.n_ranks / 2**30
    return spill_bytes, device_bytes / 2**30 if device_bytes else None


def _find_device_memory_bytes(options: TuneOptions, machine: Machine) -> int | None:
    """Find the memory of the smallest GPU in use, under WSL what it has before the driver spills.

    None: one of them is not known.
    """
    totals = []
    for name in options.rank_devices or (options.device,):
        index = int(name.partition(":")[2] or 0)
        totals.append(machine.devices[index].memory_total_bytes if index < len(machine.devices) else None)
    known = [total_bytes for total_bytes in totals if total_bytes is not None]
    return compute_usable_device_bytes(min(known), is_wsl=machine.is_wsl) if len(known) == len(totals) else None
