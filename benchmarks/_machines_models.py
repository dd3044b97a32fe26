"""Models of the simulated workloads, as lists of layers with their sizes. Nothing here knows a device.

A layer is what a profiler would show as one operator of the forward pass. Its product sizes are those of the matrix
multiplication it comes down to: ``rows`` per sample × ``depth`` times ``depth`` × ``cols``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

MATRIX = ("conv", "matmul", "attention")
"""Kinds that run on matrix units; the others only move memory."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One operator of the forward pass; element counts are per sample.

    Attributes:
        block: Number of the repeated block it belongs to, -1 outside of any: what checkpointing wraps.
        is_wide: Autocast leaves it in fp32 (layer norms, softmax, losses).
        n_serial: Kernels that run one after another (time steps of a recurrence).
    """

    kind: str
    rows: int = 0
    cols: int = 0
    depth: int = 0
    weights: int = 0
    in_elements: int
    out_elements: int
    block: int = -1
    is_wide: bool = False
    n_serial: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Layers of one network.

    Attributes:
        has_conv: 2-d convolutions, so that the memory layout is a lever.
        sample_bytes: One sample as it is copied to the device.
    """

    family: str
    size: str
    layers: tuple[Layer, ...]
    has_conv: bool
    sample_bytes: int

    @property
    def n_blocks(self) -> int:
        return 1 + max(layer.block for layer in self.layers)


def draw_model(rng: np.random.Generator, family: str, size: int) -> Model:
    """Draw a network of the family; ``size`` from 0 (small) to 3 (large)."""
    layers, has_conv, sample_bytes = FAMILIES[family](rng, size)
    name = ("small", "medium", "large", "huge")[size]
    return Model(family=family, size=name, layers=tuple(layers), has_conv=has_conv, sample_bytes=int(sample_bytes))


