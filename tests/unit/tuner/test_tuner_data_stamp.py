"""Data that changed are told from data that did not, without reading them."""

from __future__ import annotations

import inspect
import itertools
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from fulltilt.config import config_from_values
from fulltilt.data import DATASETS
from fulltilt.data.images.cifar10_formats import CLASSES
from fulltilt.tuner.question import data_stamp
from fulltilt.tuner.question.data_stamp import DEFAULT_ROOT, READS, stamp_data

OLD_NS, NEW_NS = 1_600_000_000_000_000_000, 1_600_000_000_000_000_001


def write(path, content="x", time_ns=OLD_NS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.utime(path, ns=(time_ns, time_ns))


def stamp(folder, **data):
    return stamp_data(config_from_values({"data": data}, base_dir=str(folder)))


def test_a_file_is_known_by_its_size_and_its_time(tmp_path):
    write(tmp_path / "a.h5")
    first = stamp(tmp_path, dataset="hdf5", path="a.h5")
    assert first == {"a.h5": {"n_bytes": 1, "modified": "2020-09-13 12:26:40.000000000 UTC"}}
    assert stamp(tmp_path, dataset="hdf5", path="a.h5") == first
    write(tmp_path / "a.h5", time_ns=NEW_NS)
    assert stamp(tmp_path, dataset="hdf5", path="a.h5") != first
    write(tmp_path / "a.h5", "xy")
    assert stamp(tmp_path, dataset="hdf5", path="a.h5")["a.h5"]["n_bytes"] == 2


def test_a_folder_is_known_by_its_files_and_what_a_run_writes_beside_them_is_no_data(tmp_path, monkeypatch):
    cat, stamps = tmp_path / "cat/1.png", []
    changes = (
        lambda: write(cat), lambda: write(cat, time_ns=NEW_NS), lambda: write(cat, "longer"),
        lambda: write(tmp_path / "dog/3.png"), cat.unlink,
    )  # fmt: skip
    for change in changes:
        change()
        stamps.append(first := stamp(tmp_path, dataset="image_folder", path="."))
    assert all(before != after for before, after in itertools.pairwise(stamps))
    assert [found["."]["n_files"] for found in stamps] == [1, 1, 1, 2, 1]
    for name in ("runs/tune/a/fingerprint.json", "runs/tune/a/trials.jsonl", ".cache/x"):
        write(tmp_path / name)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "round").symlink_to(tmp_path)
    assert stamp(tmp_path, dataset="image_folder", path=".") == first
    monkeypatch.setattr(data_stamp, "MAX_FILES", 4)
    for number in range(9):
        write(tmp_path / f"images/{number // 3}/{number}.png")
    assert stamp(tmp_path, dataset="image_folder", path="images")["images"]["n_files"] == 4


def test_paths_are_found_wherever_the_configuration_names_them(tmp_path):
    for name in ("a.h5", "b.h5", "c/d.txt", "plain/x"):
        write(tmp_path / name)
    data = {"dataset": "hdf5(path=a.h5)", "val_dataset": "mine:d(f(b.h5), c/d.txt)"}
    config = config_from_values({"task": "mine:build(root=plain)", "data": data}, base_dir=str(tmp_path))
    assert set(stamp_data(config)) == {"plain", "a.h5", "b.h5", "c/d.txt"}
    assert stamp(tmp_path, dataset="digits") == {}
    assert stamp(tmp_path, dataset="hdf5", path="gone.h5") == {}
    assert set(stamp(tmp_path, dataset="hdf5", path=str(tmp_path / "a.h5"))) == {str(tmp_path / "a.h5")}
    write(tmp_path / "data" / "x.bin")  # which is read when none is named
    assert set(stamp(tmp_path, dataset="cifar10")) == {"data"}
    assert set(stamp(tmp_path, dataset="cifar10(root=other)", path=None)) == set()
    roots = {name: inspect.signature(build).parameters.get("root") for name, build in DATASETS.items()}
    assert {name for name, root in roots.items() if root is not None} == set(READS)
    assert {root.default for root in roots.values() if root is not None} == {DEFAULT_ROOT}


def write_cifar10(folder):
    batch = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]})
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        write(folder / "cifar-10-batches-py" / name, batch)


def write_images(folder, classes=("cat",)):
    for split, name in itertools.product(("train", "test"), classes):
        write(folder / split / name / "1.png")
        Image.new("RGB", (32, 32)).save(folder / split / name / "1.png")


def write_stl10(folder):
    for name in ("train", "test"):
        write(folder / "stl10_binary" / f"{name}_X.bin", "0" * 12)
        write(folder / "stl10_binary" / f"{name}_y.bin", "\x01")


@pytest.mark.parametrize(
    ("dataset", "write_data", "part"),
    [
        ("cifar10", write_cifar10, "cifar-10-batches-py/data_batch_3"),
        ("cifar10", lambda folder: write_images(folder / "small", CLASSES), "small/test/truck/1.png"),
        ("image_folder", write_images, "train/cat/1.png"),
        ("stl10", write_stl10, "stl10_binary/test_y.bin"),
    ],
)
@pytest.mark.parametrize("root", ["", "(root=data)"])
def test_other_data_beside_those_that_are_read_change_nothing(tmp_path, dataset, write_data, part, root):
    write_data(tmp_path / "data")
    options = {"cache": False} if dataset == "cifar10" else {}
    assert DATASETS[dataset](base_dir=str(tmp_path), **options)[0]
    first = stamp(tmp_path, dataset=dataset + root)
    assert first["data"]["n_files"] > 1
    write(tmp_path / "data/events.h5")
    write(tmp_path / "data/wikitext2/train.bin")
    assert stamp(tmp_path, dataset=dataset + root) == first
    os.utime(tmp_path / "data" / part, ns=(OLD_NS + 10**18, OLD_NS + 10**18))
    assert stamp(tmp_path, dataset=dataset + root) != first


@pytest.mark.parametrize(
    "data", [{"path": "mine"}, {"dataset": "image_folder(mine/)", "val_dataset": "mine:build(mine/)"}]
)
def test_a_folder_that_the_users_own_code_reads_alone_or_too_counts_whole(tmp_path, data):
    """Without a data set in the configuration its stamp was 0 files of 0 bytes, whatever the folder held."""
    write_images(tmp_path / "mine")
    first = stamp(tmp_path, **data)
    assert all(found["n_files"] == 2 for found in first.values())
    write(tmp_path / "mine" / "more.txt")
    assert stamp(tmp_path, **data) != first
    for name in ("test", "control"):  # a class that is called test is not all of a folder of classes
        write(tmp_path / "data" / name / "1.png")
    assert stamp(tmp_path, dataset="image_folder")["data"]["n_files"] == 2
