"""Samples and recorded outputs in one file of arrays, without pickle. Nothing here needs torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.infer.joining import Sample

SAMPLES = "samples.npz"


def write_samples(folder: Path, samples: Sequence[Sample], outputs: Sequence[Sample] = ()) -> None:
    """Write samples, and what they were answered with. Arrays of one kind lie in one, one behind the other."""
    np.savez(folder / SAMPLES, **_pack("input", samples), **_pack("output", outputs))


def read_samples(folder: Path, kind: str = "input") -> tuple[Sample, ...]:
    """Read the samples, or the outputs ("output") that were recorded for them.

    Raises:
        ValueError, OSError, KeyError: the file is damaged.
    """
    with np.load(folder / SAMPLES, allow_pickle=False) as file:
        columns: list[list[Any]] = []
        while f"{kind}_{len(columns)}" in file:
            name = f"{kind}_{len(columns)}"
            flat, shapes = file[name], file[f"{name}_shapes"]
            ends = np.cumsum(shapes.prod(axis=1, dtype=np.int64))[:-1]
            parts = np.split(flat, ends)
            columns.append([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])
    return tuple(zip(*columns, strict=True))


def _pack(kind: str, samples: Sequence[Sample]) -> Mapping[str, Any]:
    packed: dict[str, Any] = {}
    for i, arrays in enumerate(zip(*samples, strict=True)):
        packed[f"{kind}_{i}"] = np.concatenate([np.ravel(array) for array in arrays])
        packed[f"{kind}_{i}_shapes"] = np.array([array.shape for array in arrays], dtype=np.int64)
    return packed
