"""Encoders of the sizes of MiniLM and BERT base, with random weights: their speed does not depend on those."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import fulltilt

VOCABULARY, LONGEST, N_OUTPUTS = 30522, 128, 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x_BTC: torch.Tensor, mask_B11T: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11T)
        x_BTC = self.norms[0](x_BTC + self.out(mixed.transpose(1, 2).reshape(B, T, C)))
        return self.norms[1](x_BTC + self.down(nn.functional.gelu(self.up(x_BTC))))


class Encoder(nn.Module):
    """Token ids (B, T), 0 is padding → (B, 16), of the mean over tokens."""

    def __init__(self, width: int, heads: int, depth: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, N_OUTPUTS)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        is_token_BT = ids_BT != 0
        x_BTC = self.norm(self.tokens(ids_BT) + self.places(torch.arange(ids_BT.shape[1], device=ids_BT.device)))
        for block in self.blocks:
            x_BTC = block(x_BTC, is_token_BT[:, None, None, :])
        weights_BT1 = is_token_BT[..., None].to(x_BTC.dtype)
        return self.head((x_BTC * weights_BT1).sum(1) / weights_BT1.sum(1))


class Texts(Dataset):
    """Random tokens; the lengths are lognormal with mean 38 and at most 128, as those of sentences."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draws = torch.Generator().manual_seed(index)
        length = int(torch.empty(()).log_normal_(3.4, 0.65, generator=draws).clamp(4, LONGEST)) if index else LONGEST
        return torch.randint(1, VOCABULARY, (length,), generator=draws), 0


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = zip(*samples, strict=True)
    return pad_sequence(list(ids), batch_first=True), torch.tensor(targets)


def _build(width: int, heads: int, depth: int) -> fulltilt.Workload:
    return fulltilt.Workload(
        model=lambda: Encoder(width, heads, depth), dataset=Texts, loss=nn.CrossEntropyLoss(), collate=collate
    )


minilm, bert_base = _build(384, 12, 6), _build(768, 12, 12)
