"""Find the largest batch that fits: ``find_batch_size``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fulltilt.config import Config
from fulltilt.errors import DeviceMemoryError, TrainingError, UsageError
from fulltilt.hardware import read_machine
from fulltilt.levers import default_plan
from fulltilt.records import Trial, TrialRequest, format_bytes
from fulltilt.tuner.question.options import TuneOptions, build_options, find_limits
from fulltilt.tuner.question.source import TuneTarget, resolve_target
from fulltilt.tuner.question.space import build_space
from fulltilt.tuner.search.search import merge_facts
from fulltilt.tuner.trials.target import ProcessTarget
from fulltilt.tuner.trials.trial import refuse_inside_trial

if TYPE_CHECKING:
    from fulltilt.tasks import Workload

Mode = Literal["train", "infer"]
KINDS: Mapping[str, str] = {"train": "fit", "infer": "inference"}
N_STEPS = 3  # the optimizer's state comes with the first one, what the allocator keeps with the second
STREAM_LIMIT = 65_536  # where the data does not say how many samples there are
PRECISION = 16  # the answer is within a sixteenth of what fits


def find_batch_size(
    target: Config | Workload | str | os.PathLike[str],
    *,
    start: int | None = None,
    limit: int | None = None,
    memory_limit: str | int | None = None,
    mode: Mode = "train",
    device: str | None = None,
    deadline: str | float | None = None,
    settings: Mapping[str, Any] | None = None,
    on_attempt: Callable[[int, str], None] | None = None,
) -> int:
    """Find the largest batch that fits in memory, within a sixteenth; each try is a process of its own.

    A try takes real steps, and what a training needs beside them (its largest samples, an evaluation, a checkpoint),
    or with ``mode="infer"`` real answers in evaluation mode. Sizes double until one does not fit, then the gap halves.

    Args:
        target: A Config, a Workload, a configuration file, or ``"module:object"``.
        start: The first size to try; that of the configuration when None.
        limit: The largest size of interest; by default all samples that there are.
        memory_limit: Bytes, or text such as ``12GiB``: a real limit, under which a try is refused memory.
        device: auto, cpu, cuda or cuda:N.
        deadline: Wall time of one try, in seconds or text such as ``10m``; a size that takes longer is too large.
        settings: Dotted keys that win over the configuration.
        on_attempt: Told each size that was tried, and "fits" or why it does not.

    Raises:
        UsageError: wrong arguments, or the workload cannot be built.
        DeviceMemoryError: not even one sample fits. TrainingError: a try failed for another reason than its size.
    """
    refuse_inside_trial("fulltilt.find_batch_size")
    if mode not in KINDS:
        raise UsageError(f"mode {mode!r} is unknown; valid: {', '.join(KINDS)}")
    for name, value in (("start", start), ("limit", limit)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} {value!r} is no batch size; give a whole number of at least 1")
    aim = resolve_target(target, settings)
    options = build_options(aim.config, memory_limit=memory_limit, device=device, deadline=deadline)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fulltilt-batch-size-")))
        trials = stack.enter_context(contextlib.closing(_build_target(aim, options, folder)))
        facts = merge_facts(trials.read_facts(default_plan({"batch_size": 1})).facts, read_machine(), options)
        plan = build_space(aim.config, facts).user_plan.replace(accumulate=1)
        most = min(limit or STREAM_LIMIT, facts.n_samples or STREAM_LIMIT)

        def attempt(size: int) -> Trial:
            row = trials(plan.replace(batch_size=size), id=f"b{size}", why="does it fit?", kind=KINDS[mode])
            if row.reason is not None:  # the folder goes with this call
                row = dataclasses.replace(row, reason=row.reason.partition(" (log: ")[0])
            if on_attempt is not None:
                on_attempt(size, row.reason or "fits")
            return row

        return search(attempt, start=min(start or plan["batch_size"], most), most=most, limit=options)


def search(attempt: Callable[[int], Trial], *, start: int, most: int, limit: TuneOptions) -> int:
    """Double the size while it fits, then halve the gap to the smallest that does not.

    Raises:
        DeviceMemoryError: one sample does not fit. TrainingError: a try failed otherwise.
    """
    fits, too_large, size = 0, most + 1, start
    while True:
        row = attempt(size)
        if row.status == "ok":
            fits = size
        elif row.status in ("out_of_memory", "timeout"):
            too_large = size
        else:
            raise TrainingError(f"a batch of {size} failed, and not for its size: {row.reason}")
        if too_large == 1:
            raise _build_error(row, limit)
        if too_large - fits <= max(1, fits // PRECISION):
            return fits
        is_open = too_large > most
        size = min(2 * fits, most) if is_open else (fits + too_large) // 2


def _build_error(row: Trial, options: TuneOptions) -> Exception:
    if row.status == "timeout":
        return TrainingError(f"a batch of 1 took too long: {row.reason}; give a longer deadline")
    asked = options.memory_limit_bytes
    within = "the memory there is" if asked is None else f"the memory limit of {format_bytes(asked)}"
    return DeviceMemoryError(
        f"a batch of 1 does not fit in {within} on {options.device} ({row.reason}); use a smaller model, precision "
        "bf16, speed.activation_checkpointing, or a larger memory_limit"
    )


def _build_target(aim: TuneTarget, options: TuneOptions, folder: Path) -> ProcessTarget:
    limit_bytes, _ = find_limits(options, read_machine())
    usual = TrialRequest(
        source=aim.source,
        device=options.device,
        n_steps=N_STEPS,
        seed=aim.config.run.seed,
        memory_limit_bytes=limit_bytes,
        deadline_s=options.deadline_s,
        rank_devices=options.rank_devices,
    )
    return ProcessTarget(usual, folder)
