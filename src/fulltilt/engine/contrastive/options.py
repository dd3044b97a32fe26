"""The phases of a contrastive task and what they can be told. Torch-free: the command line reads its defaults here."""

from __future__ import annotations

import dataclasses

PHASES = ("pretrain", "probe", "cluster")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseOptions:
    """What the phases after pre-training can be told.

    Attributes:
        probe_epochs, cluster_epochs: Passes over the features.
        n_clusters: None: as many as the data has classes.
        clear_share: Of each cluster, the share of images whose pseudo-label the head trains on.
    """

    probe_epochs: int = 50
    cluster_epochs: int = 30
    n_clusters: int | None = None
    clear_share: float = 0.5
