"""Samples in numpy: joined to one padded batch, split, kept in a file. Nothing here needs torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulltilt.errors import FulltiltError
from fulltilt.infer.manifest import InputSpec
from fulltilt.records.run_folder import open_atomic

Array = NDArray[np.generic]
Sample = tuple[Array, ...]  # the inputs of one, without the batch dimension

SAMPLES = "samples.npz"
MIN_LENGTH = 2  # padded to: compilers make code of its own for sizes 0 and 1


def read_length(sample: Sample, inputs: Sequence[InputSpec]) -> int:
    """Return the length of a sample: the first dimension of the inputs that vary, 1 where none does."""
    return max((array.shape[0] for array, spec in zip(sample, inputs, strict=True) if spec.varies), default=1)


def join_samples(samples: Sequence[Sample], inputs: Sequence[InputSpec]) -> Sample:
    """Stack samples with the batch first. Inputs that vary are padded to the longest, to 2 at least."""
    longest = max(MIN_LENGTH, *(read_length(sample, inputs) for sample in samples))
    return tuple(_stack([sample[i] for sample in samples], spec, longest) for i, spec in enumerate(inputs))


def split_outputs(outputs: Sample, lengths: Sequence[int], outputs_vary: Sequence[bool]) -> list[Sample]:
    """Split outputs, batch first, into those of each sample; what padding added to those that vary is cut off."""
    pairs = tuple(zip(outputs, outputs_vary, strict=True))
    return [
        tuple(array[row, :length] if varies else array[row] for array, varies in pairs)
        for row, length in enumerate(lengths)
    ]


def _stack(arrays: Sequence[Array], spec: InputSpec, length: int) -> Array:
    if not spec.varies:
        return np.stack(arrays)
    batch = np.full((len(arrays), length, *arrays[0].shape[1:]), spec.pad, dtype=spec.dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[: array.shape[0]] = array
    return batch


def write_samples(folder: Path, samples: Sequence[Sample], outputs: Sequence[Sample] = ()) -> None:
    """Write samples, and what they were answered with. Arrays of one kind lie in one, one behind the other."""
    packed: dict[str, Any] = {}
    for kind, rows in (("input", samples), ("output", outputs)):
        for i, arrays in enumerate(zip(*rows, strict=True)):
            packed[f"{kind}_{i}"] = np.concatenate([np.ravel(array) for array in arrays])
            packed[f"{kind}_{i}_shapes"] = np.array([array.shape for array in arrays], dtype=np.int64)
    with open_atomic(folder / SAMPLES) as stream:
        np.savez(stream, **packed)


def read_samples(folder: Path, kind: str = "input") -> tuple[Sample, ...]:
    """Read the samples, or the outputs ("output") that were recorded for them.

    Raises:
        FulltiltError: the file is damaged.
    """
    columns: list[list[Any]] = []
    try:
        with (folder / SAMPLES).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            while (name := f"{kind}_{len(columns)}") in file or not columns:
                shapes = file[f"{name}_shapes"]
                parts = np.split(file[name], np.cumsum(shapes.prod(axis=1, dtype=np.int64))[:-1])
                columns.append([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])
        return tuple(zip(*columns, strict=True))
    except Exception as error:  # numpy and zip raise anything where a file is none of theirs
        raise FulltiltError(f"{folder / SAMPLES} cannot be read ({error}); build the artefact anew") from error
