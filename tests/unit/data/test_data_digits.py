"""The digits that come with scikit-learn."""

import gzip

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fulltilt.data import DATASETS
from fulltilt.errors import DataError

digits = DATASETS["digits"]


def test_both_splits_together_are_the_original():
    bunch = load_digits()
    original = {(row.tobytes(), int(label)) for row, label in zip(bunch.data.astype(int), bunch.target, strict=True)}
    found = []
    for dataset in (digits("train"), digits("val")):
        inputs, targets = dataset.get_batch(range(len(dataset)))
        ink = np.rint(inputs.numpy().reshape(-1, 64) * 16).astype(int)
        found += [(row.tobytes(), int(label)) for row, label in zip(ink, targets, strict=True)]
    assert len(found) == 1797
    assert set(found) == original


def test_splits_are_stratified_and_repeat_and_normalize_is_true():
    train, val = digits("train"), digits("val")
    assert (len(train), len(val)) == (1438, 359)
    shares = np.bincount(val.targets) / (np.bincount(val.targets) + np.bincount(train.targets))
    assert shares == pytest.approx([0.2] * 10, abs=0.006)
    assert torch.equal(digits("val").images, val.images)
    scaled = digits("train", "normalize"), digits("val", "normalize")
    x = torch.cat([d.get_batch(range(len(d)))[0] for d in scaled])
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3


def test_samples_are_unit_floats_and_described():
    dataset = digits()
    x, y = dataset[3]
    assert (x.shape, x.dtype, y.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert 0 <= x.min() < x.max() <= 1
    assert (dataset.name, dataset.n_classes, dataset.sample_shape) == ("digits", 10, (1, 8, 8))
    assert digits(transform="resize(16)").sample_shape == (1, 16, 16)


def test_indices_behave_as_those_of_a_list():
    dataset = digits("val")
    assert torch.equal(dataset[-1][0], dataset[358][0])
    assert len(list(dataset)) == 359
    for (x, y), index in zip(dataset.__getitems__([5, 0, 7]), [5, 0, 7], strict=True):
        assert torch.equal(x, dataset[index][0])
        assert y == dataset[index][1]
    with pytest.raises(IndexError, match="sample 359 of 359"):
        dataset[359]


def test_building_a_dataset_draws_nothing_from_the_global_generator():
    state = torch.get_rng_state()
    digits(transform="random_crop(8, padding=1)")
    digits(transform=lambda image: image + torch.randint(0, 2, (1,), dtype=torch.uint8))
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_split_and_bad_files(tmp_path):
    with pytest.raises(DataError, match="train or val"):
        digits("test")
    path = tmp_path / "digits.csv.gz"
    with pytest.raises(DataError, match="cannot be read as digits"):
        digits(path=str(path))
    whole = gzip.compress(b"1,2,3\n" * 1000)
    for content, said in ((whole[:20], "cannot be read as digits"), (whole, "not 64 pixels")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=said):
            digits(path=str(path))
