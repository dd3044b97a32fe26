"""HDF5 by dataset names: rows, layouts, processes."""

from __future__ import annotations

import collections
import multiprocessing
import os
import pickle

import h5py
import numpy as np
import pytest
import torch

from fulltilt.data import DATASETS, build_loader
from fulltilt.data.tables.hdf5_mapped import MappedRows
from fulltilt.data.tables.hdf5_rows import LibraryRows, plan_runs
from fulltilt.errors import ConfigError, DataError

hdf5 = DATASETS["hdf5"]

LAYOUTS = {
    "contiguous": {},
    "one row a chunk": {"chunks": (1, 3, 4)},
    "many rows a chunk": {"chunks": (7, 3, 2)},
    "compressed": {"chunks": (8, 3, 4), "compression": "gzip", "shuffle": True},
}


def write_file(path, n=50, dtype="f4", labels=None, **layout):
    x = np.random.default_rng(0).normal(0, 50, (n, 3, 4)).astype(dtype)
    y = np.arange(n) % 5 if labels is None else labels
    with h5py.File(path, "w") as file:
        file.create_dataset("input", data=x, **layout)
        file.create_dataset("label", data=y)
    return x, np.asarray(y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_come_in_the_order_asked_for_whatever_the_layout(tmp_path, layout):
    x, y = write_file(tmp_path / "f.h5", **LAYOUTS[layout])
    dataset = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0)
    for indices in ([3, 4, 5, 30, 1, 49, 0, 2], [7, 7, 6], [49], list(range(50)), [20, 3, 21, 4]):
        inputs, targets = dataset.get_batch(indices)
        assert np.array_equal(inputs.numpy(), x[indices])
        assert np.array_equal(targets.numpy(), y[indices])
    assert type(dataset.sources[0]) is (LibraryRows if layout == "compressed" else MappedRows)


@pytest.mark.parametrize("dtype", [">f4", "f2", "f8", "i2", "u1", "?"])
def test_types_become_what_torch_trains_on(tmp_path, dtype):
    x, _ = write_file(tmp_path / "f.h5", dtype=dtype)
    inputs, targets = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0).get_batch([4, 2])
    expected = x[[4, 2]].astype(float) / (255 if dtype == "u1" else 1)
    np.testing.assert_allclose(inputs.numpy(), expected, rtol=1e-6)
    assert inputs.dtype == (torch.int64 if dtype in ("i2", "?") else torch.float32)
    assert targets.dtype == torch.int64


def test_a_file_behind_a_user_block_and_one_of_the_newest_format(tmp_path):
    for name, chunks, options in (
        ("u.h5", None, {"userblock_size": 1024}),
        ("c.h5", (4, 3), {"userblock_size": 512}),
        ("l.h5", None, {"libver": "latest"}),
    ):
        with h5py.File(tmp_path / name, "w", **options) as file:
            file.create_dataset("input", data=np.arange(60, dtype="f4").reshape(20, 3), chunks=chunks)
            file["label"] = np.arange(20)
        inputs, _ = hdf5(path=str(tmp_path / name), val_fraction=0).get_batch([19, 0])
        assert inputs.tolist() == [[57, 58, 59], [0, 1, 2]]


def test_classes_are_counted_and_shapes_described(tmp_path):
    write_file(tmp_path / "f.h5")
    dataset = hdf5(path=str(tmp_path / "f.h5"))
    assert (dataset.name, dataset.n_classes, dataset.sample_shape, dataset.target_shape) == ("hdf5", 5, (3, 4), ())
    write_file(tmp_path / "g.h5", labels=np.zeros((50, 6), "f4"))
    other = hdf5(path=str(tmp_path / "g.h5"))
    assert (other.n_classes, other.target_shape) == (None, (6,))


def test_splits_cover_the_file_without_overlap_and_datasets_may_lie_in_groups(tmp_path):
    write_file(tmp_path / "f.h5")
    with h5py.File(tmp_path / "g.h5", "w") as file:
        file["a/x"], file["a/y"] = np.zeros((10, 1)), np.arange(10)
    named = hdf5(path=str(tmp_path / "g.h5"), inputs="a/x", targets="a/y", val_fraction=0)
    assert named[-1][1] == 9
    with pytest.raises(IndexError, match="sample 10 of 10"):
        named[10]
    train, val = (hdf5(s, path=str(tmp_path / "f.h5"), val_fraction=0.2) for s in ("train", "val"))
    assert (len(train), len(val)) == (40, 10)
    assert sorted([*train.rows, *val.rows]) == list(range(50))
    assert not np.array_equal(hdf5("val", path=str(tmp_path / "f.h5"), val_fraction=0.2, seed=1).rows, val.rows)


