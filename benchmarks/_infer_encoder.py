"""The encoder of the survey's table: MiniLM's size, random weights, 256 texts of lognormal length."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import fulltilt
from fulltilt.tasks.models.text_encoder import TextEncoder

VOCAB, LONGEST, N_TEXTS = 8192, 128, 256
MEAN_LOG, SIGMA_LOG = 3.42, 0.65  # lengths of 38 in the mean


def draw_lengths() -> list[int]:
    """Draw the lengths of the survey's mix: lognormal, mean 38, at most 128."""
    return np.clip(np.random.default_rng(0).lognormal(MEAN_LOG, SIGMA_LOG, N_TEXTS), 4, LONGEST).astype(int).tolist()


class Texts(Dataset):
    """Random words of real lengths; the longest of them has 128."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = [LONGEST, *draw_lengths()[1:]]
        self.rows = [torch.randint(1, VOCAB, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.rows[i], 0


def join(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return pad_sequence([words for words, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


def build(depth: int, width: int, heads: int) -> fulltilt.Workload:
    return fulltilt.Workload(
        model=lambda: TextEncoder(vocab_size=VOCAB, max_len=LONGEST, depth=depth, width=width, heads=heads),
        dataset=Texts,
        loss=nn.CrossEntropyLoss(),
        collate=join,
        name=f"encoder {depth}x{width}",
    )


workload = build(6, 384, 12)
small = build(2, 128, 4)
