"""expandable_segments: the CUDA allocator grows its segments instead of adding new ones."""

from typing import Any

from fulltilt.levers._spec import Lever, Setup

NAME = "expandable_segments"
_NO_ALLOCATOR = "it is an option of the CUDA allocator; use expandable_segments false"
_ON_WSL = (
    "under WSL2 the first allocation can fail with a CUDA driver error (pytorch/pytorch#192330); if it does, use false"
)


def _apply(setup: Setup, value: bool) -> None:
    """Set the option beside those of the environment (``PYTORCH_ALLOC_CONF``); present segments stay."""
    if setup.device.type != "cuda":
        return
    import torch

    settings = read_settings()
    if is_expandable(settings) == value:
        return
    others = [part for part in settings.split(",") if part and part.partition(":")[0] != NAME]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{NAME}:{value}"]))
    if not value:
        setup.notes.append(
            f"{NAME}=False: the environment has it on (PYTORCH_ALLOC_CONF) and the run goes without it; set "
            f"speed.{NAME} to true to keep it"
        )


def read_settings() -> str:
    """Read the allocator's settings; torch 2.11 has them in a snapshot only."""
    import torch

    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return torch._C._accelerator_getAllocatorSettings()
    snapshot: Any = torch.cuda.memory._snapshot()
    known = snapshot["allocator_settings"]
    return f"{known['PYTORCH_CUDA_ALLOC_CONF']},{NAME}:{known[NAME]}"


def is_expandable(settings: str) -> bool:
    """Read the option from the allocator's settings, "expandable_segments:True,max_split_size_mb:512"."""
    options = {name: value for name, _, value in (part.strip().partition(":") for part in settings.split(","))}
    return options.get(NAME, "").strip().lower() == "true"


def _observe(setup: Setup) -> bool:
    """Read the allocator's settings; where it has taken memory, whether its segments expand."""
    if setup.device.type != "cuda":
        return False
    import torch

    if not is_expandable(read_settings()):
        return False
    segments = torch.cuda.memory_snapshot()
    return not segments or any(segment.get("is_expandable") for segment in segments)


LEVER = Lever(
    name=NAME,
    key=f"speed.{NAME}",
    summary="The CUDA allocator grows its segments instead of adding new ones of fixed size.",
    doc=(
        "Against fragmentation: where batch shapes vary, memory that is reserved and free in pieces cannot serve a "
        "large request, and a run ends out of memory with gigabytes reserved. It is memory and not speed that it "
        "buys; with fixed shapes it changes little. Not all drivers support it (pytorch/pytorch#122057, #192330), and "
        "tensors cannot be shared with other processes by CUDA IPC in every release. What PYTORCH_ALLOC_CONF sets "
        "besides stays."
    ),
    trades=("speed", "memory"),
    stage="environment",
    restart=True,
    obstacle=lambda value, plan, facts: None if facts.device_type == "cuda" else _NO_ALLOCATOR,
    remark=lambda value, plan, facts: _ON_WSL if facts.is_wsl else None,
    apply=_apply,
    observe=_observe,
    is_offered=False,
)
