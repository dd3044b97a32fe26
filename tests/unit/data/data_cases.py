"""Files of rows and images, and the comparison of batches, for the tests of data."""

import h5py
import numpy as np
import torch
from PIL import Image


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def write_hdf5(path, mode="w", /, **datasets):
    """Write each dataset from its values, or from a dict of what ``create_dataset`` takes → the path."""
    with h5py.File(path, mode) as file:
        for name, given in datasets.items():
            if isinstance(given, dict):
                file.create_dataset(name, **given)
            else:
                file[name] = given
    return path


def write_images(root, sizes, n_each=4, suffix="png"):
    """Write noise into folders: ``sizes`` maps each folder to (height, width) → the root."""
    rng = np.random.default_rng(0)
    for name, size in sizes.items():
        (root / name).mkdir(parents=True)
        for i in range(n_each):
            pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:02}.{suffix}")
    return root


def assert_equal(batches, expected):
    for (inputs, targets), (x, y) in zip(batches, expected, strict=True):
        assert torch.equal(inputs, x)
        assert torch.equal(targets, y)
        assert inputs.dtype == x.dtype
