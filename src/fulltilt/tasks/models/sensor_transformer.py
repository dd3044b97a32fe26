"""A transformer over the sensors of a detector that predicts the noise in their signals.

A sensor is a token: its two signals (charge, time), its place and a learned position. Timestep and labels steer every
block through adaptive layer norm whose gates start at zero (Peebles and Xie 2022, arXiv 2212.09748).

Shapes: B batch, S sensors, H hidden, N heads, D head width, L labels, F frequencies, G gates.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.errors import ConfigError

N_SIGNALS = 2
N_FREQUENCIES = 64  # sine and cosine of each: 128 features of a timestep
ALIGNED_HEAD_WIDTH = 8


class Attention(nn.Module):
    """Attention of every sensor to all sensors."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        q_BNSD, k_BNSD, v_BNSD = self.qkv(x_BSH).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        width = v_BNSD.shape[-1]
        # On a GPU the kernels that never hold S × S scores refuse fp32 heads narrower than a multiple of 4, and
        # what is left holds 0.8 GiB a sample and layer at 5,160 sensors and 8 heads. On a CPU padding is only work.
        pad = -width % ALIGNED_HEAD_WIDTH if x_BSH.is_cuda else 0
        y_BNSD = attend(q_BNSD, k_BNSD, v_BNSD, pad=pad)
        return self.out(y_BNSD.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, both shifted, scaled and gated by the condition."""

    def __init__(self, hidden: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        wide = max(1, round(hidden * mlp_ratio))
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, wide), nn.GELU(approximate="tanh"), nn.Linear(wide, hidden))
        self.steer = _build_steering(hidden, 6)

    def forward(self, x_BSH: Tensor, condition_BH: Tensor) -> Tensor:
        steer_B1G = self.steer(condition_BH).unsqueeze(1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = steer_B1G.chunk(6, dim=-1)
        x_BSH = x_BSH + gate_a * self.attention(_modulate(self.norm1(x_BSH), shift_a, scale_a))
        return x_BSH + gate_m * self.mlp(_modulate(self.norm2(x_BSH), shift_m, scale_m))


class SensorTransformer(nn.Module):
    """Predicts noise: ``(x_B2S, t_B, label_BL) -> (B, 2, S)``. Medium is depth 6, hidden 64; large 12 and 128.

    Args:
        geometry: Places of the sensors (3, S), in any unit: they are standardised here. A buffer, so that no batch
            carries it to the device. None: only the learned positions tell sensors apart.
        label_dropout: Share of the samples that train without their label, for classifier-free guidance (arXiv
            2207.12598). Not applied in ``eval()``.

    Raises:
        ConfigError: ``heads`` does not divide ``hidden``; ``geometry`` is not (3, n_sensors) or not finite.
    """

    def __init__(
        self,
        *,
        depth: Annotated[int, Ge(1)] = 3,
        hidden: Annotated[int, Ge(1)] = 16,
        heads: Annotated[int, Ge(1)] = 8,
        n_sensors: Annotated[int, Ge(1)] = 5160,
        n_labels: Annotated[int, Ge(1)] = 6,
        mlp_ratio: Annotated[float, Gt(0.0)] = 4.0,
        geometry: Tensor | None = None,
        label_dropout: Annotated[float, Ge(0.0), Lt(1.0)] = 0.1,
    ) -> None:
        if hidden % heads:
            divisors = [d for d in range(1, hidden + 1) if hidden % d == 0]
            raise ConfigError(
                f"sensor_transformer hidden {hidden} is not a multiple of heads {heads}; heads: {divisors}"
            )
        super().__init__()
        self.label_dropout = label_dropout
        self.register_buffer("geometry_S3", _standardise(geometry, n_sensors))
        # Wavelengths from 2 π to 20,000 π timesteps, geometrically spaced (arXiv 1706.03762, section 3.5).
        frequencies_F = torch.exp(-math.log(10_000.0) * torch.arange(N_FREQUENCIES) / N_FREQUENCIES)
        self.register_buffer("frequencies_F", frequencies_F, persistent=False)
        self.signal = nn.Linear(N_SIGNALS, hidden)
        self.place = nn.Linear(3, hidden)
        self.position_SH = nn.Parameter(0.02 * torch.randn(n_sensors, hidden))
        self.time = nn.Sequential(nn.Linear(2 * N_FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.label = nn.Sequential(nn.Linear(n_labels, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.no_label_H = nn.Parameter(0.02 * torch.randn(hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.steer = _build_steering(hidden, 2)
        self.head = nn.Linear(hidden, N_SIGNALS)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_B2S: Tensor, t_B: Tensor, label_BL: Tensor) -> Tensor:
        place_SH = self.place(self.geometry_S3) + self.position_SH
        x_BSH = self.signal(x_B2S.transpose(1, 2)) + place_SH
        condition_BH = self.time(self._embed_time(t_B)) + self._embed_label(label_BL)
        for block in self.blocks:
            x_BSH = block(x_BSH, condition_BH)
        shift_B1H, scale_B1H = self.steer(condition_BH).unsqueeze(1).chunk(2, dim=-1)
        return self.head(_modulate(self.norm(x_BSH), shift_B1H, scale_B1H)).transpose(1, 2)

    def _embed_time(self, t_B: Tensor) -> Tensor:
        """Return sines and cosines, computed in float32: a timestep of 999 has no room in bf16's 8 bits."""
        angle_BF = t_B.float().unsqueeze(1) * self.frequencies_F.float()
        return torch.cat((angle_BF.sin(), angle_BF.cos()), dim=1).to(self.position_SH.dtype)

    def _embed_label(self, label_BL: Tensor) -> Tensor:
        label_BH = self.label(label_BL)
        if not self.training or not self.label_dropout:
            return label_BH
        dropped_B1 = torch.rand(label_BL.shape[0], 1, device=label_BL.device) < self.label_dropout
        return torch.where(dropped_B1, self.no_label_H.to(label_BH.dtype), label_BH)


def attend(q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, *, pad: int = 0) -> Tensor:
    """Attend with ``pad`` zero columns added to every head, which change neither scores nor outputs."""
    if not pad:
        return functional.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD)
    width = q_BNSD.shape[-1]
    padded = (functional.pad(part, (0, pad)) for part in (q_BNSD, k_BNSD, v_BNSD))
    return functional.scaled_dot_product_attention(*padded, scale=1 / math.sqrt(width))[..., :width]


