"""What text models are made of: words and their places, then blocks of attention and an MLP.

Shapes: B batch, T words that come in, S words that they attend to, W width, N heads, D head width.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.errors import ConfigError, UsageError

KeyValues = tuple[Tensor, Tensor]
"""Keys and values (B, N, S, D) of one block, kept while text is generated."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTW: Tensor, mask: Tensor | None, kept: KeyValues | None, at_BT: Tensor | None) -> Tensor:
        """Attend where ``mask`` (broadcast to (B, N, T, S)) is true; without one, to what comes before.

        Args:
            kept: Takes the new keys and values at the places ``at_BT``; the first S of it are attended to.
        """
        q_BNTD, k_BNSD, v_BNSD = self.qkv(x_BTW).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if kept is not None:
            assert mask is not None
            assert at_BT is not None
            places_BNTD = at_BT[:, None, :, None].expand_as(k_BNSD)
            n_used = mask.shape[-1]
            k_BNSD = kept[0].scatter_(2, places_BNTD, k_BNSD.to(kept[0].dtype))[:, :, :n_used]
            v_BNSD = kept[1].scatter_(2, places_BNTD, v_BNSD.to(kept[1].dtype))[:, :, :n_used]
            q_BNTD = q_BNTD.to(k_BNSD.dtype)
        dropout = self.dropout if self.training else 0.0
        y_BNTD = functional.scaled_dot_product_attention(
            q_BNTD, k_BNSD, v_BNSD, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        return self.out(y_BNTD.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Adds attention, then an MLP four times as wide.

    Raises:
        ConfigError: ``heads`` does not divide ``width``.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        if width % heads:
            divisors = [d for d in range(1, width + 1) if width % d == 0]
            raise ConfigError(f"width {width} is not a multiple of heads {heads}; heads: {divisors}")
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x_BTW: Tensor, mask: Tensor | None = None, kept: KeyValues | None = None, at_BT: Tensor | None = None
    ) -> Tensor:
        x_BTW = x_BTW + self.dropout(self.attention(self.norm1(x_BTW), mask, kept, at_BT))
        return x_BTW + self.dropout(self.mlp(self.norm2(x_BTW)))


class Embedding(nn.Module):
    """Adds up what a word and its place stand for.

    Raises:
        UsageError: a text is longer than there are places.
    """

    def __init__(self, n_words: int, n_places: int, width: int, dropout: float) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(n_words, width), nn.Embedding(n_places, width)
        for table in (self.word, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words_BT: Tensor, at_BT: Tensor | None = None) -> Tensor:
        n_words, n_places = words_BT.shape[1], self.place.num_embeddings
        if not torch.compiler.is_exporting() and n_words > n_places:  # an exporter would take it for a bound
            raise UsageError(
                f"a text has {n_words} words, the model has places for {n_places}; raise its max_len, or cut the texts"
            )
        if at_BT is None:
            at_BT = torch.arange(words_BT.shape[1], device=words_BT.device)
        return self.dropout(self.word(words_BT) + self.place(at_BT))


class TextModel(nn.Module):
    """Holds the layers of a text model; what they are put together to is the model's own.

    Args:
        max_len: Longest text, of a model that writes prompt and continuation: places behind it were never trained.

    Raises:
        ConfigError: ``heads`` does not divide ``width``.
    """

    def __init__(
        self,
        *,
        vocab_size: Annotated[int, Ge(2)],
        max_len: Annotated[int, Ge(1)] = 256,
        depth: Annotated[int, Ge(1)] = 2,
        width: Annotated[int, Ge(1)] = 128,
        heads: Annotated[int, Ge(1)] = 4,
        dropout: Annotated[float, Ge(0.0), Lt(1.0)] = 0.1,
    ) -> None:
        super().__init__()
        self.max_len, self.heads, self.n_features = max_len, heads, width
        self.embedding = Embedding(vocab_size, max_len, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
