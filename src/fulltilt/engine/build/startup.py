"""Describes a run before its first step: the device, the numerics, the samples of one update, the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fulltilt.engine.build.budget import HostBudget
from fulltilt.hardware import count_usable_cores, is_wsl, read_cpu_model, read_memory_bytes, read_memory_limit_bytes
from fulltilt.records import format_bytes

if TYPE_CHECKING:
    from fulltilt.engine.build.run import Run


def describe_start(run: Run, budget: HostBudget | None) -> tuple[str, ...]:
    """Return one line each on device, numerics, batch and data.

    Device: reads what is free there, does not synchronise.
    """
    device = describe_gpu(run.device) if run.device.type == "cuda" else _describe_cpu()
    return (device, _describe_numerics(run), _describe_batch(run), _describe_data(run, budget))


def _describe_cpu() -> str:
    total, available = read_memory_bytes()
    limit = read_memory_limit_bytes()
    limited = f", limited to {format_bytes(limit)}" if limit is not None and limit < total else ""
    wsl = ", WSL2" if is_wsl() else ""
    return (
        f"CPU: {read_cpu_model() or 'unknown model'}{wsl}, {count_usable_cores()} usable cores, torch uses "
        f"{torch.get_num_threads()} threads, {format_bytes(available)} of {format_bytes(total)} memory free{limited}"
    )


def describe_gpu(device: torch.device) -> str:
    """Name a GPU, its free memory, cuDNN, and the share that ``--memory-limit`` leaves."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    limited = f", limited to {format_bytes(share * total)}" if share < 1 else ""
    mode = "on" if torch.backends.cudnn.benchmark else "off"
    wsl = ", WSL2" if is_wsl() else ""
    return (
        f"GPU: {torch.cuda.get_device_name(device)}{wsl}, {format_bytes(free)} of {format_bytes(total)} free{limited}, "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version() or 'absent'} (benchmark {mode})"
    )


def _describe_numerics(run: Run) -> str:
    """Say what the step computes in, as it was set up, not as it was asked for."""
    setup, plan = run.setup, run.plan
    words = [f"precision {plan['precision']}{', no' if setup.autocast_dtype is None else ' by'} autocast"]
    words += ["loss scaling"] if setup.scaler is not None else []
    switches = ("compile", "channels_last", "activation_checkpointing")
    return ", ".join([*words, *(f"{name} {_say(plan[name])}" for name in switches if name in plan)])


def _describe_batch(run: Run) -> str:
    batch_size, accumulate = run.plan["batch_size"], run.plan["accumulate"]
    length = "a stream of samples"
    if run.n_samples is not None:
        length = f"{run.n_samples:,} samples, {run.steps_per_epoch:,} optimizer steps an epoch"
    return f"batch: {batch_size} × accumulate {accumulate}, {batch_size * accumulate} samples an update; {length}"


def _describe_data(run: Run, budget: HostBudget | None) -> str:
    n_workers = run.loader.num_workers
    if not n_workers:
        return "data: read in the training process"
    words = [f"data: {n_workers} worker{'s' if n_workers > 1 else ''}, {run.loader.prefetch_factor} batches ahead each"]
    words += ["page-locked"] if run.loader.pin_memory else []
    if budget is not None:
        words.append(f"{format_bytes(budget.batches_bytes)} of {format_bytes(budget.free_bytes)} free memory for them")
    return ", ".join(words)


def _say(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
