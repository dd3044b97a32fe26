"""Classes without labels: clusters of features as pseudo-labels, a head trained on the clear ones, and its figures.

Shapes: N images, F features, K clusters, L classes.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.errors import UsageError
from fulltilt.tasks.features import FeatureRows, standardise
from fulltilt.tasks.linear_probe import build_sgd
from fulltilt.tasks.workload import Workload

N_STARTS = 10  # of k-means; the best is kept
LABEL_SMOOTHING = 0.1  # pseudo-labels are wrong now and then


@dataclasses.dataclass(frozen=True, kw_only=True)
class PseudoLabels:
    """A cluster for every image, and how clear it is."""

    clusters: np.ndarray  # (N,) int64
    margins: np.ndarray  # (N,) in [0, 1]: 0 half-way between the two nearest centres, 1 at the centre

    def choose_clear(self, share: float) -> np.ndarray:
        """Return the rows of the ``share`` with the largest margins of each cluster."""
        if not 0 < share <= 1:
            raise UsageError(f"the share of clear images is {share}; it must be above 0 and at most 1")
        chosen = []
        for cluster in np.unique(self.clusters):
            rows = np.flatnonzero(self.clusters == cluster)
            n_kept = max(1, round(share * len(rows)))
            chosen.append(rows[np.argsort(-self.margins[rows], kind="stable")[:n_kept]])
        return np.sort(np.concatenate(chosen))


def find_pseudo_labels(features_NF: Tensor, *, n_clusters: int, seed: int) -> PseudoLabels:
    """Run k-means on features of length 1 and keep the best of ten starts.

    Raises:
        UsageError: fewer images than clusters, fewer than two clusters, or scikit-learn is not installed.

    Cost: on the CPU; grows with N · F · K.
    """
    _require_sklearn()
    from sklearn.cluster import KMeans

    if not 2 <= n_clusters <= len(features_NF):
        raise UsageError(f"n_clusters {n_clusters} must be at least 2 and at most the {len(features_NF)} images")
    rows_NF = functional.normalize(features_NF.float(), dim=1).cpu().numpy()
    found = KMeans(n_clusters=n_clusters, n_init=N_STARTS, random_state=seed).fit(rows_NF)
    nearest_N2 = np.sort(found.transform(rows_NF), axis=1)[:, :2]
    margins_N = 1 - nearest_N2[:, 0] / np.maximum(nearest_N2[:, 1], 1e-12)
    return PseudoLabels(clusters=np.asarray(found.labels_, dtype=np.int64), margins=margins_N)


def build_clustering(
    train: Tensor,
    pseudo: PseudoLabels,
    validation: tuple[Tensor, Tensor],
    *,
    n_clusters: int,
    share: float = 0.5,
    name: str = "clustering",
) -> Workload:
    """Build a linear head over features (N, F), trained on clear pseudo-labels, judged by the labels of ``validation``.

    No real label is seen in training. Figures: ``compute_figures``.
    """
    known, asked = standardise(train, validation[0])
    rows = torch.from_numpy(pseudo.choose_clear(share))
    clusters = torch.from_numpy(pseudo.clusters)

    def assess(model: nn.Module, device: torch.device) -> Mapping[str, float]:
        predicted = model(asked.to(device)).argmax(1).cpu().numpy()
        return compute_figures(predicted, validation[1].cpu().numpy())

    def explain(batch_size: int, accumulate: int) -> list[str]:
        return [
            f"pseudo-labels: {n_clusters} clusters of {len(known):,} images, the head trains on the {len(rows):,} "
            f"clearest ({share:.0%} of each cluster) and is judged by {len(asked):,} labelled images"
        ]

    return Workload(
        model=lambda: nn.Linear(known.shape[1], n_clusters),
        dataset=lambda: FeatureRows(known[rows], clusters[rows], n_clusters),
        loss=nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING),
        optimizer=build_sgd,
        assess=assess,
        explain=explain,
        name=name,
    )


def compute_figures(clusters_N: np.ndarray, targets_N: np.ndarray) -> dict[str, float]:
    """Return ``cluster_accuracy``, ``nmi``, ``purity`` and ``f1`` of the samples whose target is known (not -1).

    cluster_accuracy: share of samples in the right class when clusters are named after classes in the best possible
        way, one name each (Hungarian matching). f1: mean over the classes with that naming. purity: share of the
        largest class, cluster by cluster. nmi: mutual information over the mean of both entropies.

    Raises:
        UsageError: no sample has a target.
    """
    _require_sklearn()
    from sklearn.metrics import f1_score, normalized_mutual_info_score

    known_N = targets_N >= 0
    clusters, targets = clusters_N[known_N], targets_N[known_N]
    if not len(targets):
        raise UsageError("no sample has a label, and clusters are judged by labels; give a dataset that has some")
    counts_KL = np.zeros((int(clusters.max()) + 1, int(targets.max()) + 1), dtype=np.int64)
    np.add.at(counts_KL, (clusters, targets), 1)
    named = match_clusters(counts_KL)[clusters]
    return {
        "cluster_accuracy": float((named == targets).mean()),
        "nmi": float(normalized_mutual_info_score(targets, clusters)),
        "purity": float(counts_KL.max(axis=1).sum() / counts_KL.sum()),
        "f1": float(f1_score(targets, named, labels=np.unique(targets), average="macro", zero_division=0.0)),
    }


def match_clusters(counts_KL: np.ndarray) -> np.ndarray:
    """Return the class (K,) that each cluster is named after, no class twice; -1 for a cluster that is left over."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(counts_KL, maximize=True)
    names_K = np.full(len(counts_KL), -1, dtype=np.int64)
    names_K[rows] = columns
    return names_K


def _require_sklearn() -> None:
    try:
        import sklearn  # noqa: F401  (it brings scipy)
    except ImportError:
        raise UsageError(
            'clustering needs scikit-learn, which is not installed; pip install "fulltilt[digits]"'
        ) from None
