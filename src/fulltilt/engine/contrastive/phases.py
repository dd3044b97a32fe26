"""The phases of a contrastive training: pre-training, linear probe, clustering. Each is a run in a folder of its own.

    OUT/pretrain    the encoder, by the loop
    OUT/probe       a linear layer over its features, with real labels
    OUT/cluster     pseudo-labels and a head over its features, without
    OUT/features    what both read: features by part of the data and by the checkpoint they came from

So each phase is interrupted and resumed as any run is; one that has ended is not trained again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulltilt.config import Config, config_from_values
from fulltilt.engine.build.assemble import build_workload
from fulltilt.engine.build.builder import check_device
from fulltilt.engine.checkpoints import checkpoint
from fulltilt.engine.checkpoints.export import find_evaluated, read_weights
from fulltilt.engine.contrastive.options import PhaseOptions
from fulltilt.engine.loop.endings import TrainResult
from fulltilt.engine.loop.train import train
from fulltilt.engine.ranks.world import choose_device
from fulltilt.errors import StorageError, UsageError
from fulltilt.records import Listener
from fulltilt.records.run_folder import open_atomic
from fulltilt.tasks import Workload
from fulltilt.tasks.clustering import PseudoLabels, build_clustering, find_pseudo_labels
from fulltilt.tasks.contrastive import NeighbourAssessment
from fulltilt.tasks.encoder import ContrastiveModel
from fulltilt.tasks.features import extract_features, find_labelled
from fulltilt.tasks.linear_probe import build_linear_probe

HEAD_BATCH_SIZE = 256

Progress = Callable[[str, int, int], None]
"""Told the part of the data, images encoded, and their number."""


def run_phase(
    phase: str,
    config: Config,
    *,
    out_dir: Path,
    listeners: Sequence[Listener],
    resume: bool,
    options: PhaseOptions,
    progress: Progress | None = None,
) -> TrainResult:
    """Run one phase to its end, in ``out_dir/phase``.

    Raises:
        UsageError: the task is not contrastive, or the encoder of this configuration has no checkpoint yet.
        RunFolderError: the folder holds a checkpoint and ``resume`` is false, or is of another run.
    """
    workload = build_workload(config)
    if not isinstance(workload.assess, NeighbourAssessment):
        raise UsageError(
            f"the phases are those of a contrastive training with validation images, and the task is {config.task}; "
            "write task: contrastive, or use fulltilt train"
        )
    folder = out_dir / phase
    if phase == "pretrain":
        return train(config, out_dir=folder, listeners=listeners, resume=resume)
    source = _open_features(config, workload, out_dir, progress)
    head = {"probe": _build_probe, "cluster": _build_cluster}[phase](source, config, options)
    n_epochs = {"probe": options.probe_epochs, "cluster": options.cluster_epochs}[phase]
    settings = _build_head_config(config, n_samples=len(head.dataset()), n_epochs=n_epochs)
    return train(settings, out_dir=folder, listeners=listeners, resume=resume, workload=head)


class FeatureSource:
    """Features of the images that a task's evaluation sees, kept on disk.

    Args:
        folder: Where they are kept.
        digest: Of the checkpoint and the data.
    """

    def __init__(
        self,
        model: ContrastiveModel,
        assessment: NeighbourAssessment,
        device: torch.device,
        *,
        folder: Path,
        digest: str,
        progress: Progress | None,
    ):
        assert assessment.labelled is not None
        self._model = model.to(device).eval()
        self._bank, self._queries = assessment.labelled()
        self._device, self._folder, self._progress = device, folder, progress
        self.digest = digest
        self.classes: tuple[str, ...] = tuple(self._bank.classes)

    def read_labelled(self) -> tuple[Tensor, Tensor]:
        """Training images with a label: features (N, F) float32 and targets (N,), on the host."""
        return self._read("labelled", self._bank, find_labelled(self._bank))

    def read_unlabelled(self) -> tuple[Tensor, Tensor]:
        rows = np.setdiff1d(np.arange(len(self._bank)), find_labelled(self._bank))
        return self._read("unlabelled", self._bank, rows) if len(rows) else _take_none(self.read_labelled())

    def read_validation(self) -> tuple[Tensor, Tensor]:
        return self._read("validation", self._queries, find_labelled(self._queries))

    def keep(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Write arrays that belong to this source; on a full disk they are computed again next time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(StorageError), open_atomic(self._folder / f"{name}-{self.digest}.npz") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]

    def find(self, name: str) -> dict[str, np.ndarray] | None:
        path = self._folder / f"{name}-{self.digest}.npz"
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}

    def _read(self, name: str, dataset: Any, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        found = self.find(name)
        if found is not None:
            return torch.from_numpy(found["features"]), torch.from_numpy(found["targets"])
        progress = None if self._progress is None else lambda done, total: self._progress(name, done, total)
        features, targets = extract_features(self._model.encode, dataset, rows, self._device, progress=progress)
        features, targets = features.cpu(), targets.cpu()
        self.keep(name, {"features": features.numpy(), "targets": targets.numpy()})
        return features, targets


def _open_features(config: Config, workload: Workload, out_dir: Path, progress: Progress | None) -> FeatureSource:
    loaded = checkpoint.load_checkpoint(out_dir / "pretrain")
    if loaded is None:
        raise UsageError(
            f"there is no checkpoint in {out_dir / 'pretrain'}: this phase needs a pre-trained encoder; run the phase "
            "pretrain first, or give its folder with --out"
        )
    model = workload.model()
    assert isinstance(model, ContrastiveModel)
    assert isinstance(workload.assess, NeighbourAssessment)
    weights = read_weights(loaded.state, find_evaluated(loaded.state))
    checkpoint.load_model_state(model, weights, loaded.path)
    return FeatureSource(
        model,
        workload.assess,
        check_device(choose_device(config)),
        folder=out_dir / "features",
        digest=_compute_digest(weights, config),
        progress=progress,
    )


def _compute_digest(state: dict[str, Any], config: Config) -> str:
    """Of the weights, and of what the images are read from."""
    data = config.data
    digest = hashlib.sha256(repr((data.dataset, data.val_dataset, data.path, data.transform.val)).encode())
    for name, value in state.items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _build_probe(source: FeatureSource, config: Config, options: PhaseOptions) -> Workload:
    return build_linear_probe(
        source.read_labelled(),
        source.read_validation(),
        classes=source.classes,
        name=f"linear probe on encoder {source.digest}",
    )


def _build_cluster(source: FeatureSource, config: Config, options: PhaseOptions) -> Workload:
    features = torch.cat([source.read_labelled()[0], source.read_unlabelled()[0]])
    n_clusters = options.n_clusters or len(source.classes)
    return build_clustering(
        features,
        _read_pseudo_labels(source, features, n_clusters, config.run.seed),
        source.read_validation(),
        n_clusters=n_clusters,
        share=options.clear_share,
        name=f"{n_clusters} clusters of encoder {source.digest}, clearest {options.clear_share:.0%}",
    )


def _read_pseudo_labels(source: FeatureSource, features: Tensor, n_clusters: int, seed: int) -> PseudoLabels:
    """Those of an earlier attempt, so that a resumed head goes on with the labels it began with."""
    name = f"clusters-{n_clusters}-seed-{seed}"
    found = source.find(name)
    if found is not None:
        return PseudoLabels(clusters=found["clusters"], margins=found["margins"])
    pseudo = find_pseudo_labels(features, n_clusters=n_clusters, seed=seed)
    source.keep(name, {"clusters": pseudo.clusters, "margins": pseudo.margins})
    return pseudo


def _build_head_config(config: Config, *, n_samples: int, n_epochs: int) -> Config:
    """Settings of a head over features: device and seed are the user's, its optimizer is the head's own."""
    values = {
        "data": {"batch_size": min(HEAD_BATCH_SIZE, n_samples)},
        "optim": {"schedule": "cosine"},
        "run": {
            "epochs": n_epochs,
            "device": config.run.device,
            "seed": config.run.seed,
            "evaluate_every": "10 epochs",
            "checkpoint_every": "10 epochs",
        },
    }
    return config_from_values(values, base_dir=config.base_dir)


def _take_none(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rows[0][:0], rows[1][:0]
