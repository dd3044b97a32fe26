"""How well clusters agree with classes. A sample without a label (-1) counts nowhere.

Shapes: N samples, K clusters, L classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fulltilt.errors import UsageError


def compute_figures(clusters_N: np.ndarray, targets_N: np.ndarray) -> dict[str, float]:
    """``cluster_accuracy``, ``nmi``, ``purity`` and ``f1`` of the samples whose target is known.

    cluster_accuracy: share of samples in the right class when clusters are named after classes in the best possible
        way, one name each (Hungarian matching). f1: mean over the classes with that naming. purity: share of the
        largest class, cluster by cluster. nmi: mutual information over the mean of both entropies.

    Raises:
        UsageError: no sample has a target.
    """
    import_sklearn()
    from sklearn.metrics import f1_score, normalized_mutual_info_score

    known_N = targets_N >= 0
    clusters, targets = clusters_N[known_N], targets_N[known_N]
    if not len(targets):
        raise UsageError("no sample has a label, and clusters are judged by labels; give a dataset that has some")
    counts_KL = count_pairs(clusters, targets)
    names_K = match_clusters(counts_KL)
    named = names_K[clusters]
    return {
        "cluster_accuracy": float((named == targets).mean()),
        "nmi": float(normalized_mutual_info_score(targets, clusters)),
        "purity": float(counts_KL.max(axis=1).sum() / counts_KL.sum()),
        "f1": float(f1_score(targets, named, labels=np.unique(targets), average="macro", zero_division=0.0)),
    }


def count_pairs(clusters_N: np.ndarray, targets_N: np.ndarray) -> np.ndarray:
    """(K, L): samples of each class in each cluster."""
    counts = np.zeros((int(clusters_N.max()) + 1, int(targets_N.max()) + 1), dtype=np.int64)
    np.add.at(counts, (clusters_N, targets_N), 1)
    return counts


def match_clusters(counts_KL: np.ndarray) -> np.ndarray:
    """(K,): the class that each cluster is named after, no class twice; -1 for a cluster that is left over."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(counts_KL, maximize=True)
    names_K = np.full(len(counts_KL), -1, dtype=np.int64)
    names_K[rows] = columns
    return names_K


def import_sklearn() -> Any:
    """scikit-learn, which brings scipy.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import sklearn
    except ImportError:
        raise UsageError(
            'clustering needs scikit-learn, which is not installed; pip install "fulltilt[digits]"'
        ) from None
    return sklearn
