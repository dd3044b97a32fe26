"""Reads what the levers' guards may know of a workload on a device, and names its parts."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset

from fulltilt.data.loading.placement import (
    count_held_bytes,
    count_mixed_blocks,
    find_placements,
    read_free_device_bytes,
    read_free_ram_bytes,
)
from fulltilt.data.transforms.batch_transform import find_transforms
from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.errors import UsageError
from fulltilt.hardware import count_usable_cores, has_c_compiler, is_wsl
from fulltilt.levers import Facts
from fulltilt.levers import placement as placement_lever
from fulltilt.levers import precision as precision_lever
from fulltilt.levers.activation_checkpointing import count_blocks
from fulltilt.levers.threads import read_initial_threads
from fulltilt.records import Plan

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def describe(
    model: nn.Module,
    dataset: Any,
    device: torch.device,
    *,
    is_batch_known: bool = True,
    n_ranks: int = 1,
) -> Facts:
    """Read the facts of what is built already; the optimizer is left open.

    Args:
        is_batch_known: False where a collate function of the user's own decides what a batch is.
        n_ranks: That share the machine's memory.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    has_conv2d = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules())
    return Facts(
        device_type=device.type,
        compute_capability=capability,
        n_cores_usable=count_usable_cores(),
        n_threads=read_initial_threads(),
        is_wsl=is_wsl(),
        has_c_compiler=has_c_compiler(),
        has_conv=has_conv2d or any(p.dim() == 4 for p in model.parameters()),
        has_any_conv=any(isinstance(m, CONVS) for m in model.modules()),
        n_checkpointable=count_blocks(model),
        n_samples=count_dataset(dataset),
        is_iterable=isinstance(dataset, IterableDataset),
        has_native_bf16=_has_native_bf16(capability),
        placements=find_placements(dataset),
        data_bytes=count_held_bytes(dataset),
        free_ram_bytes=read_free_ram_bytes(n_processes=n_ranks),
        free_device_bytes=read_free_device_bytes(device),
        n_blocks_mixed=count_mixed_blocks(dataset),
        transforms=find_transforms(dataset) if is_batch_known else "own",
        is_held=getattr(dataset, "is_held", None),
    )


def resolve_plan(
    plan: Plan, facts: Facts, *, may_hold: bool = True, started_with: str | None = None, world: World = ALONE
) -> tuple[Plan, list[str]]:
    """Replace a precision and a placement of ``auto`` by what suits this machine now; notes say why.

    Args:
        may_hold: False where samples that cannot be read are left out.
        started_with: The placement of a run that goes on.
        world: Ranks take the placement that the first of them chose.
    """
    precision, note = precision_lever.resolve(plan["precision"], facts)
    notes = [f"precision: {note}"] if note else []
    plan = plan.replace(precision=precision)
    if plan["placement"] != "auto":
        return plan, notes
    chosen = placement_lever.resolve("auto", plan, facts, may_hold=may_hold, started_with=started_with)
    placement, note = world.hand_out(chosen)
    return plan.replace(placement=placement), [*notes, f"placement: {note}"]


def refuse_loader(dataset: Any, name: str) -> None:
    """Raise a UsageError where the user's code gave a DataLoader for a dataset, or what is none."""
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"the {name} is a DataLoader; give its dataset, data.batch_size and data.num_workers: fulltilt builds the "
            "loader"
        )
    if not any(hasattr(dataset, method) for method in ("__getitem__", "__getitems__", "__iter__")):
        raise UsageError(f"the {name} is of type {type(dataset).__name__}; its function must return a Dataset")


def count_dataset(dataset: Any) -> int | None:
    """Return the length of a map-style dataset; None for one that streams, whose length is a promise at most."""
    return None if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") else len(dataset)


def describe_data(dataset: Any, facts: Facts) -> str:
    """Name a training set by its class, its file where it has one, and its size."""
    file = getattr(dataset, "path", None)
    name = type(dataset).__name__ if file is None else f"{type(dataset).__name__} of {Path(str(file)).name}"
    size = "a stream" if facts.n_samples is None else f"{facts.n_samples} samples"
    return f"{name}, {size}" + ("" if facts.data_bytes is None else f", {facts.data_bytes} bytes in all")


def name_model(model: nn.Module) -> str:
    """Return a model's class, as it was written: torch renames one whose weights are divided over ranks."""
    return type(model).__name__.removeprefix("FSDP")


def name_device(device: torch.device) -> str:
    """Return "cpu", or what the driver calls the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def name_optimizer(optimizer: optim.Optimizer) -> str:
    """Name the class of torch.optim whose step runs: for a subclass with the inherited step, its base."""
    step = inspect.unwrap(type(optimizer).step)
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim") and inspect.unwrap(base.step) is step:
            return base.__name__
    return type(optimizer).__name__


def _has_native_bf16(capability: tuple[int, int] | None) -> bool | None:
    if capability is not None:
        return capability >= (8, 0)
    if not hasattr(torch.cpu, "get_capabilities"):  # not in every release
        return None
    features = torch.cpu.get_capabilities()
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
