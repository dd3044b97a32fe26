"""The models, levers and optimizers of ``memory_prediction``, whose peaks bend at different batch sizes.

Inputs are small so that a CPU can take the real step: where parameters, optimizer and activations outgrow each other
depends on no image size.

Shapes: B batch, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import TensorDataset

from fulltilt import Workload
from fulltilt.tasks.diffusion import build_diffusion
from fulltilt.tasks.models import build_model

N_CLASSES, N_TOKENS, VOCABULARY = 10, 128, 2000
N_SAMPLES = 8  # of a data set: as many as the largest window of accumulation takes at batch size 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload with its levers; ``target`` is the batch size to predict, from probes at a quarter of it at most."""

    name: str
    workload: Workload
    target: int
    levers: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def probes(self) -> list[int]:
        return [2**k for k in range(1, 12) if 2**k <= self.target // 4]


class Model(NamedTuple):
    """A model with its inputs, for any optimizer; ``target`` is as in ``Case``."""

    name: str
    workload: Workload
    target: int
    is_convolution: bool = False
    has_blocks: bool = True


class Setting(NamedTuple):
    """An optimizer and the levers that are not at their defaults."""

    name: str
    optimizer: Callable[[Any], optim.Optimizer]
    levers: dict[str, Any] = {}  # noqa: RUF012
    for_convolutions: bool = False
    for_blocks: bool = False


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y_BHTD = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class Gpt(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, depth: int = 4, width: int = 192, heads: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(N_TOKENS, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTC = self.token(x_BT) + self.place.weight[: x_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return functional.linear(self.norm(x_BTC), self.token.weight)


class GruTagger(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, N_CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        y_BTC, _ = self.gru(self.token(x_BT))
        return self.head(y_BTC[:, -1])


_sgd = functools.partial(optim.SGD, lr=1e-3, momentum=0.9)
_adamw = functools.partial(optim.AdamW, lr=1e-4)
_adam = functools.partial(optim.Adam, lr=1e-4)


def _classify(name: str, model: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Workload:
    return Workload(
        model=model,
        dataset=lambda: TensorDataset(inputs(), torch.zeros(N_SAMPLES, dtype=torch.long)),
        loss=nn.CrossEntropyLoss(),
        name=name,
    )


def _images(model: str, side_px: int) -> Workload:
    return _classify(
        model, lambda: build_model(model, n_classes=N_CLASSES), lambda: torch.zeros(N_SAMPLES, 3, side_px, side_px)
    )


def _convolutions(model: str, side_px: int, target: int, name: str | None = None) -> Model:
    return Model(name or model.replace(":", " "), _images(model, side_px), target, is_convolution=True)


ZEROS_BT = torch.zeros(N_SAMPLES, N_TOKENS, dtype=torch.long)
MLP = "mlp(n_features=784, n_outputs=10, hidden=512, depth=4)"
tokens = Workload(
    model=Gpt,
    dataset=lambda: TensorDataset(ZEROS_BT, ZEROS_BT),
    loss=lambda logits_BTV, y_BT: functional.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten()),
    name="gpt",
)
tags = _classify("gru", GruTagger, lambda: torch.zeros(N_SAMPLES, 64, dtype=torch.long))
rows = _classify("mlp", lambda: build_model(MLP), lambda: torch.zeros(N_SAMPLES, 784))
sensors = build_diffusion(
    model=lambda: build_model("sensor_transformer(n_sensors=256, hidden=64)"),
    train=lambda: TensorDataset(torch.zeros(N_SAMPLES, 2, 256), torch.zeros(N_SAMPLES, 6)),
    name="sensors",
)
vit = _images("timm:vit_tiny_patch16_224(img_size=64)", 64)

MODELS = (
    _convolutions("small_cnn(in_channels=3)", 32, 256, "own small_cnn"),
    Model("GPT 4x192", tokens, 64),
    Model("GRU 2x192", tags, 128, has_blocks=False),
    Model("own mlp 4x512", rows, 2048),
    Model("own sensor_transformer, diffusion", sensors, 32),
    Model("timm vit_tiny", vit, 64),
    _convolutions("resnet18(small_images=True)", 16, 64, "own resnet18"),
    _convolutions("wideresnet(depth=16, width=2)", 32, 64, "own wideresnet-16-2"),
    _convolutions("torchvision:resnet18", 64, 64),
    _convolutions("torchvision:resnet50", 48, 32),
    _convolutions("torchvision:vgg11", 32, 128),
    _convolutions("torchvision:mobilenet_v3_small", 64, 64),
    _convolutions("torchvision:densenet121", 32, 32),
)
SETTINGS = (
    Setting("adamw", _adamw),
    Setting("sgd", _sgd),
    Setting("adam, fused", _adam, {"fused_optimizer": True}),
    Setting("checkpointed", _adamw, {"activation_checkpointing": True}, for_blocks=True),
    Setting("accumulate 4", _adamw, {"accumulate": 4}),
    Setting("bf16", _adamw, {"precision": "bf16"}),
    Setting("channels_last", _sgd, {"channels_last": True}, for_convolutions=True),
)
FIRST = ("own small_cnn, adamw", "GPT 4x192, bf16", "GRU 2x192, sgd", "torchvision resnet18, checkpointed")


def build_cases() -> list[Case]:
    """Build every model under every setting that applies to it; the four that differ most first, for a quick run."""
    cases = [
        Case(
            name=f"{model.name}, {setting.name}",
            workload=dataclasses.replace(model.workload, optimizer=setting.optimizer),
            target=model.target,
            levers=setting.levers,
        )
        for setting in SETTINGS
        for model in MODELS
        if (model.is_convolution or not setting.for_convolutions) and (model.has_blocks or not setting.for_blocks)
    ]
    return sorted(cases, key=lambda case: case.name not in FIRST)
