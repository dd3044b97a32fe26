"""Any folder of images."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from fulltilt.data import DATASETS, build_loader, take_raw
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
    """Images lie at any depth, and other files are no images."""
    make_flat(tmp_path, 9)
    write_image(tmp_path / "apples" / "deep" / "er" / "x.JPG", (1, 1, 1))
    write_image(tmp_path / "pears" / "deep" / "x.png", (1, 1, 1))
    (tmp_path / "apples" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
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
    for name, mode in itertools.product("ab", ("L", "P", "RGBA", "1")):
        write_image(tmp_path / name / f"{mode}.png", 1, mode=mode)
    assert all(image_folder(path=str(tmp_path))[i][0].shape == (3, 10, 12) for i in range(6))
    assert image_folder(path=str(tmp_path), mode="L").sample_shape == (1, 10, 12)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_keep_their_brightness_and_numbers_without_a_known_white_are_refused(tmp_path, suffix):
    """Pillow's own conversion cuts them off at 255: white"""
    values = np.array([[0, 257 * 100, 257 * 200 + 128], [65_535, 128, 129]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"x.{suffix}")
    gray = decode_image(tmp_path / f"x.{suffix}", mode="L")
    assert gray.tolist() == [[[0, 100, 200], [255, 0, 1]]]
    assert torch.equal(decode_image(tmp_path / f"x.{suffix}"), gray.expand(3, 2, 3))
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
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[0][0], dataset[0][0])
    for shapeless in (plain, take_raw(dataset)):
        with pytest.raises(DataError, match=r"differ in shape.*make-stl10"):
            shapeless.get_batch(range(len(plain)))


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


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no", {}, "is not a folder"),
        ("bare", {}, "no class folders"),
        ("hollow", {}, "empty holds no images"),
        ("half", {}, r"has train/ and no val"),
        ("unlike", {"split": "val"}, "lacks: plums"),
        ("flat", {"val_fraction": 1.5}, r"val_fraction 1\.5"),
    ],
)
def test_folders_that_are_none(tmp_path, name, options, words):
    for folder in ("flat", "hollow", "half/train", "unlike/train"):
        make_flat(tmp_path / folder, 1)
    for folder in ("bare", "hollow/empty"):
        (tmp_path / folder).mkdir()
    write_image(tmp_path / "unlike" / "val" / "plums" / "a.png", 0)
    with pytest.raises(DataError, match=words):
        image_folder(path=str(tmp_path / name), **options)
