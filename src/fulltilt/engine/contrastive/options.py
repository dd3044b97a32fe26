"""The phases of a contrastive task and what they can be told. Torch-free: the command line reads its defaults here."""

from __future__ import annotations

import dataclasses

PHASES = ("pretrain", "probe", "cluster")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseOptions:
    """What the phases after pre-training can be told."""

    probe_epochs: int = 50  # passes over the features
    cluster_epochs: int = 30
    n_clusters: int | None = None  # None: as many as the data has classes
    clear_share: float = 0.5  # of each cluster, the share of images whose pseudo-label the head trains on
