"""A transformer encoder of text: one vector a text, or the scores of its classes.

Shapes: B batch, L words of the longest text, W width, K classes.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.tasks.models.transformer import TextModel

PAD_ID = 0  # as ``data.text.passages`` pads


class TextEncoder(TextModel):
    """Gives each text a vector of length 1: the mean over its words, padding left out.

    Padding is found in the words themselves, so a text has the same vector in every batch. MiniLM has depth 6,
    width 384 and heads 12; BERT-base depth 12, width 768 and heads 12.
    """

    def encode(self, words_BL: Tensor) -> Tensor:
        """Return the mean (B, W) over the words of each text."""
        # The first place always counts, so that a row of padding alone gives numbers too.
        is_word_BL = (words_BL != PAD_ID) | (torch.arange(words_BL.shape[1], device=words_BL.device) == 0)
        x_BLW = self.embedding(words_BL)
        for block in self.blocks:
            x_BLW = block(x_BLW, is_word_BL[:, None, None, :])
        kept_BL1 = is_word_BL.unsqueeze(-1).to(x_BLW.dtype)
        return self.norm((x_BLW * kept_BL1).sum(1) / kept_BL1.sum(1))

    def forward(self, words_BL: Tensor) -> Tensor:
        return functional.normalize(self.encode(words_BL), dim=-1)


class TextClassifier(TextEncoder):
    """Gives the scores (B, K) of the classes that a text may be of."""

    def __init__(
        self,
        *,
        vocab_size: Annotated[int, Ge(2)],
        n_classes: Annotated[int, Ge(1)] = 2,
        max_len: Annotated[int, Ge(1)] = 256,
        depth: Annotated[int, Ge(1)] = 2,
        width: Annotated[int, Ge(1)] = 128,
        heads: Annotated[int, Ge(1)] = 4,
        dropout: Annotated[float, Ge(0.0), Lt(1.0)] = 0.1,
    ) -> None:
        super().__init__(vocab_size=vocab_size, max_len=max_len, depth=depth, width=width, heads=heads, dropout=dropout)
        self.head = nn.Linear(width, n_classes)

    def forward(self, words_BL: Tensor) -> Tensor:
        return self.head(self.encode(words_BL))