def _modulate(x_BSH: Tensor, shift_B1H: Tensor, scale_B1H: Tensor) -> Tensor:
    return x_BSH * (1 + scale_B1H) + shift_B1H


def _build_steering(hidden: int, n_parts: int) -> nn.Sequential:
    """Build the layer from the condition to shifts, scales and gates: zero at first, so that blocks are identities."""
    linear = nn.Linear(hidden, n_parts * hidden)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.SiLU(), linear)


def _standardise(geometry: Tensor | None, n_sensors: int) -> Tensor:
    """Return places (S, 3) with mean 0 and one common scale, so that distances keep their proportions."""
    if geometry is None:
        return torch.zeros(n_sensors, 3)
    if tuple(geometry.shape) != (3, n_sensors):
        raise ConfigError(
            f"sensor_transformer geometry is {tuple(geometry.shape)}, expected (3, {n_sensors}): x, y, z of each "
            "sensor; set n_sensors to the data's"
        )
    if not bool(torch.isfinite(geometry).all()):
        raise ConfigError("sensor_transformer geometry holds NaN or infinity; repair xpmt, ypmt, zpmt in the data file")
    place_S3 = geometry.detach().float().T.contiguous()
    place_S3 = place_S3 - place_S3.mean(dim=0)
    return place_S3 / place_S3.square().mean().sqrt().clamp_min(1e-12)