def _conv(
    channels: int, out: int, side: int, *, kernel: int = 3, stride: int = 1, block: int, groups: int = 1
) -> Layer:
    pixels = (side // stride) ** 2
    depth = kernel * kernel * channels // groups
    return Layer(
        kind="conv" if groups == 1 else "depthwise",
        rows=pixels, cols=out, depth=depth, weights=depth * out,
        in_elements=channels * side * side, out_elements=out * pixels, block=block,
    )  # fmt: skip


def _cells(elements: int, block: int, *kinds: str, is_wide: bool = False) -> list[Layer]:
    """Build norms and pointwise operators that keep the shape."""
    return [Layer(kind=k, in_elements=elements, out_elements=elements, block=block, is_wide=is_wide) for k in kinds]


def _linear(rows: int, depth: int, cols: int, block: int, *, is_wide: bool = False) -> Layer:
    return Layer(
        kind="matmul", rows=rows, cols=cols, depth=depth, weights=depth * cols,
        in_elements=rows * depth, out_elements=rows * cols, block=block, is_wide=is_wide,
    )  # fmt: skip


def _attention(tokens: int, width: int, block: int) -> list[Layer]:
    """Build a transformer block: pre-norm, attention without a stored score matrix, MLP of four times the width."""
    area = tokens * width
    core = Layer(
        kind="attention", rows=tokens * max(1, width // 64), cols=tokens, depth=128,
        in_elements=3 * area, out_elements=area, block=block,
    )  # fmt: skip
    return [
        *_cells(area, block, "norm", is_wide=True),
        _linear(tokens, width, 3 * width, block),
        core,
        _linear(tokens, width, width, block),
        *_cells(area, block, "pointwise"),
        *_cells(area, block, "norm", is_wide=True),
        _linear(tokens, width, 4 * width, block),
        *_cells(4 * area, block, "pointwise"),
        _linear(tokens, 4 * width, width, block),
        *_cells(area, block, "pointwise"),
    ]


def _build_cnn(rng: np.random.Generator, size: int) -> tuple[list[Layer], bool, float]:
    side = int(rng.choice([[32, 64, 96], [64, 128, 160], [160, 224], [224, 288, 384]][size]))
    width = int(rng.choice([[16, 32], [32, 48, 64], [64, 96], [96, 128]][size]))
    n_blocks = [[1, 1, 1], [2, 2, 2, 2], [3, 4, 6, 3], [3, 4, 18, 3]][size]
    is_mobile = rng.random() < 0.25
    layers = [_conv(3, width, side, stride=1 if side <= 64 else 2, block=-1)]
    at, channels, block = side if side <= 64 else side // 4, width, 0
    for stage, count in enumerate(n_blocks):
        out = width * 2**stage
        for number in range(count):
            stride = 2 if stage and not number and at > 7 else 1
            layers += (
                _mobile_block(channels, out, at, stride, block)
                if is_mobile
                else _residual_block(channels, out, at, stride, block)
            )
            at, channels, block = at // stride, out, block + 1
    layers.append(_linear(1, channels, 1000 if side > 100 else 100, -1))
    return layers, True, 3 * side * side * (4 if rng.random() < 0.7 else 1)


def _residual_block(channels: int, out: int, side: int, stride: int, block: int) -> list[Layer]:
    area = out * (side // stride) ** 2
    return [
        _conv(channels, out, side, stride=stride, block=block),
        *_cells(area, block, "norm", "pointwise"),
        _conv(out, out, side // stride, block=block),
        *_cells(area, block, "norm", "pointwise", "pointwise"),
    ]


def _mobile_block(channels: int, out: int, side: int, stride: int, block: int) -> list[Layer]:
    inner, small = 4 * channels, side // stride
    return [
        _conv(channels, inner, side, kernel=1, block=block),
        *_cells(inner * side * side, block, "norm", "pointwise"),
        _conv(inner, inner, side, stride=stride, block=block, groups=inner),
        *_cells(inner * small * small, block, "norm", "pointwise"),
        _conv(inner, out, small, kernel=1, block=block),
        *_cells(out * small * small, block, "norm", "pointwise"),
    ]


def _build_vit(rng: np.random.Generator, size: int) -> tuple[list[Layer], bool, float]:
    side, patch = int(rng.choice([[32, 64], [160, 224], [224], [224, 384]][size])), [4, 16, 16, 14][size]
    width, n_blocks = [(192, 6), (384, 12), (768, 12), (1024, 24)][size]
    tokens = (side // patch) ** 2 + 1
    stem = Layer(
        kind="conv", rows=tokens, cols=width, depth=3 * patch * patch, weights=3 * patch * patch * width,
        in_elements=3 * side * side, out_elements=tokens * width,
    )  # fmt: skip
    layers = [stem, *(layer for block in range(n_blocks) for layer in _attention(tokens, width, block))]
    layers.append(_linear(1, width, 1000, -1))
    return layers, True, 3 * side * side * 4


def _build_gpt(rng: np.random.Generator, size: int) -> tuple[list[Layer], bool, float]:
    width, n_blocks = [(256, 4), (384, 6), (768, 12), (1024, 24)][size]
    tokens = int(rng.choice([[64, 128, 256], [256, 512], [512, 1024], [1024, 2048]][size]))
    vocabulary = int(rng.choice([256, 8192, 32768, 50304]))
    stem = Layer(kind="gather", weights=vocabulary * width, in_elements=tokens, out_elements=tokens * width)
    layers = [stem, *(layer for block in range(n_blocks) for layer in _attention(tokens, width, block))]
    layers.append(dataclasses.replace(_linear(tokens, width, vocabulary, -1), weights=0))  # tied to the embedding
    layers += _cells(tokens * vocabulary, -1, "pointwise", is_wide=True)
    return layers, False, tokens * 16


def _build_unet(rng: np.random.Generator, size: int) -> tuple[list[Layer], bool, float]:
    side = [64, 128, 256, 512][size]
    width = int(rng.choice([[16, 32], [32, 48], [32, 64], [64]][size]))
    channels, at, block, layers = 3, side, 0, []
    steps = [(width * 2**i, 2 if i else 1) for i in range(4)] + [(width * 2**i, 0.5) for i in (2, 1, 0)]
    for out, stride in steps:
        at = int(at / stride)
        inside = channels if stride >= 1 else channels + out
        layers += _residual_block(inside, out, at, 1, block)
        channels, block = out, block + 1
    layers.append(_conv(channels, 4, at, kernel=1, block=-1))
    layers += _cells(4 * at * at, -1, "pointwise", is_wide=True)
    return layers, True, 3 * side * side * 4 + side * side * 8


def _build_tabular(rng: np.random.Generator, size: int) -> tuple[list[Layer], bool, float]:
    width, n_blocks = [(64, 3), (256, 4), (512, 6), (1024, 12)][size]
    features = int(rng.choice([16, 64, 256, 1024]))
    layers = [_linear(1, features, width, -1)]
    for block in range(n_blocks):
        layers += [_linear(1, width, width, block), *_cells(width, block, "norm", "pointwise", "pointwise")]
    layers.append(_linear(1, width, 10, -1))
    return layers, False, features * 4


def _build_audio(rng: np.random.Generator, size: int) -> tuple[list[Layer], bool, float]:
    """Convolutions over a spectrogram, then a recurrence over time or a transformer."""
    frames, bands = int(rng.choice([[64, 128], [128, 256], [256, 512], [512, 1024]][size])), 80
    width, n_blocks = [(64, 2), (192, 3), (384, 6), (512, 12)][size]
    side = int(math.sqrt(frames * bands))
    layers = [_conv(1, width // 2, side, stride=2, block=-1)]
    layers += _cells(width // 2 * (side // 2) ** 2, -1, "norm", "pointwise")
    layers.append(_conv(width // 2, width, side // 2, stride=2, block=-1))
    tokens = frames // 4
    is_recurrent = rng.random() < 0.4
    for block in range(n_blocks):
        if is_recurrent:
            core = dataclasses.replace(_linear(tokens, 2 * width, 4 * width, block), n_serial=tokens)
            layers += [core, *_cells(tokens * width, block, "norm", is_wide=True)]
        else:
            layers += _attention(tokens, width, block)
    layers.append(_linear(tokens, width, 64, -1))
    return layers, True, frames * bands * 4


FAMILIES: Mapping[str, Callable[[np.random.Generator, int], tuple[Sequence[Layer], bool, float]]] = {
    "cnn": _build_cnn,
    "vit": _build_vit,
    "gpt": _build_gpt,
    "unet": _build_unet,
    "tabular": _build_tabular,
    "audio": _build_audio,
}
