"""Sentence encoders: two parts of one text get vectors that are alike, parts of different texts do not.

Shapes: B texts, L words of the longest one, R = 2·B rows of parts, D width of the vectors.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.tasks.contrastive import explain_negatives
from fulltilt.tasks.features import BATCH_SIZE, extract_features, find_labelled, spread
from fulltilt.tasks.losses import Loss, NtXent
from fulltilt.tasks.models.text_encoder import PAD_ID
from fulltilt.tasks.neighbours import compute_knn_accuracy
from fulltilt.tasks.workload import Workload

LEAST_SHARE, MOST_SHARE = 0.2, 0.6  # of a text that one part takes


class SentenceModel(nn.Module):
    """Encodes texts (B, L), in training two random parts of each. Rows 2·i and 2·i + 1 are of text i."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, words_BL: Tensor) -> Tensor:
        return self.encoder(draw_parts(words_BL) if self.training else words_BL)


def draw_parts(words_BL: Tensor) -> Tensor:
    """Draw two runs of words of every text, by torch's generator; what is left of a row is padding."""
    words_RL = words_BL.repeat_interleave(2, dim=0)
    lengths_R1 = (words_RL != PAD_ID).sum(1, keepdim=True)
    draws_2R1 = torch.rand(2, *lengths_R1.shape, device=words_BL.device)
    shares_R1 = LEAST_SHARE + (MOST_SHARE - LEAST_SHARE) * draws_2R1[0]
    taken_R1 = (shares_R1 * lengths_R1).ceil().long()
    starts_R1 = (draws_2R1[1] * (lengths_R1 - taken_R1 + 1)).long()
    return _cut(words_RL, starts_R1, taken_R1)[:, : math.ceil(MOST_SHARE * words_RL.shape[1])]


def _cut(words_RL: Tensor, starts_R1: Tensor, taken_R1: Tensor) -> Tensor:
    at_L = torch.arange(words_RL.shape[1], device=words_RL.device)
    moved_RL = words_RL.gather(1, (starts_R1 + at_L).clamp(max=words_RL.shape[1] - 1))
    return moved_RL.masked_fill(at_L >= taken_R1, PAD_ID)


class SentenceAssessment:
    """``assess`` of the task, over the validation texts: is what belongs together nearest?

    ``retrieval_accuracy``: the second half of a text is nearest to its first half, among the second halves of all.
    ``knn_accuracy``: the nearest training texts are of the same subject, where texts have one.
    """

    def __init__(self, train: Callable[[], Dataset], validation: Callable[[], Dataset], *, limit: int | None) -> None:
        self._train, self._validation, self._limit, self.batch_size = train, validation, limit, BATCH_SIZE

    def __call__(self, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        bank: Any = self._train()
        queries: Any = self._validation()
        rows = spread(np.arange(len(queries)), self._limit)
        first_ND, second_ND = (
            self._encode(lambda w, h=h: model(halve(w, h)), queries, rows, device)[0] for h in (0, 1)
        )
        nearest_N = (first_ND @ second_ND.T).argmax(1)
        is_own_N = nearest_N == torch.arange(len(rows), device=nearest_N.device)
        figures = {"retrieval_accuracy": is_own_N.double().mean().item()}
        bank_rows = spread(find_labelled(bank), self._limit)
        known, asked = self._encode(model, bank, bank_rows, device), self._encode(model, queries, rows, device)
        return figures | {"knn_accuracy": compute_knn_accuracy(*known, *asked)}

    def _encode(self, encode: Any, texts: Any, rows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        return extract_features(encode, texts, rows, device, batch_size=self.batch_size)


def halve(words_BL: Tensor, half: int) -> Tensor:
    """Cut every text to its first half (0) or its second one (1)."""
    lengths_B1 = (words_BL != PAD_ID).sum(1, keepdim=True)
    middle_B1 = lengths_B1 // 2
    starts_B1, ends_B1 = (middle_B1 * 0, middle_B1) if half == 0 else (middle_B1, lengths_B1)
    return _cut(words_BL, starts_B1, ends_B1 - starts_B1)


def build_sentence_encoder(
    *,
    model: Callable[[], nn.Module],
    train: Callable[[], Dataset],
    validation: Callable[[], Dataset] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    name: str = "sentence_encoder",
    temperature: Annotated[float, Gt(0)] = 0.1,
    exact_batch: bool = True,
    limit: Annotated[int, Ge(1)] | None = 5_000,
) -> Workload:
    """Find the other part of the same text among the parts of all texts of the batch, with NT-Xent.

    Args:
        model: ``words_BL → (B, D)``; word 0 is padding.
        train: Texts of different lengths, as the dataset ``passages`` has them.
        exact_batch: Compute an accumulation window as one batch, by gradient caching. False: plain accumulation,
            where each micro-batch only sees its own negatives.
        limit: The most texts that an evaluation looks at, of training and of validation; null: all.
    """

    def explain(batch_size: int, accumulate: int) -> list[str]:
        return [explain_negatives(batch_size, accumulate, exact=exact_batch, what="texts")]

    return Workload(
        model=lambda: SentenceModel(model()),
        dataset=train,
        loss=loss or NtXent(temperature),
        optimizer=optimizer,
        assess=SentenceAssessment(train, validation, limit=limit) if validation is not None else None,
        explain=explain,
        couples_samples=exact_batch,
        compares_samples=True,
        name=name,
    )
