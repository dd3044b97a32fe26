"""The phases of a contrastive training: pre-training, linear probe, clustering. Each is a run in a folder of its own.

    OUT/pretrain    the encoder, by the loop
    OUT/probe       a linear layer over its features, with real labels
    OUT/cluster     pseudo-labels and a head over its features, without
    OUT/features    what both read: features by part of the data and by the checkpoint they came from

So each phase is interrupted and resumed as any run is; one that has ended is not trained again.
"""

import contextlib
import functools
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
from fulltilt.engine.ranks.world import plan_devices
from fulltilt.errors import StorageError, UsageError, name_file
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
Place = Callable[[Path, Config, Workload | None], tuple[Path, Sequence[Listener], bool]]
"""Told where a phase usually lies and what trains there → its folder, who listens, and whether it goes on."""


def run_phase(
    phase: str,
    config: Config,
    *,
    out_dir: Path,
    place: Place,
    options: PhaseOptions,
    progress: Progress | None = None,
) -> TrainResult:
    """Run one phase to its end, in ``out_dir/phase`` or where ``place`` has it.

    Raises:
        UsageError: the task is not contrastive, or the encoder of this configuration has no checkpoint yet.
        RunFolderError: the folder holds a checkpoint and the phase does not go on, or is of another run.
    """
    workload = build_workload(config)
    if not isinstance(workload.assess, NeighbourAssessment):
        raise UsageError(
            f"the phases are those of a contrastive training with validation images, and the task is {config.task}; "
            "write task: contrastive, or use fulltilt train"
        )
    settings, head = config, None
    if phase != "pretrain":
        source = _open_features(config, workload, workload.assess, out_dir, progress)
        if phase == "probe":
            name, n_epochs = f"linear probe on encoder {source.digest}", options.probe_epochs
            labelled, validation = source.read_labelled(), source.read_validation()
            head = build_linear_probe(labelled, validation, classes=source.classes, name=name)
        else:
            head, n_epochs = _build_cluster(source, config, options), options.cluster_epochs
        settings = _build_head_config(config, n_samples=len(head.dataset()), n_epochs=n_epochs)
    folder, listeners, resume = place(out_dir / phase, settings, head)
    return train(settings, out_dir=folder, listeners=listeners, resume=resume, workload=head)


class FeatureSource:
    """Computes features of the images that a task's evaluation sees, and keeps them in ``folder``.

    ``digest`` is that of the checkpoint and the data.
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

    def read_all_features(self) -> Tensor:
        """Features of all training images: those with a label, then the others."""
        features, rows = self.read_labelled()[0], np.setdiff1d(np.arange(len(self._bank)), find_labelled(self._bank))
        return torch.cat([features, self._read("unlabelled", self._bank, rows)[0]]) if len(rows) else features

    def read_validation(self) -> tuple[Tensor, Tensor]:
        return self._read("validation", self._queries, find_labelled(self._queries))

    def remember(self, name: str, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Read arrays of this source, or compute and keep them; with a full disk they are computed again next time."""
        path = self._folder / f"{name}-{self.digest}.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as arrays:
                return {key: arrays[key] for key in arrays.files}
        computed = compute()
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(StorageError), open_atomic(path) as stream:
            np.savez(stream, **computed)  # type: ignore[arg-type]
        return computed

    def _read(self, name: str, dataset: Any, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        def compute() -> dict[str, np.ndarray]:
            progress = None if self._progress is None else functools.partial(self._progress, name)
            features, targets = extract_features(self._model.encode, dataset, rows, self._device, progress=progress)
            return {"features": features.cpu().numpy(), "targets": targets.cpu().numpy()}

        found = self.remember(name, compute)
        return torch.from_numpy(found["features"]), torch.from_numpy(found["targets"])


def _open_features(
    config: Config, workload: Workload, assessment: NeighbourAssessment, out_dir: Path, progress: Progress | None
) -> FeatureSource:
    """Open the features of the newest checkpoint of the pre-training."""
    folder = out_dir / "pretrain"
    loaded = checkpoint.load_checkpoint(folder)
    if loaded is None:
        raise UsageError(
            f"there is no checkpoint in {name_file(folder)}: this phase needs a pre-trained encoder; run the phase "
            "pretrain first, or give its folder with --out"
        )
    model = workload.model()
    assert isinstance(model, ContrastiveModel)
    weights = read_weights(loaded.state, find_evaluated(loaded.state))
    checkpoint.load_model_state(model, weights, loaded.path)
    device, digest = check_device(plan_devices(config)[0]), _compute_digest(weights, config)
    return FeatureSource(model, assessment, device, folder=out_dir / "features", digest=digest, progress=progress)


def _compute_digest(weights: dict[str, Any], config: Config) -> str:
    """Compute a digest of the weights, and of what the images are read from."""
    data = config.data
    digest = hashlib.sha256(repr((data.dataset, data.val_dataset, data.path, data.transform.val)).encode())
    for name, value in weights.items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _build_cluster(source: FeatureSource, config: Config, options: PhaseOptions) -> Workload:
    """Build the head over pseudo-labels; a resumed one goes on with the labels it began with."""
    features, seed = source.read_all_features(), config.run.seed
    n_clusters = options.n_clusters or len(source.classes)

    def compute() -> dict[str, np.ndarray]:
        pseudo = find_pseudo_labels(features, n_clusters=n_clusters, seed=seed)
        return {"clusters": pseudo.clusters, "margins": pseudo.margins}

    return build_clustering(
        features,
        PseudoLabels(**source.remember(f"clusters-{n_clusters}-seed-{seed}", compute)),
        source.read_validation(),
        n_clusters=n_clusters,
        share=options.clear_share,
        name=f"{n_clusters} clusters of encoder {source.digest}, clearest {options.clear_share:.0%}",
    )


def _build_head_config(config: Config, *, n_samples: int, n_epochs: int) -> Config:
    """Build the settings of a head over features: device and seed are the user's, its optimizer is the head's own."""
    every = {"evaluate_every": "10 epochs", "checkpoint_every": "10 epochs"}
    values = {
        "data": {"batch_size": min(HEAD_BATCH_SIZE, n_samples)},
        "optim": {"schedule": "cosine"},
        "run": {"epochs": n_epochs, "device": config.run.device, "seed": config.run.seed, **every},
    }
    return config_from_values(values, base_dir=config.base_dir)
