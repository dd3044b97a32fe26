"""Cross entropy of a linear layer over a large vocabulary, whose logits never exist as a whole.

Shapes: N predictions, P features, V words, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Of a chunk's logits in float32. Small matrix products leave a GPU idle; pages taken anew cost a CPU more."""


def compute_chunked(
    features_NP: Tensor, weight_VP: Tensor, bias_V: Tensor, targets_N: Tensor, *, chunk_rows: int, wants_ranks: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the mean cross entropy of ``features @ weight.T + bias``, that of the full logits within rounding.

    Gradients are computed with the loss, chunk by chunk, and only scaled in the backward pass: the product is
    computed once. Matrix products are in the type of autocast, softmax and sums in float32.

    Returns:
        The mean; (N,) losses and (N,) ranks of the targets without gradients, see ``compute_ranks``.

    Device: does not synchronise.
    Cost: C × V logits at a time, and a gradient of V × P that lives until the backward pass.
    """
    device = features_NP.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features_NP.dtype
    total, losses_N, ranks_N = _ChunkedCrossEntropy.apply(
        features_NP, weight_VP, bias_V, targets_N, chunk_rows, wants_ranks, torch.is_grad_enabled(), dtype
    )
    return total / len(targets_N), losses_N, ranks_N if wants_ranks else None


def compute_ranks(logits_NV: Tensor, targets_N1: Tensor) -> Tensor:
    """Count the words that score above each target (N,), equal ones with smaller ids included, as argmax would.

    In bf16 and fp16 the best two of many words are often equal. A NaN ranks last.

    Cost: two passes over the logits.
    """
    chosen_N1 = logits_NV.gather(1, targets_N1)
    ids_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    is_behind_NV = torch.where(ids_V < targets_N1, logits_NV < chosen_N1, logits_NV <= chosen_N1)
    return logits_NV.shape[1] - is_behind_NV.sum(1, dtype=torch.int32)


def choose_chunk_rows(n_words: int, device_type: str) -> int:
    """Return the rows whose logits take ``CHUNK_BYTES``; at least 16."""
    return max(16, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"]) // (4 * n_words))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the losses; their gradients are kept unscaled, so that a loss scaler's factor meets them in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        features_NP: Tensor,
        weight_VP: Tensor,
        bias_V: Tensor,
        targets_N: Tensor,
        chunk_rows: int,
        wants_ranks: bool,
        wants_grad: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(features_NP.device.type, enabled=False):
            features, weight, bias = features_NP.to(dtype), weight_VP.to(dtype), bias_V.to(dtype)
            exact = dtype if dtype == torch.float64 else torch.float32
            losses_N = features.new_empty(len(targets_N), dtype=exact)
            ranks_N = targets_N.new_empty(len(targets_N) if wants_ranks else 0, dtype=torch.int32)
            grads = [torch.zeros_like(t, dtype=exact) for t in (features, weight, bias)] if wants_grad else None
            for start in range(0, len(targets_N), chunk_rows):
                rows = slice(start, start + chunk_rows)
                x_CP, targets_C1 = features[rows], targets_N[rows, None]
                logits_CV = torch.addmm(bias, x_CP, weight.T).to(exact)
                chosen_C1 = logits_CV.gather(1, targets_C1)
                if wants_ranks:
                    ranks_N[rows] = compute_ranks(logits_CV, targets_C1)
                norms_C1 = logits_CV.logsumexp(1, keepdim=True)
                losses_N[rows] = (norms_C1 - chosen_C1).squeeze(1)
                if grads is not None:
                    _add_gradients(grads, rows, x_CP, weight, logits_CV, norms_C1, targets_C1)
        ctx.grads, ctx.dtypes = grads, (features_NP.dtype, weight_VP.dtype, bias_V.dtype)
        ctx.mark_non_differentiable(losses_N, ranks_N)
        return losses_N.sum(), losses_N, ranks_N

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.grads is None:
            raise RuntimeError("the gradients of a chunked loss are used up by its first backward pass")
        grads = [grad.mul_(outer[0]).to(dtype) for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)]
        ctx.grads = None
        return (*grads, None, None, None, None, None)


def _add_gradients(
    grads: list[Tensor], rows: slice, x_CP: Tensor, weight: Tensor, logits_CV: Tensor, norms_C1: Tensor, targets: Tensor
) -> None:
    """Add the gradients of the chunk's summed loss; the logits become their own, softmax less one at the target."""
    slopes_CV = logits_CV.sub_(norms_C1).exp_()
    slopes_CV.scatter_add_(1, targets, slopes_CV.new_full((), -1.0).expand_as(targets))
    grad_x, grad_weight, grad_bias = grads
    grad_bias += slopes_CV.sum(0)
    slopes = slopes_CV.to(x_CP.dtype)
    grad_x[rows] = slopes @ weight
    if grad_weight.dtype == x_CP.dtype:
        grad_weight.addmm_(slopes.T, x_CP)
    else:
        grad_weight += slopes.T @ x_CP
