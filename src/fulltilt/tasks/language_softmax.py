"""Output layers of a language model: how likely each of V words is, and the loss of the word that came.

``full`` computes all N × V logits. ``chunked`` gives the same numbers and never holds more than a chunk of them.
``adaptive`` is another model, cheaper because rare words have fewer features. ``sampled`` trains against a few words
drawn by frequency, and is evaluated over all of them.

Shapes: N predictions, P features, V words, K sampled words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.errors import UsageError
from fulltilt.tasks.language_chunked import choose_chunk_rows, compute_chunked, compute_ranks

Softmax = Literal["full", "chunked", "adaptive", "sampled"]


class TokenScores(NamedTuple):
    """The figures of N predictions."""

    loss: Tensor  # their mean, with gradients
    losses: Tensor  # (N,) without gradients
    ranks: Tensor | None  # (N,) of ``compute_ranks``; None where they were not asked for


class LinearSoftmax(nn.Module):
    """A linear layer over all words: ``full``, ``chunked`` or ``sampled``.

    Args:
        tied: The embedding whose table is the weight; with another width a linear map without bias stands between.
        n_sampled: K of ``sampled``.
        chunk_rows: Of ``chunked``, and of every evaluation of ``sampled``; None: by the device's memory.
    """

    def __init__(
        self,
        n_features: int,
        n_words: int,
        method: Literal["full", "chunked", "sampled"],
        *,
        tied: nn.Embedding | None = None,
        n_sampled: int = 8192,
        chunk_rows: int | None = None,
    ) -> None:
        super().__init__()
        n_inputs = n_features if tied is None else tied.embedding_dim
        self.bridge = nn.Identity() if n_inputs == n_features else nn.Linear(n_features, n_inputs, bias=False)
        self.linear = nn.Linear(n_inputs, n_words)
        nn.init.zeros_(self.linear.bias)
        if tied is not None:
            self.linear.weight = tied.weight
        self.method, self.n_sampled, self.chunk_rows = method, n_sampled, chunk_rows

    def forward(self, features_NP: Tensor, targets_N: Tensor, *, wants_ranks: bool) -> TokenScores:
        x, weight, bias = self.bridge(features_NP), self.linear.weight, self.linear.bias
        if self.method == "full":
            return score_logits(self.linear(x), targets_N, wants_ranks=wants_ranks)
        if self.method == "sampled" and self.training:
            return score_sampled(x, weight, bias, targets_N, n_sampled=self.n_sampled)
        rows = self.chunk_rows or choose_chunk_rows(len(weight), x.device.type)
        return TokenScores(*compute_chunked(x, weight, bias, targets_N, chunk_rows=rows, wants_ranks=wants_ranks))


class AdaptiveSoftmax(nn.Module):
    """``nn.AdaptiveLogSoftmaxWithLoss`` over words in falling order of frequency.

    In fp32 also under autocast: the layer of torch mixes types there. Evaluation computes the whole distribution.

    Device: training synchronises once for each group of words: how many rows fall into it decides its shapes.

    Source: Grave et al. 2017, arXiv 1609.04309.
    """

    def __init__(
        self, n_features: int, n_words: int, *, cutoffs: Sequence[int] | None, div_value: float, chunk_rows: int | None
    ) -> None:
        super().__init__()
        cutoffs = list(cutoffs) if cutoffs is not None else choose_cutoffs(n_words)
        if not cutoffs or cutoffs != sorted(set(cutoffs)) or not 0 < cutoffs[0] <= cutoffs[-1] < n_words:
            raise UsageError(f"cutoffs {cutoffs} must rise, from 1 on and to at most {n_words - 1} of {n_words} words")
        if n_features < div_value ** len(cutoffs):
            raise UsageError(
                f"{n_features} features divided {len(cutoffs)} times by div_value {div_value:g} leave none for the "
                "rarest words; lower div_value, or name fewer cutoffs"
            )
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(n_features, n_words, cutoffs, div_value, head_bias=True)
        self.n_words, self.chunk_rows = n_words, chunk_rows

    def forward(self, features_NP: Tensor, targets_N: Tensor, *, wants_ranks: bool) -> TokenScores:
        with torch.autocast(features_NP.device.type, enabled=False):
            x = features_NP.float()
            if self.training:
                losses_N = -self.softmax(x, targets_N).output
                return TokenScores(losses_N.mean(), losses_N.detach(), None)
            rows = self.chunk_rows or choose_chunk_rows(self.n_words, x.device.type)
            pieces = [
                score_logits(self.softmax.log_prob(x[at : at + rows]), targets_N[at : at + rows], wants_ranks=True)
                for at in range(0, len(x), rows)
            ]
        losses_N = torch.cat([piece.losses for piece in pieces])
        ranks_N = torch.cat([piece.ranks for piece in pieces if piece.ranks is not None])
        return TokenScores(losses_N.mean(), losses_N, ranks_N)


def score_logits(logits_NV: Tensor, targets_N: Tensor, *, wants_ranks: bool) -> TokenScores:
    """Score by logits, or by log-probabilities, which a softmax leaves as they are."""
    losses_N = functional.cross_entropy(logits_NV, targets_N, reduction="none")
    ranks_N = None
    if wants_ranks:
        with torch.no_grad():
            ranks_N = compute_ranks(logits_NV, targets_N[:, None])
    return TokenScores(losses_N.mean(), losses_N.detach(), ranks_N)


def score_sampled(x_NP: Tensor, weight_VP: Tensor, bias_V: Tensor, targets_N: Tensor, *, n_sampled: int) -> TokenScores:
    """Compute the loss against K words that all predictions share, drawn with replacement by ``draw_words``.

    The sum over all words in the denominator becomes the target's own term and the mean over the draws of
    exp(score) / probability, draws of the target left out. That is unbiased for the sum; its logarithm, and so the
    loss and its gradient, are biased downwards, the less the larger K is (Bengio and Senécal 2008). It is no
    perplexity: evaluation is over all words.

    Device: does not synchronise; draws from the device's own random numbers.
    """
    words_K, log_probability_K = draw_words(n_sampled, len(weight_VP), weight_VP.device)
    own_N = (x_NP * weight_VP[targets_N]).sum(1).float() + bias_V[targets_N]
    others_NK = functional.linear(x_NP, weight_VP[words_K], bias_V[words_K]).float()
    others_NK = others_NK - (log_probability_K + math.log(n_sampled))
    others_NK = others_NK.masked_fill(targets_N[:, None] == words_K, -math.inf)
    losses_N = torch.logaddexp(own_N, others_NK.logsumexp(1)) - own_N
    return TokenScores(losses_N.mean(), losses_N.detach(), None)


def draw_words(n: int, n_words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw word ids (K,) with replacement; return them and the logarithms (K,) of their probabilities.

    Word i has ln((i + 2) / (i + 1)) / ln(V + 1): about that of the i-th most frequent word of a text.
    """
    span = math.log(n_words + 1)
    words_K = (torch.rand(n, device=device, dtype=torch.float64) * span).exp().long().sub_(1).clamp_(0, n_words - 1)
    probability_K = (1 / (words_K.double() + 1)).log1p() / span
    return words_K, probability_K.log().float()


def choose_cutoffs(n_words: int) -> list[int]:
    """Choose groups of 4 % of the words, the next 16 % and the rest. A small vocabulary has fewer."""
    return sorted({cut for cut in (n_words // 25, n_words // 5) if 0 < cut < n_words}) or [max(1, n_words // 2)]
