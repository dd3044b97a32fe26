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


def write(path, text="x", time_ns=OLD_NS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
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


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: write(folder / "dog" / "3.png"),
        lambda folder: write(folder / "cat" / "1.png", time_ns=NEW_NS),
        lambda folder: write(folder / "cat" / "1.png", "longer"),
        lambda folder: (folder / "cat" / "1.png").unlink(),
    ],
)
def test_a_folder_is_known_by_its_files(tmp_path, change):
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        write(tmp_path / "images" / name)
    first = stamp(tmp_path, dataset="image_folder", path="images")
    assert first["images"]["n_files"] == 3
    change(tmp_path / "images")
    assert stamp(tmp_path, dataset="image_folder", path="images") != first


def test_what_a_run_writes_beside_the_data_is_no_data(tmp_path):
    write(tmp_path / "cat" / "1.png")
    first = stamp(tmp_path, dataset="image_folder", path=".")
    write(tmp_path / "runs" / "tune" / "a" / "fingerprint.json")
    write(tmp_path / "runs" / "tune" / "a" / "trials.jsonl")
    write(tmp_path / ".cache" / "x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "round").symlink_to(tmp_path)
    assert stamp(tmp_path, dataset="image_folder", path=".") == first


def test_a_large_folder_costs_no_more_than_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(data_stamp, "MAX_FILES", 4)
    for number in range(9):
        write(tmp_path / "images" / f"{number // 3}" / f"{number}.png")
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


def test_the_folder_that_a_data_set_reads_when_none_is_named_is_seen(tmp_path):
    write(tmp_path / "data" / "x.bin")
    assert set(stamp(tmp_path, dataset="cifar10")) == {"data"}
    assert set(stamp(tmp_path, dataset="cifar10(root=other)", path=None)) == set()
    roots = {name: inspect.signature(build).parameters.get("root") for name, build in DATASETS.items()}
    assert {name for name, root in roots.items() if root is not None} == set(READS)
    assert {root.default for root in roots.values() if root is not None} == {DEFAULT_ROOT}


def write_cifar10(folder):
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        path = folder / "cifar-10-batches-py" / name
        write(path)
        path.write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}))


def write_images(folder, classes=("cat",)):
    for split, name in itertools.product(("train", "test"), classes):
        path = folder / split / name / "1.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32)).save(path)


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
    """a search over cifar10 lost its rows when a file for another configuration was made in data/"""
    write_data(tmp_path / "data")
    options = {"cache": False} if dataset == "cifar10" else {}
    assert DATASETS[dataset](base_dir=str(tmp_path), **options)[0]
    first = stamp(tmp_path, dataset=dataset + root)
    assert first["data"]["n_files"] > 1
    write(tmp_path / "data" / "events.h5")
    write(tmp_path / "data" / "wikitext2" / "train.bin")
    assert stamp(tmp_path, dataset=dataset + root) == first
    os.utime(tmp_path / "data" / part, ns=(OLD_NS + 10**18, OLD_NS + 10**18))
    assert stamp(tmp_path, dataset=dataset + root) != first


def test_a_class_that_is_called_test_is_not_all_of_a_folder_of_classes(tmp_path):
    for name in ("test", "control"):
        write(tmp_path / "data" / name / "1.png")
    assert stamp(tmp_path, dataset="image_folder")["data"]["n_files"] == 2


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
