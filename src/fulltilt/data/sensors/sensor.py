"""Events of a sensor array: charge and time per sensor, labels per event, one geometry for all.

Layout of the file: ``input (N, 2, S)`` charge and time, ``label (N, L)``, ``xpmt``, ``ypmt``, ``zpmt (S,)``, and
perhaps ``info (N, 9)``, which training does not read.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fulltilt.data.batched import Indices
from fulltilt.data.splits import Split
from fulltilt.data.tables.hdf5 import RowsDataset, pick_rows, require_path
from fulltilt.data.tables.hdf5_file import find_dataset, find_layouts, open_hdf5
from fulltilt.data.tables.hdf5_rows import build_rows
from fulltilt.data.transforms.pipeline import Transform
from fulltilt.errors import DataError

CHARGE_SCALE, LOG_TIME_SCALE = 100.0, 10.0
GEOMETRY_SCALE = (600.0, 550.0, 550.0)  # half extents of a cubic-kilometre array, m
LABEL_SCALE = (5e7, 1.0, 1.0, 600.0, 550.0, 550.0)  # energy GeV, zenith, azimuth, x, y, z m
_AXES = ("xpmt", "ypmt", "zpmt")


def sensor_hdf5(
    split: Split = "train",
    transform: Transform = None,
    path: str | None = None,
    scale: bool = True,
    val_fraction: float = 0.1,
    seed: int = 0,
    base_dir: str | None = None,
) -> "SensorEvents":
    """Read events as inputs (2, S) and labels (L,).

    Args:
        transform: A callable on one event's inputs (2, S); the image transforms do not apply.
        path: The file; ``fulltilt data make`` makes one.
        scale: Bring charge, time, labels and geometry to the order of 1; False leaves the file's units.
        val_fraction: Share of events for validation, drawn with ``seed``; 0 gives all to training, 1 to validation.

    Raises:
        DataError: The file or a dataset of it cannot be used; says what is there.
    """
    if isinstance(transform, str) and transform.strip():
        raise DataError(f"sensor_hdf5 takes no image transforms ({transform!r}); leave data.transform out")
    file = require_path(path, base_dir)
    rows = pick_rows(file, ["input", "label"], split, val_fraction=val_fraction, seed=seed)
    return SensorEvents(file, rows=rows, scale=scale, transform=transform if callable(transform) else None)


class SensorEvents(RowsDataset):
    """Chosen events of a sensor file; safe to fork and to pickle.

    Attributes:
        geometry: (3, S) float32 positions of the sensors.
        n_sensors: S.
        n_labels: L.
    """

    name = "sensor_hdf5"
    n_classes = None

    def __init__(self, path: Path, *, rows: np.ndarray, scale: bool = True, transform: Callable | None = None):
        inputs, labels = find_layouts(path, ["input", "label"])
        if len(inputs.shape) != 3 or inputs.shape[1] != 2:
            raise DataError(f"{path}: input has shape {inputs.shape}, expected (N, 2, sensors): charge and time")
        if len(labels.shape) != 2:
            raise DataError(f"{path}: label has shape {labels.shape}, expected (N, labels)")
        self.path, self.rows, self.scale, self.transform = path, rows, scale, transform
        self.n_sensors, self.n_labels = inputs.shape[2], labels.shape[1]
        self.sample_shape = (2, self.n_sensors)
        self.sources = build_rows(inputs), build_rows(labels)
        self.geometry = _read_geometry(path, self.n_sensors, scale)
        columns = LABEL_SCALE if self.n_labels == len(LABEL_SCALE) else (1.0,) * self.n_labels
        self._label_scale = torch.tensor(columns)

    def get_batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Read (B, 2, S) and (B, L) float32; a value that is not finite becomes 0."""
        x_B2S, labels_BL = (rows.float() for rows in self.read_rows(indices))
        x_B2S.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        labels_BL.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if self.scale:
            x_B2S[:, 0].div_(CHARGE_SCALE)
            x_B2S[:, 1].clamp_(min=0).log1p_().div_(LOG_TIME_SCALE)
            labels_BL.div_(self._label_scale.to(labels_BL.device))
        if self.transform is not None:
            x_B2S = torch.stack([self.transform(x_2S) for x_2S in x_B2S])
        return x_B2S, labels_BL


def _read_geometry(path: Path, n_sensors: int, scale: bool) -> Tensor:
    with open_hdf5(path) as file:
        axes = [np.asarray(find_dataset(path, file, name)[...], dtype=np.float32).reshape(-1) for name in _AXES]
    for name, values in zip(_AXES, axes, strict=True):
        if len(values) != n_sensors:
            raise DataError(f"{path}: {name} has {len(values)} positions and input has {n_sensors} sensors")
    geometry_3S = torch.from_numpy(np.stack(axes))
    return geometry_3S / torch.tensor(GEOMETRY_SCALE)[:, None] if scale else geometry_3S
