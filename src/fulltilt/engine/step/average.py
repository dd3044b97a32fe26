"""The running average of the weights that ``optim.ema`` evaluates and keeps in the checkpoint beside the weights.

``torch.optim.swa_utils`` has no decay that grows from the start, averages every buffer or none, and keeps a second
module, whose state would be another format of checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class WeightAverage:
    """Exponential moving average of the trained parameters and of the running statistics of norm layers.

    After step n the average moves towards the weights by 1 − d, where d is ``decay`` or (1 + n) / (10 + n) while that
    is less: the random start is forgotten within a few steps. Other buffers are the model's own in evaluation.

    Device: one foreach pass over the weights a step, no synchronisation. Memory: the weights once more.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.n_updates = 0
        self._live = _find_averaged(model)
        self._live_list = list(self._live.values())
        self._average = [tensor.detach().clone() for tensor in self._live_list]

    def update(self, *_: Any) -> None:
        """Take in the weights after an optimizer step: a post-step hook of the optimizer."""
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        with torch.no_grad():
            torch._foreach_lerp_(self._average, self._live_list, 1.0 - decay)
        self.n_updates += 1

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the model hold the average inside the block. Pointers are exchanged, nothing is copied."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        return {"n_updates": self.n_updates, "weights": dict(zip(self._live, self._average, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved average; other names or shapes are a KeyError or RuntimeError."""
        with torch.no_grad():
            for name, mine in zip(self._live, self._average, strict=True):
                mine.copy_(state["weights"][name])
        self.n_updates = state["n_updates"]

    def _exchange(self) -> None:
        for live, mine in zip(self._live_list, self._average, strict=True):
            live.data, mine.data = mine.data, live.data


def _find_averaged(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            for name in ("running_mean", "running_var"):
                found[f"{prefix}.{name}".removeprefix(".")] = getattr(module, name)
    return found
