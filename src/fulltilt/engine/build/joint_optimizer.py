"""An optimizer that joins several, each for parameters of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import optim


class JointOptimizer(optim.Optimizer):
    """Steps every part; schedules, scalers and checkpoints see one optimizer with the groups of all.

    Groups and state are shared with the parts, not copied: a learning rate that is set here is theirs.

    Args:
        parts: Optimizers that have not stepped yet, of disjoint parameters.
    """

    def __init__(self, parts: Sequence[optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = tuple(parts)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(dict(state_dict))
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def _share(self) -> None:
        """Let the parts work on this optimizer's groups and state; loading made new ones."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
