"""Optimizers by name, with PyTorch's defaults; ``optim.optimizer: sgd(momentum=0.9)`` in a configuration."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import optim

from fulltilt.errors import UsageError


class JointOptimizer(optim.Optimizer):
    """Several optimizers as one, each for parameters of its own: the groups of all are its groups.

    Groups and state are shared with the parts, which have not stepped yet: a learning rate that is set here is theirs.
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


def _define(kind: type[optim.Optimizer], **defaults: float) -> Callable[..., optim.Optimizer]:
    """Wrap an optimizer of torch in a function of plain numbers: ``beta1`` and ``beta2`` are its ``betas``."""

    def build(parameters: Any, **options: Any) -> optim.Optimizer:
        options = defaults | {name: value for name, value in options.items() if value is not None}
        if "beta1" in options:
            options["betas"] = options.pop("beta1"), options.pop("beta2")
        return kind(parameters, **options)

    listed = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=v) for name, v in defaults.items()]
    first = inspect.Parameter("parameters", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    build.__signature__ = inspect.Signature([first, *listed])  # type: ignore[attr-defined]
    build.__annotations__ = {name: type(value) for name, value in defaults.items()} | {"weight_decay": float | None}
    return build


def muon(
    parameters: Any,
    *,
    lr: float = 1e-3,
    weight_decay: float | None = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    other_lr: float = 1e-3,
) -> optim.Optimizer:
    """Build torch.optim.Muon for matrices and AdamW with ``other_lr`` for everything else; a schedule scales both.

    Matrices are the 2-d weights, those of embeddings and of the last layer among them: a list of parameters does not
    tell them apart. Weights of convolutions have four dimensions and are AdamW's.

    Raises:
        UsageError: there is no matrix.
    """
    listed = list(parameters)
    matrices = [p for p in listed if p.dim() == 2]
    others = [p for p in listed if p.dim() != 2]
    if not matrices:
        raise UsageError("optim.optimizer muon needs 2-d weights, and the model has none that is trained; use adamw")
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    of_matrices = optim.Muon(matrices, lr=lr, momentum=momentum, nesterov=nesterov, **decay)
    return JointOptimizer([of_matrices, optim.AdamW(others, lr=other_lr, **decay)]) if others else of_matrices


_ADAM = {"lr": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

OPTIMIZERS: Mapping[str, Callable[..., optim.Optimizer]] = MappingProxyType(
    {
        "sgd": _define(optim.SGD, lr=1e-3, weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False),
        "adam": _define(optim.Adam, **_ADAM, amsgrad=False),
        "adamw": _define(optim.AdamW, **_ADAM | {"weight_decay": 1e-2}, amsgrad=False),
        "rmsprop": _define(
            optim.RMSprop, lr=1e-2, weight_decay=0.0, alpha=0.99, eps=1e-8, momentum=0.0, centered=False
        ),
        "adagrad": _define(optim.Adagrad, lr=1e-2, weight_decay=0.0, lr_decay=0.0, eps=1e-10),
        "nadam": _define(optim.NAdam, **_ADAM | {"lr": 2e-3}),
        "muon": muon,
    }
)
