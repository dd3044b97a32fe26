"""Optimizers by name, with PyTorch's defaults; ``optim.optimizer: sgd(momentum=0.9)`` in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import optim

from fulltilt.engine.build.joint_optimizer import JointOptimizer
from fulltilt.errors import UsageError


def sgd(
    parameters: Any,
    *,
    lr: float = 1e-3,
    weight_decay: float | None = None,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> optim.Optimizer:
    return optim.SGD(
        parameters, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay or 0.0, nesterov=nesterov
    )


def adam(
    parameters: Any,
    *,
    lr: float = 1e-3,
    weight_decay: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    amsgrad: bool = False,
) -> optim.Optimizer:
    return optim.Adam(
        parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay or 0.0, amsgrad=amsgrad
    )


def adamw(
    parameters: Any,
    *,
    lr: float = 1e-3,
    weight_decay: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    amsgrad: bool = False,
) -> optim.Optimizer:
    """Weight decay is 0.01 when none is given, as in torch.optim."""
    decay = 1e-2 if weight_decay is None else weight_decay
    return optim.AdamW(parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, amsgrad=amsgrad)


def rmsprop(
    parameters: Any,
    *,
    lr: float = 1e-2,
    weight_decay: float | None = None,
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    centered: bool = False,
) -> optim.Optimizer:
    return optim.RMSprop(
        parameters,
        lr=lr,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay or 0.0,
        momentum=momentum,
        centered=centered,
    )


def adagrad(
    parameters: Any,
    *,
    lr: float = 1e-2,
    weight_decay: float | None = None,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
) -> optim.Optimizer:
    return optim.Adagrad(parameters, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay or 0.0, eps=eps)


def nadam(
    parameters: Any,
    *,
    lr: float = 2e-3,
    weight_decay: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> optim.Optimizer:
    return optim.NAdam(parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay or 0.0)


def muon(
    parameters: Any,
    *,
    lr: float = 1e-3,
    weight_decay: float | None = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    other_lr: float = 1e-3,
) -> optim.Optimizer:
    """torch.optim.Muon for matrices, AdamW with ``other_lr`` for everything else; a schedule scales both.

    Matrices are the 2-d weights, those of embeddings and of the last layer among them: a list of parameters does not
    tell them apart. Weights of convolutions have four dimensions, which torch.optim.Muon does not take: they are
    AdamW's.

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


OPTIMIZERS: Mapping[str, Callable[..., optim.Optimizer]] = MappingProxyType(
    {"sgd": sgd, "adam": adam, "adamw": adamw, "rmsprop": rmsprop, "adagrad": adagrad, "nadam": nadam, "muon": muon}
)
