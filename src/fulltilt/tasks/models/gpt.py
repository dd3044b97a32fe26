"""A transformer that predicts the next word, and keeps what it has read while it writes on.

Shapes: B batch, T words, S words read so far, V words of the vocabulary.
"""

import dataclasses

import torch
from torch import Tensor

from fulltilt.tasks.models.transformer import KeyValues, TextModel


@dataclasses.dataclass
class Cache:
    """Keys and values of the words that each row has read, with room for those to come.

    Attributes:
        lengths: Words (B,) read by each row.
        longest: The largest of them, known without asking the device.
    """

    blocks: list[KeyValues]
    lengths: Tensor
    longest: int = 0


class GPT(TextModel):
    """Scores (B, T, V) the word behind each word by what precedes it. Its output layer is its embedding."""

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTW = self.embedding(words_BT)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return self.norm(x_BTW) @ self.embedding.word.weight.T

    def build_cache(self, n_rows: int, length: int) -> Cache:
        """Allocate the cache of so many rows, each of at most ``length`` words."""
        weight = self.embedding.word.weight
        shape = (n_rows, self.heads, length, weight.shape[1] // self.heads)
        blocks = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks]
        return Cache(blocks, torch.zeros(n_rows, dtype=torch.long, device=weight.device))

    def read_on(self, words_BT: Tensor, cache: Cache, n_new_B: Tensor | None = None) -> Tensor:
        """Read the next words of each row into ``cache`` → scores (B, V) of the word behind.

        Args:
            n_new_B: How many of the T words are a row's own, from the first on; None: all. What fills the rest lies
                behind the row's end in the cache, where nothing looks before it is written over.
        """
        n_words = words_BT.shape[1]
        at_BT = cache.lengths[:, None] + torch.arange(n_words, device=words_BT.device)
        cache.longest += n_words
        seen_S = torch.arange(cache.longest, device=words_BT.device)
        mask_B1TS = (seen_S <= at_BT[:, :, None])[:, None]
        x_BTW = self.embedding(words_BT, at_BT)
        for block, kept in zip(self.blocks, cache.blocks, strict=True):
            x_BTW = block(x_BTW, mask_B1TS, kept, at_BT)
        if n_new_B is None:
            last_BW = x_BTW[:, -1]
            cache.lengths = cache.lengths + n_words
        else:
            last_BW = x_BTW[torch.arange(len(x_BTW), device=x_BTW.device), n_new_B - 1]
            cache.lengths = cache.lengths + n_new_B
        return self.norm(last_BW) @ self.embedding.word.weight.T
