"""What peak memory is predicted for: models, levers and optimizers whose peaks bend at different batch sizes.

Inputs are small so that a CPU can take the real step: what counts is where parameters, optimizer and activations
outgrow each other, which no image size changes.

Shapes: B batch, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

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


def build_cases() -> list[Case]:
    """Ordered so that the first four differ most: a quick run takes those."""
    own = "own "
    return [
        Case(name=own + "small_cnn, adamw", workload=_images("small_cnn(in_channels=3)", 32), target=256),
        Case(name="GPT 4x192, adamw", workload=_tokens(Gpt), target=64),
        Case(name="GRU 2x192, adam", workload=_tags(optimizer=optim.Adam), target=128),
        Case(
            name="torchvision resnet18, sgd",
            workload=_images("torchvision:resnet18", 64, optimizer=_sgd),
            target=64,
        ),
        Case(name=own + "wideresnet-16-2, sgd", workload=_images(_WIDE, 32, optimizer=_sgd), target=64),
        Case(
            name=own + "resnet18, adam, channels_last",
            workload=_images("resnet18(small_images=True)", 16, optimizer=optim.Adam),
            target=64,
            levers={"channels_last": True},
        ),
        Case(
            name=own + "resnet18, adamw, checkpointed",
            workload=_images("resnet18(small_images=True)", 24),
            target=64,
            levers={"activation_checkpointing": True},
        ),
        Case(name="torchvision resnet50, adamw", workload=_images("torchvision:resnet50", 48), target=32),
        Case(
            name="torchvision resnet50, checkpointed",
            workload=_images("torchvision:resnet50", 48, optimizer=_sgd),
            target=32,
            levers={"activation_checkpointing": True},
        ),
        Case(
            name="torchvision vgg11, sgd",
            workload=_images("torchvision:vgg11", 32, optimizer=_sgd),
            target=128,
        ),
        Case(
            name="timm vit_tiny, adamw, fused",
            workload=_images("timm:vit_tiny_patch16_224(img_size=64)", 64),
            target=64,
            levers={"fused_optimizer": True},
        ),
        Case(
            name="timm vit_tiny, bf16",
            workload=_images("timm:vit_tiny_patch16_224(img_size=64)", 64),
            target=32,
            levers={"precision": "bf16"},
        ),
        Case(
            name="GPT 4x192, checkpointed",
            workload=_tokens(Gpt),
            target=64,
            levers={"activation_checkpointing": True},
        ),
        Case(name="GPT 4x192, bf16", workload=_tokens(Gpt), target=32, levers={"precision": "bf16"}),
        Case(name=own + "mlp, fp16 with scaler", workload=_mlp(), target=2048, levers={"precision": "fp16"}),
        Case(name=own + "mlp, accumulate 4", workload=_mlp(), target=2048, levers={"accumulate": 4}),
        Case(name=own + "sensor_transformer, diffusion", workload=_sensors(), target=32),
        Case(name="torchvision mobilenet_v3_small", workload=_images("torchvision:mobilenet_v3_small", 64), target=64),
    ]


_WIDE = "wideresnet(depth=16, width=2)"


def _sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=1e-4)


def _images(model: str, side_px: int, optimizer: Callable[[Any], optim.Optimizer] = _adamw) -> Workload:
    return Workload(
        model=lambda: build_model(model, n_classes=N_CLASSES),
        dataset=lambda: TensorDataset(
            torch.zeros(N_SAMPLES, 3, side_px, side_px), torch.zeros(N_SAMPLES, dtype=torch.long)
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        name=model,
    )


def _tokens(model: Callable[[], nn.Module]) -> Workload:
    zeros_BT = torch.zeros(N_SAMPLES, N_TOKENS, dtype=torch.long)
    return Workload(
        model=model,
        dataset=lambda: TensorDataset(zeros_BT, zeros_BT),
        loss=lambda logits_BTV, y_BT: functional.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten()),
        optimizer=_adamw,
        name="gpt",
    )


def _tags(optimizer: Callable[[Any], optim.Optimizer]) -> Workload:
    return Workload(
        model=GruTagger,
        dataset=lambda: TensorDataset(
            torch.zeros(N_SAMPLES, 64, dtype=torch.long), torch.zeros(N_SAMPLES, dtype=torch.long)
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        name="gru",
    )


def _mlp() -> Workload:
    return Workload(
        model=lambda: build_model("mlp(n_features=784, n_outputs=10, hidden=512, depth=4)"),
        dataset=lambda: TensorDataset(torch.zeros(N_SAMPLES, 784), torch.zeros(N_SAMPLES, dtype=torch.long)),
        loss=nn.CrossEntropyLoss(),
        optimizer=_adamw,
        name="mlp",
    )


def _sensors() -> Workload:
    return build_diffusion(
        model=lambda: build_model("sensor_transformer(n_sensors=256, hidden=64)"),
        train=lambda: TensorDataset(torch.zeros(N_SAMPLES, 2, 256), torch.zeros(N_SAMPLES, 6)),
        name="sensors",
    )