def test_image_transforms_apply_to_pixels(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (12, 3, 8, 8), dtype=np.uint8)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["input"], file["label"] = pixels, np.arange(12)
    dataset = hdf5(path=str(tmp_path / "f.h5"), transform="center_crop(4)", val_fraction=0)
    assert dataset.sample_shape == (3, 4, 4)
    np.testing.assert_allclose(dataset[5][0].numpy(), pixels[5, :, 2:6, 2:6] / 255, rtol=1e-6)
    with pytest.raises(ConfigError, match="center_crop"):
        hdf5(path=str(tmp_path / "f.h5"), transform="centre_crop(4)")


@pytest.mark.parametrize(
    ("layout", "context"), [("contiguous", "fork"), ("compressed", "fork"), ("compressed", "forkserver")]
)
def test_workers_read_the_right_rows_after_the_parent_has_read(tmp_path, layout, context):
    x, _ = write_file(tmp_path / "f.h5", n=400, labels=np.arange(400), **LAYOUTS[layout])
    dataset = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0)
    dataset.get_batch([0, 399])
    options = {"num_workers": 2, "multiprocessing_context": context}
    loader = build_loader(dataset, batch_size=16, shuffle=True, drop_last=False, options=options, seed=1)
    seen = []
    for inputs, rows in loader:
        assert np.array_equal(inputs.numpy(), x[rows.numpy()])
        dataset.get_batch([int(rows[0])])  # the parent keeps reading between
        seen += rows.tolist()
    assert sorted(seen) == list(range(400))


def test_a_worker_opens_each_dataset_once_whatever_it_reads(tmp_path, monkeypatch):
    """Opening the file for each sample is what makes HDF5 slow in most training loops."""
    write_file(tmp_path / "f.h5", n=400, labels=np.arange(400), **LAYOUTS["compressed"])
    dataset = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0)
    notes, open_file = tmp_path / "opened", h5py.File

    def note(*args, **options):
        with notes.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return open_file(*args, **options)

    monkeypatch.setattr(h5py, "File", note)
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = build_loader(dataset, batch_size=8, shuffle=True, drop_last=False, options=options, seed=1)
    assert sum(len(rows) for _, rows in loader) == 400
    counts = collections.Counter(notes.read_text().split())
    assert len(counts) == 2, "the workers, and not the process that started them"
    assert set(counts.values()) == {sum(isinstance(source, LibraryRows) for source in dataset.sources)}


def test_no_open_hdf5_handle_crosses_a_fork(tmp_path):
    write_file(tmp_path / "f.h5", **LAYOUTS["compressed"])
    dataset = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0)
    dataset.sources = tuple(LibraryRows(layout) for layout in dataset.layouts)
    dataset.get_batch([0])
    assert count_descriptors(tmp_path / "f.h5") == 1  # HDF5 shares one descriptor per file
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=lambda: child.send((count_descriptors(tmp_path / "f.h5"), dataset.get_batch([2])[1].tolist()))
    )
    process.start()
    n_inherited, targets = parent.recv()
    process.join()
    assert (n_inherited, targets) == (0, [2])
    assert dataset.get_batch([3])[1].tolist() == [3]


def count_descriptors(path):
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return links.count(str(path))


@pytest.mark.parametrize("layout", ["contiguous", "compressed"])
def test_pickling_drops_handles(tmp_path, layout):
    x, _ = write_file(tmp_path / "f.h5", **LAYOUTS[layout])
    dataset = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0)
    dataset.get_batch([1])
    data = pickle.dumps(dataset)
    assert len(data) < 3000
    assert np.array_equal(pickle.loads(data).get_batch([9])[0].numpy(), x[[9]])


def test_runs_of_neighbours_are_read_together():
    _, runs = plan_runs([9, 3, 4, 5, 20, 3])
    assert [(first, places.tolist()) for first, places in runs] == [(3, [1]), (3, [5, 2, 3]), (9, [0]), (20, [4])]
    assert list(plan_runs([])[1]) == []


def test_a_chunk_is_decompressed_once_per_batch(tmp_path):
    write_file(tmp_path / "f.h5", n=64, chunks=(16, 3, 4), compression="gzip")
    rows = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0).sources[0]
    reads = []

    class Counting:
        def __init__(self, dataset):
            self.dataset = dataset

        def __getitem__(self, key):
            reads.append(key)
            return self.dataset[key]

    rows.read([0])
    rows._dataset = Counting(rows._dataset)
    rows.read([1, 40, 3, 44, 15, 33])
    assert reads == [slice(1, 16), slice(33, 45)]


@pytest.mark.parametrize("layout", ["contiguous", "compressed"])
def test_a_file_cut_while_in_use_is_said_so(tmp_path, layout):
    write_file(tmp_path / "f.h5", n=4000, **LAYOUTS[layout])
    dataset = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0)
    os.truncate(tmp_path / "f.h5", 20_000)
    with pytest.raises(DataError, match=r"f\.h5.*(was cut|cannot be)"):
        dataset.get_batch([3999, 2000, 3998])
