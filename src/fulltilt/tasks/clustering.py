"""Classes without labels: clusters of features as pseudo-labels, and a head trained on those that are clear.

Shapes: N images, F features, K clusters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.errors import UsageError
from fulltilt.tasks.clustering_figures import compute_figures, import_sklearn
from fulltilt.tasks.features import FeatureRows, standardise
from fulltilt.tasks.linear_probe import build_sgd
from fulltilt.tasks.workload import Workload

N_STARTS = 10  # of k-means; the best is kept
LABEL_SMOOTHING = 0.1  # pseudo-labels are wrong now and then


@dataclasses.dataclass(frozen=True, kw_only=True)
class PseudoLabels:
    """A cluster for every image, and how clear it is.

    Attributes:
        clusters: (N,) int64.
        margins: (N,) in [0, 1]: how much nearer the own centre is than the next; 0 half-way between, 1 at the centre.
    """

    clusters: np.ndarray
    margins: np.ndarray

    def choose_clear(self, share: float) -> np.ndarray:
        """Rows of the ``share`` with the largest margins, cluster by cluster, so that no cluster is left out."""
        if not 0 < share <= 1:
            raise UsageError(f"the share of clear images is {share}; it must be above 0 and at most 1")
        chosen = []
        for cluster in np.unique(self.clusters):
            rows = np.flatnonzero(self.clusters == cluster)
            n_kept = max(1, round(share * len(rows)))
            chosen.append(rows[np.argsort(-self.margins[rows], kind="stable")[:n_kept]])
        return np.sort(np.concatenate(chosen))


def find_pseudo_labels(features_NF: Tensor, *, n_clusters: int, seed: int) -> PseudoLabels:
    """k-means on features of length 1, the best of ten starts.

    Raises:
        UsageError: fewer images than clusters, fewer than two clusters, or scikit-learn is not installed.

    Cost: on the CPU; grows with N · F · K.
    """
    import_sklearn()
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
    """A linear head over features (N, F), trained on clear pseudo-labels, judged by the labels of ``validation``.

    No real label is seen in training. Figures: ``clustering_figures``.
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
