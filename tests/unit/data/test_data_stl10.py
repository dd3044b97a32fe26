"""STL-10's binary format: read, refused where it is damaged, and written from other images."""

import importlib

import numpy as np
import pytest
import torch
from data_cases import assert_equal, write_images
from PIL import Image

from fulltilt.cli import run_command
from fulltilt.data import DATASETS, build_loader, make_stl10, take_raw
from fulltilt.errors import DataError

stl10 = DATASETS["stl10"]
stl10_module = importlib.import_module("fulltilt.data.images.stl10")
SIDE = 6
NAMES = ("bird", "cat", "dog")


def make_pixels(n, seed):
    """(N, C, H, W): no two images, channels, rows or columns alike."""
    return np.random.default_rng(seed).integers(0, 256, (n, 3, SIDE, SIDE), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "stl"
    folder.mkdir()
    for name, n, seed in (("train", 9, 0), ("test", 6, 1), ("unlabeled", 12, 2)):
        (folder / f"{name}_X.bin").write_bytes(make_pixels(n, seed).swapaxes(2, 3).tobytes())  # column by column
        if name != "unlabeled":
            (folder / f"{name}_y.bin").write_bytes(bytes(1 + i % 3 for i in range(n)))
    (folder / "class_names.txt").write_text("".join(f"{name}\n" for name in NAMES))
    return folder


def test_images_lie_upright_and_labels_start_at_zero(folder):
    dataset = stl10(path=str(folder))
    images, targets = take_raw(dataset).get_batch([4, 0, -1])
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy(), make_pixels(9, 0)[[4, 0, 8]])
    assert targets.tolist() == [1, 0, 2]
    floats, _ = dataset.get_batch([4])
    assert torch.equal(floats[0], images[0].float() / 255)
    assert (dataset.n_classes, dataset.classes, dataset.sample_shape) == (3, NAMES, (3, SIDE, SIDE))


def test_parts_follow_each_other_and_unlabelled_images_have_no_target(folder):
    dataset = stl10(path=str(folder), part="train+unlabeled")
    assert len(dataset) == 21
    images, targets = take_raw(dataset).get_batch([20, 3, 9, 8])
    expected = np.concatenate([make_pixels(9, 0), make_pixels(12, 2)])
    assert np.array_equal(images.numpy(), expected[[20, 3, 9, 8]])
    assert targets.tolist() == [-1, 0, -1, 2]
    assert stl10(path=str(folder), part="unlabeled").targets.unique().tolist() == [-1]
    options = {"num_workers": 1}
    loader = build_loader(take_raw(dataset), batch_size=8, shuffle=True, drop_last=False, seed=1, options=options)
    seen = torch.cat([images for images, _ in loader]).flatten(1)
    assert sorted(seen.tolist()) == sorted(expected.reshape(21, -1).tolist()), "the worker maps the file too"


def test_the_validation_split_is_the_test_files_and_the_folder_may_be_the_one_above(folder):
    folder.rename(folder.parent / "stl10_binary")
    dataset = stl10("val", path=str(folder.parent), part="unlabeled")
    assert np.array_equal(take_raw(dataset).get_batch(range(6))[0].numpy(), make_pixels(6, 1))


