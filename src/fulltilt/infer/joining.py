"""Join samples to one padded batch and split its outputs, in numpy: nothing here needs torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fulltilt.infer.manifest import InputSpec

Array = NDArray[np.generic]
Sample = tuple[Array, ...]
"""The inputs of one sample, without the batch dimension."""


MIN_LENGTH = 2  # padded to: compilers make code of its own for sizes 0 and 1


def read_length(sample: Sample, inputs: Sequence[InputSpec]) -> int:
    """Return the length of a sample: the first dimension of the inputs that vary, 1 where none does."""
    return max((array.shape[0] for array, spec in zip(sample, inputs, strict=True) if spec.varies), default=1)


def join_samples(samples: Sequence[Sample], inputs: Sequence[InputSpec], length_multiple: int = 1) -> Sample:
    """Stack samples with the batch first. Inputs that vary are padded to the longest, to 2 at least."""
    longest = max(MIN_LENGTH, *(read_length(sample, inputs) for sample in samples))
    padded = -(-longest // length_multiple) * length_multiple
    return tuple(_stack([sample[i] for sample in samples], spec, padded) for i, spec in enumerate(inputs))


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
