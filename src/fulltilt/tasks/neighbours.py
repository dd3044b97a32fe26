"""Score how well an encoder separates classes, by nearest neighbours of its features; no classifier is trained.

Shapes: N labelled samples, M queries, F features, K neighbours.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fulltilt.errors import UsageError

MANY, K_MANY, K_FEW = 20_000, 200, 20
TEMPERATURE = 0.07
CHUNK = 1024  # queries at a time: 1,024 × 50,000 similarities are 0.2 GiB


def choose_k(n_labelled: int) -> int:
    """Choose 200 neighbours among 20,000 samples and more, 20 among fewer; never more than there are."""
    return min(n_labelled, K_MANY if n_labelled >= MANY else K_FEW)


def predict_by_neighbours(
    bank_NF: Tensor, targets_N: Tensor, queries_MF: Tensor, *, k: int, n_classes: int, temperature: float = TEMPERATURE
) -> Tensor:
    """Return the class (M,) that the ``k`` most similar samples vote for, with weights exp(cosine / temperature).

    Source: Wu et al. 2018, Unsupervised Feature Learning via Non-Parametric Instance Discrimination (arXiv
    1805.01978), section 3.4.

    Raises:
        UsageError: ``k`` is not between 1 and N.
    """
    if not 1 <= k <= len(bank_NF):
        raise UsageError(f"k {k} is not between 1 and the {len(bank_NF)} labelled samples")
    bank_NF = functional.normalize(bank_NF.float(), dim=1)
    found = []
    for chunk_MF in queries_MF.split(CHUNK):
        cosine_MN = functional.normalize(chunk_MF.float(), dim=1) @ bank_NF.T
        cosine_MK, rows_MK = cosine_MN.topk(k, dim=1)
        votes = torch.zeros(len(chunk_MF), n_classes, device=bank_NF.device)
        # Scaled so that the largest weight is 1: the same vote, and nothing overflows.
        weights_MK = ((cosine_MK - cosine_MK[:, :1]) / temperature).exp()
        found.append(votes.scatter_add_(1, targets_N[rows_MK], weights_MK).argmax(1))
    return torch.cat(found)


def compute_knn_accuracy(
    bank_NF: Tensor, targets_N: Tensor, queries_MF: Tensor, targets_M: Tensor, *, k: int | None = None
) -> float:
    """Return the share of the queries whose neighbours vote for their class.

    Device: synchronises.
    """
    n_classes = int(torch.maximum(targets_N.max(), targets_M.max())) + 1
    k = choose_k(len(bank_NF)) if k is None else k
    predicted_M = predict_by_neighbours(bank_NF, targets_N, queries_MF, k=k, n_classes=n_classes)
    return (predicted_M == targets_M).double().mean().item()
