"""A bidirectional LSTM language model: two stacks that read the same words from either end.

Shapes: B batch, T words of a window and the one behind it, S = T - 1 predictions of each direction, E embedding,
P projection.

Source: Peters et al. 2018, arXiv 1802.05365 (ELMo); LSTMs with a projection: Sak et al. 2014, arXiv 1402.1128.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor, nn


class LSTMStack(nn.Module):
    """LSTM layers with a projection, (B, S, E) to (B, S, P).

    Without residuals all layers are one ``nn.LSTM``, which cuDNN computes in one call; with them every layer that is
    as wide as its input adds it.
    """

    def __init__(
        self, n_inputs: int, hidden: int, projection: int, depth: int, dropout: float, *, residual: bool
    ) -> None:
        super().__init__()
        sizes = [(n_inputs, 1), *[(projection, 1)] * (depth - 1)] if residual else [(n_inputs, depth)]
        self.layers = nn.ModuleList(
            nn.LSTM(
                size, hidden, n_layers, batch_first=True, proj_size=projection, dropout=dropout if n_layers > 1 else 0.0
            )
            for size, n_layers in sizes
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSE: Tensor) -> Tensor:
        x = x_BSE
        with _without_onednn(x.device.type):
            for number, layer in enumerate(self.layers):
                y, _ = layer(self.dropout(x) if number else x)
                x = x + y if number and x.shape == y.shape else y
        return x


class BiLM(nn.Module):
    """Guide 004's encoder: predicts each position from the words before it, and from those after it.

    Args:
        embedding: E; the layer of that name maps V words to it.
        projection: P, also as ``n_features``; smaller than ``hidden``.
        residual: Add up layers as ELMo does.
    """

    def __init__(
        self,
        *,
        vocab_size: Annotated[int, Ge(2)],
        depth: Annotated[int, Ge(1), Le(8)] = 2,
        embedding: Annotated[int, Ge(1)] = 256,
        hidden: Annotated[int, Ge(2)] = 512,
        projection: Annotated[int, Ge(1)] = 128,
        dropout: Annotated[float, Ge(0.0), Lt(1.0)] = 0.1,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding)
        nn.init.normal_(self.embedding.weight, std=embedding**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.forwards = LSTMStack(embedding, hidden, projection, depth, dropout, residual=residual)
        self.backwards = LSTMStack(embedding, hidden, projection, depth, dropout, residual=residual)
        self.n_features = projection

    def forward(self, words_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return two (B, S, P): position s of the first has read words 0…s, of the second words s + 1…S backwards."""
        # One look-up for both directions: its gradient is as large as the whole table.
        x_BTE = self.dropout(self.embedding(words_BT))
        forwards_BSP = self.forwards(x_BTE[:, :-1])
        backwards_BSP = self.backwards(x_BTE[:, 1:].flip(1)).flip(1)
        return self.dropout(forwards_BSP), self.dropout(backwards_BSP)


@contextlib.contextmanager
def _without_onednn(device_type: str) -> Iterator[None]:
    """Keep oneDNN from warning that it has no LSTM with a projection; torch's own runs either way."""
    was_on = torch.backends.mkldnn.enabled
    if device_type != "cpu" or not was_on:
        yield
        return
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was_on
