"""Write a run's weights as one safetensors file: EMA weights by default, where the run kept them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from fulltilt._version import __version__
from fulltilt.engine.checkpoints.checkpoint import load_checkpoint
from fulltilt.errors import RunFolderError, UsageError
from fulltilt.records.run_folder import find_other_content, write_atomic

Weights = Literal["model", "ema"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What was written."""

    path: str
    weights: Weights  # "ema": the moving average of the weights
    checkpoint: str  # where they come from
    n_tensors: int
    n_bytes: int
    metadata: dict[str, str]  # as it stands in the file
    notes: tuple[str, ...] = ()  # what the file does not hold, and why the checkpoint is not the newest


def export_weights(folder: str | Path, out: str | Path, *, weights: Weights | None = None) -> Export:
    """Write the weights of the newest whole checkpoint in ``folder`` to ``out``, whole or not at all.

    Names are those of the bare model, each with a tensor of its own: weights that the model ties are in the file as
    often as they have names, so that ``load_state_dict`` finds all of them.

    Args:
        weights: The moving average where the run kept one, else the model's own, when None.

    Raises:
        RunFolderError: there is no checkpoint, or none that can be read.
        UsageError: the run kept no moving average, safetensors is not installed, or ``out`` holds something else.
        StorageError: ``out`` cannot be written.

    **Cost**: the checkpoint and one copy of the weights in memory.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise UsageError(f"export needs the package safetensors ({error}); pip install 'fulltilt[export]'") from error
    folder = Path(folder)
    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder}; name the folder of a training")
    loaded = load_checkpoint(folder)
    if loaded is None:
        raise RunFolderError(f"{folder} holds no checkpoint; train with run.checkpoint_every, or name another folder")
    if obstacle := find_other_content(Path(out), b"{", at=8):  # behind its length a header begins
        raise UsageError(f"{out} {obstacle}")
    if weights == "ema" and not loaded.state["average"]:
        raise UsageError(f"{loaded.path} holds no moving average of the weights (optim.ema); give --weights model")
    chosen = weights or find_evaluated(loaded.state)
    tensors, left_out = _select_tensors(read_weights(loaded.state, chosen))
    metadata = _describe(loaded.state, chosen)
    data = save(tensors, metadata)
    write_atomic(Path(out), data)
    notes = [loaded.note] if loaded.note else []
    notes += [f"not tensors, so not in the file: {', '.join(left_out)}"] if left_out else []
    return Export(
        path=str(out),
        weights=chosen,
        checkpoint=str(loaded.path),
        n_tensors=len(tensors),
        n_bytes=len(data),
        metadata=metadata,
        notes=tuple(notes),
    )


def find_evaluated(state: Mapping[str, Any]) -> Weights:
    """Name the weights that evaluations took: the running average where the run kept one."""
    return "ema" if state["average"] else "model"


def read_weights(state: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Read weights by name. What is not averaged (counters, tables, frozen weights) is the model's own in both."""
    model = dict(state["model"])
    if weights == "model":
        return model
    average = state["average"]["weights"]
    by_place = {_find_place(model[name]): value for name, value in average.items()}  # a tied weight is averaged once
    return {
        name: by_place.get(_find_place(value), value) if isinstance(value, torch.Tensor) else value
        for name, value in model.items()
    } | dict(average)


def _find_place(tensor: torch.Tensor) -> tuple[int, ...]:
    """Tell where a weight lies: the same for two names of it; an empty one lies nowhere, its shape tells it apart."""
    return (tensor.data_ptr() or id(tensor), *tensor.shape, *tensor.stride())


def _select_tensors(saved: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return tensors, none of which shares memory with another, and the names of what is no tensor."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            place = value.untyped_storage().data_ptr()
            tensors[name] = value.clone(memory_format=torch.contiguous_format) if place in seen else value.contiguous()
            seen.add(place)
    return tensors, [name for name in saved if name not in tensors]


def _describe(state: Mapping[str, Any], weights: Weights) -> dict[str, str]:
    progress, evaluations = state["progress"], state["evaluations"]
    metrics = dict(evaluations[-1]["metrics"]) if evaluations else {}
    described = {
        "format": "pt",
        "fulltilt.version": __version__,
        "fulltilt.weights": weights,
        "fulltilt.epoch": str(progress["epoch"]),
        "fulltilt.step": str(progress["step"]),
        "fulltilt.metrics": json.dumps(metrics),
        "fulltilt.metrics_step": str(evaluations[-1]["step"]) if evaluations else "",
        "fulltilt.config_digest": state["config_digest"] or "",
    }
    return {name: text for name, text in described.items() if text}