def test_normalize_takes_mean_and_deviation_of_the_training_images(folder):
    floats, _ = stl10(path=str(folder), transform="normalize").get_batch(range(9))
    torch.testing.assert_close(floats.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(floats.std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
    val, _ = stl10("val", path=str(folder), transform="normalize").get_batch(range(6))
    assert val.mean(dim=(0, 2, 3)).abs().max() > 1e-3, "mean and deviation are those of training"


@pytest.mark.parametrize(
    ("name", "part", "change", "said"),
    [
        ("train_X.bin", "train", lambda content: content[:-1], "truncated"),
        ("train_X.bin", "train", lambda content: content[: -3 * SIDE * SIDE], "truncated"),
        ("train_y.bin", "train", lambda content: content[:-1], "8 labels"),
        ("train_y.bin", "train", lambda content: b"", "0 labels"),
        ("train_y.bin", "train", None, r"train_y\.bin is not there"),
        ("train_y.bin", "train", lambda content: b"\0\1\2" + b"\3" * 6, "labels from 0 to 3, expected 1 to 3"),
        ("unlabeled_X.bin", "train+unlabeled", lambda content: content[:-5], "no whole number of images"),
        ("test_X.bin", "val", lambda content: content[: -3 * SIDE * SIDE], r"holds 5 images .* 6 labels"),
        ("unlabeled_X.bin", "train+unlabeled", None, r"not there.*make-stl10 .--labelled N.*part=train takes"),
    ],
)
def test_files_that_are_cut_changed_or_missing_are_told(folder, name, part, change, said):
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if change:
        (folder / name).write_bytes(change(content))
    with pytest.raises(DataError, match=said):
        stl10("val", path=str(folder)) if part == "val" else stl10(path=str(folder), part=part)


@pytest.fixture
def source(tmp_path):
    """Two classes, PNG: pixels come back exactly."""
    return write_splits(tmp_path / "images")


def write_splits(root, shape=(10, 8)):
    for split, n in (("train", 5), ("test", 2)):
        write_images(root, {f"{split}/{name}": shape for name in ("ant", "big bee")}, n)
    return root


def test_a_folder_of_images_goes_there_and_back(tmp_path):
    source = write_splits(tmp_path / "images", shape=(SIDE, SIDE))
    made = make_stl10(source, tmp_path / "out", size=SIDE)
    assert (made.n_train, made.n_test, made.n_unlabeled) == (10, 4, 0)
    before, after = take_raw(DATASETS["image_folder"](path=str(source))), stl10(path=str(tmp_path / "out"))
    assert_equal([take_raw(after).get_batch(range(10))], [before.get_batch(range(10))])
    assert after.classes == ("ant", "big_bee")
    assert not (tmp_path / "out" / "unlabeled_X.bin").exists()


def test_images_of_any_shape_are_brought_to_one(tmp_path):
    source = write_splits(tmp_path / "images", shape=(10, 16))
    make_stl10(source, tmp_path / "out", size=5)
    whole = Image.open(source / "train" / "ant" / "00.png").resize((8, 5), Image.Resampling.BILINEAR)
    expected = np.asarray(whole)[:, 1:6].transpose(2, 0, 1).astype(float)
    found = take_raw(stl10(path=str(tmp_path / "out"))).get_batch([0])[0][0].numpy().astype(float)
    assert np.abs(found - expected).max() <= 2


def test_images_without_their_label_keep_every_class_on_both_sides(source, tmp_path):
    made = make_stl10(source, tmp_path / "out", size=4, n_labelled=4)
    assert (made.n_train, made.n_unlabeled) == (4, 6)
    assert stl10(path=str(tmp_path / "out")).targets.bincount().tolist() == [2, 2]
    assert len(stl10(path=str(tmp_path / "out"), part="train+unlabeled")) == 10
    made = make_stl10(source, tmp_path / "out", size=4, limit=6, force=True)
    assert (made.n_train, made.n_test) == (6, 1)
    assert stl10(path=str(tmp_path / "out")).targets.bincount().tolist() == [3, 3]


def test_the_command_writes_and_does_not_overwrite(source, tmp_path, capsys):
    words = ["data", "make-stl10", str(source), str(tmp_path / "out"), "--size", "4", "--labelled", "4"]
    assert run_command(words) == 0
    assert "4 labelled, 6 unlabelled and 4 test images of 4 × 4, 2 classes" in capsys.readouterr().out
    assert run_command(words) == 2
    assert "--force" in capsys.readouterr().err
    assert run_command([*words[:-2], "--force"]) == 0
    assert not (tmp_path / "out" / "unlabeled_X.bin").exists(), "what was replaced had it, what replaces it has not"


@pytest.mark.parametrize(
    ("options", "said"), [({"size": 0}, "size 0"), ({"n_labelled": 10}, "labelled 10"), ({"limit": 0}, "limit 0")]
)
def test_numbers_out_of_range_are_told_and_a_folder_without_stl10_names_the_command(source, tmp_path, options, said):
    with pytest.raises(DataError, match=said):
        make_stl10(source, tmp_path / "out", **options)
    with pytest.raises(DataError, match="make-stl10"):
        stl10(path=str(tmp_path))


def test_images_and_labels_that_are_being_replaced_are_not_read_together(source, tmp_path):
    """Both have the same number of rows: nothing else would tell images from labels of another order."""
    out = tmp_path / "out"
    make_stl10(source, out, size=4)

    def stop_at_test_images(done, total):
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_stl10(source, out, size=4, force=True, progress=stop_at_test_images)
    with pytest.raises(DataError, match=r"being replaced by fulltilt data make-stl10, or that was broken off.*--force"):
        stl10(path=str(out))
    make_stl10(source, out, size=4, force=True)
    assert len(stl10(path=str(out))) == 10


def test_a_folder_that_is_replaced_while_it_is_opened_is_refused(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    make_stl10(source, out, size=4)
    read_side = stl10_module.read_side

    def replace_meanwhile(folder):
        make_stl10(source, out, size=4, force=True)
        return read_side(folder)

    monkeypatch.setattr(stl10_module, "read_side", replace_meanwhile)
    with pytest.raises(DataError, match="being replaced"):
        stl10(path=str(out))
