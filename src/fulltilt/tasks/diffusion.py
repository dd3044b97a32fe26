"""Denoising diffusion with noise prediction (Ho et al. 2020, arXiv 2006.11239).

Shapes: B batch, T timesteps, L labels; x has any shape behind B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.errors import UsageError, format_nearest
from fulltilt.tasks.losses import Loss, mse
from fulltilt.tasks.recipes import pick_metrics
from fulltilt.tasks.workload import Workload

MAX_BETA = 0.999  # a beta of 1 would leave no signal at all


class NoisePrediction:
    """``prepare`` of the task: ``(x, label) → ((x_noisy, t, label), noise)``, drawn on the device.

    t and noise come from ``generator`` alone: with a fixed seed, validation losses of epochs and runs are comparable.

    Device: the first batch on a device copies the schedule there, which syncs; no later one does.
    """

    def __init__(self, betas_T: Tensor, *, normalize: Literal["none", "log"]) -> None:
        kept_T = torch.cumprod(1.0 - betas_T.double(), dim=0)
        self.signal_scale_T = kept_T.sqrt().float()
        self.noise_scale_T = (1.0 - kept_T).sqrt().float()
        self.normalize = normalize
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Any, generator: Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        if (
            not isinstance(batch, tuple | list)
            or len(batch) != 2
            or not all(isinstance(part, Tensor) for part in batch)
        ):
            raise UsageError(f"diffusion needs batches (inputs, labels) of two tensors, got {type(batch).__name__}")
        x, label = batch
        if self.normalize == "log":
            x, label = compress_signals(x), compress_signals(label)
        if x.device not in self._on_device:
            self._on_device[x.device] = (self.signal_scale_T.to(x.device), self.noise_scale_T.to(x.device))
        signal_scale_T, noise_scale_T = self._on_device[x.device]
        t_B = torch.randint(len(signal_scale_T), (x.shape[0],), device=x.device, generator=generator)
        noise = torch.randn(x.shape, device=x.device, dtype=x.dtype, generator=generator)
        per_sample = (-1,) + (1,) * (x.dim() - 1)
        x_noisy = signal_scale_T[t_B].view(per_sample) * x + noise_scale_T[t_B].view(per_sample) * noise
        return (x_noisy.to(x.dtype), t_B, label), noise

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_on_device": {}}  # copies on a device stay in their process


def compute_linear_betas(n_timesteps: int) -> Tensor:
    """Rise from 1e-4 to 0.02 over 1,000 steps; fewer steps are larger, so that as little signal is left."""
    stretch = 1000 / n_timesteps
    return torch.linspace(1e-4 * stretch, 0.02 * stretch, n_timesteps, dtype=torch.float64).clamp(max=MAX_BETA)


def compute_cosine_betas(n_timesteps: int) -> Tensor:
    """Keep cos² of the signal over the steps, offset 0.008 (Nichol and Dhariwal 2021, arXiv 2102.09672, eq. 17)."""
    steps = torch.arange(n_timesteps + 1, dtype=torch.float64) / n_timesteps
    kept = torch.cos((steps + 0.008) / 1.008 * math.pi / 2).square()
    return (1.0 - kept[1:] / kept[:-1]).clamp(max=MAX_BETA)


def compress_signals(x: Tensor) -> Tensor:
    """Return sign(x) · ln(1 + |x|) as float, with NaN and infinity read as 0.

    Signals of a detector span ten orders of magnitude and use infinity for "no hit"; these are single digits.
    """
    x = torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)
    return x.sign() * x.abs().log1p()


SCHEDULES: Mapping[str, Callable[[int], Tensor]] = {"linear": compute_linear_betas, "cosine": compute_cosine_betas}


def build_diffusion(
    *,
    model: Callable[[], nn.Module],
    train: Callable[[], Dataset],
    validation: Callable[[], Dataset] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    name: str = "diffusion",
    schedule: Literal["linear", "cosine"] = "linear",
    n_timesteps: Annotated[int, Ge(1)] = 1000,
    normalize: Literal["none", "log"] = "none",
    metrics: Sequence[str] = ("squared_error",),
) -> Workload:
    """Predict the noise in ``x`` from the noisy x, the timestep and the label: ``model(x_noisy, t_B, label)``.

    Args:
        normalize: ``none`` takes signals and labels as they are; ``log`` compresses them (``compress_signals``).
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"diffusion has no schedule {schedule!r}; {format_nearest(str(schedule), SCHEDULES)}")
    betas_T = SCHEDULES[schedule](n_timesteps)
    return Workload(
        model=model,
        dataset=train,
        validation=validation,
        loss=loss or mse(),
        optimizer=optimizer,
        metrics=pick_metrics(metrics),
        prepare=NoisePrediction(betas_T, normalize=normalize),
        name=name,
    )
