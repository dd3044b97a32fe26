"""Any folder of images."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from fulltilt.data import DATASETS, build_loader
from fulltilt.data.images.image_sets import decode_image
from fulltilt.errors import DataError

image_folder = DATASETS["image_folder"]


def write_image(path, color, size=(12, 10), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)


def make_flat(root, n=10):
    for name, color in (("apples", (200, 0, 0)), ("pears", (0, 200, 0))):
        for i in range(n):
            write_image(root / name / f"{i}.png", color)
    return root


def test_pixels_channels_first_and_classes_by_name(tmp_path):
    dataset = image_folder(path=str(make_flat(tmp_path)))
    x, y = dataset[len(dataset) - 1]
    assert dataset.classes == ("apples", "pears")
    assert (dataset.n_classes, dataset.sample_shape, int(y)) == (2, (3, 10, 12), 1)
    assert x.mean((1, 2)).tolist() == pytest.approx([0, 200 / 255, 0])


def test_flat_folder_is_split_per_class_without_overlap(tmp_path):
    make_flat(tmp_path)
    train, val = (image_folder(split, path=str(tmp_path), val_fraction=0.3) for split in ("train", "val"))
    assert (len(train), len(val)) == (14, 6)
    assert np.bincount(val.targets).tolist() == [3, 3]
    assert not set(train.files) & set(val.files)
    assert list(image_folder("val", path=str(tmp_path), val_fraction=0.3).files) == list(val.files)


@pytest.mark.parametrize("name", ["val", "valid", "test"])
def test_split_folders_are_taken_as_they_are(tmp_path, name):
    make_flat(tmp_path / "train", 3)
    write_image(tmp_path / name / "pears" / "a.jpg", (0, 200, 0))
    train, val = image_folder(root=str(tmp_path)), image_folder("val", root=str(tmp_path))
    assert (len(train), len(val)) == (6, 1)
    assert val.classes == train.classes
    assert val.targets.tolist() == [1]  # pears keep the number they have in training


def test_modes_and_palettes_become_what_was_asked_for(tmp_path):
    for i, mode in enumerate(("L", "P", "RGBA", "1")):
        write_image(tmp_path / "a" / f"{i}.png", 1, mode=mode)
        write_image(tmp_path / "b" / f"{i}.png", 1, mode=mode)
    assert all(image_folder(path=str(tmp_path))[i][0].shape == (3, 10, 12) for i in range(6))
    assert image_folder(path=str(tmp_path), mode="L").sample_shape == (1, 10, 12)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_keep_their_brightness(tmp_path, suffix):
    """Pillow's own conversion cuts them off at 255: white"""
    values = np.array([[0, 257 * 100, 257 * 200 + 128], [65_535, 128, 129]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"x.{suffix}")
    gray = decode_image(tmp_path / f"x.{suffix}", mode="L")
    assert gray.tolist() == [[[0, 100, 200], [255, 0, 1]]]
    assert torch.equal(decode_image(tmp_path / f"x.{suffix}"), gray.expand(3, 2, 3))


def test_numbers_without_a_known_white_are_refused_by_name(tmp_path):
    Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(DataError, match=r"x.tif holds numbers of Pillow's mode F.*8 or 16 bits"):
        decode_image(tmp_path / "x.tif")


def test_images_of_different_sizes_load_with_a_resize_and_are_named_without(tmp_path):
    make_flat(tmp_path)
    write_image(tmp_path / "apples" / "big.png", (9, 9, 9), size=(31, 20))
    dataset = image_folder(path=str(tmp_path), transform="resize(8)", val_fraction=0.01)
    loader = build_loader(dataset, batch_size=20, shuffle=True, drop_last=False, options={"num_workers": 1})
    assert next(iter(loader))[0].shape == (20, 3, 8, 8)
    plain = image_folder(path=str(tmp_path), val_fraction=0.01)
    with pytest.raises(DataError, match="differ in shape"):
        plain.get_batch(range(len(plain)))


def test_nested_files_are_found_and_other_files_ignored(tmp_path):
    make_flat(tmp_path, 2)
    write_image(tmp_path / "apples" / "deep" / "er" / "x.JPG", (1, 1, 1))
    (tmp_path / "apples" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    train, val = (image_folder(split, path=str(tmp_path), val_fraction=0.4) for split in ("train", "val"))
    assert len(train) + len(val) == 5


def test_dataset_survives_pickling(tmp_path):
    dataset = image_folder(path=str(make_flat(tmp_path)), transform="resize(4) | random_flip")
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[0][0], dataset[0][0])


@pytest.mark.parametrize("content", [b"not an image", b"", None])
def test_a_damaged_image_is_named(tmp_path, content):
    make_flat(tmp_path)
    dataset = image_folder(path=str(tmp_path), val_fraction=0.1)
    file = tmp_path / "pears" / "3.png"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(DataError, match=r"pears/3\.png cannot be decoded"):
        dataset.get_batch(range(len(dataset)))


def test_a_folder_whose_first_images_are_all_damaged_says_how_many(tmp_path):
    make_flat(tmp_path / "train", 8)
    make_flat(tmp_path / "val", 1)
    for file in [*(tmp_path / "train" / "apples").iterdir(), *(tmp_path / "train" / "pears").glob("[01].png")]:
        file.write_bytes(b"")
    with pytest.raises(DataError, match=r"none of the first 10 images can be read; the last one: .*pears.* cannot be"):
        image_folder(path=str(tmp_path))


def test_bad_folders(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        image_folder(path=str(tmp_path / "no"))
    with pytest.raises(DataError, match="no class folders"):
        image_folder(path=str(tmp_path))
    make_flat(tmp_path / "x", 2)
    (tmp_path / "x" / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no images"):
        image_folder(path=str(tmp_path / "x"))
    make_flat(tmp_path / "y" / "train", 2)
    with pytest.raises(DataError, match=r"has train/ and no val"):
        image_folder(path=str(tmp_path / "y"))
    write_image(tmp_path / "y" / "val" / "plums" / "a.png", 0)
    with pytest.raises(DataError, match="lacks: plums"):
        image_folder("val", path=str(tmp_path / "y"))
    with pytest.raises(DataError, match=r"val_fraction 1\.5"):
        image_folder(path=str(make_flat(tmp_path / "z")), val_fraction=1.5)
