"""HDF5: rows out of every layout a file can have, by every reader, in every kind of process."""

import collections
import itertools
import multiprocessing
import os
import pickle

import h5py
import numpy as np
import psutil
import pytest
import torch
from data_cases import write_hdf5

from fulltilt.data import DATASETS, build_loader
from fulltilt.data.tables import hdf5_rows
from fulltilt.data.tables.hdf5_file import find_layouts
from fulltilt.data.tables.hdf5_layout import find_pieces
from fulltilt.data.tables.hdf5_mapped import MappedRows, plan_ranges
from fulltilt.data.tables.hdf5_rates import drop_cache, read_cached_pct
from fulltilt.data.tables.hdf5_rows import DirectRows, LibraryRows, build_rows, plan_runs
from fulltilt.errors import DataError
from fulltilt.hardware import Filesystem

hdf5 = DATASETS["hdf5"]

COMPRESSED = {"chunks": (8, 3, 4), "compression": "gzip", "shuffle": True}


def write_file(path, n=50, dtype="f4", labels=None, **layout):
    x = np.random.default_rng(0).normal(0, 50, (n, 3, 4)).astype(dtype)
    write_hdf5(path, input={"data": x, **layout}, label=np.arange(n) % 5 if labels is None else labels)
    return x


@pytest.mark.parametrize("dtype", [">f4", "f2", "f8", "i2", "u1", "?"])
def test_types_become_what_torch_trains_on(tmp_path, dtype):
    x = write_file(tmp_path / "f.h5", dtype=dtype)
    inputs, targets = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0).get_batch([4, 2])
    expected = x[[4, 2]].astype(float) / (255 if dtype == "u1" else 1)
    np.testing.assert_allclose(inputs.numpy(), expected, rtol=1e-6)
    assert inputs.dtype == (torch.int64 if dtype in ("i2", "?") else torch.float32)
    assert targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("chunks", "options"),
    [(None, {"userblock_size": 1024}), ((4, 3), {"userblock_size": 512}), (None, {"libver": "latest"})],
)
def test_a_file_behind_a_user_block_and_one_of_the_newest_format(tmp_path, chunks, options):
    with h5py.File(tmp_path / "f.h5", "w", **options) as file:
        file.create_dataset("input", data=np.arange(60, dtype="f4").reshape(20, 3), chunks=chunks)
        file["label"] = np.arange(20)
    inputs, _ = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0).get_batch([19, 0])
    assert inputs.tolist() == [[57, 58, 59], [0, 1, 2]]


def test_splits_cover_the_file_without_overlap_and_are_described(tmp_path):
    write_file(tmp_path / "f.h5")
    write_file(tmp_path / "many.h5", labels=np.zeros((50, 6), "f4"))
    found = [hdf5(path=str(tmp_path / name)) for name in ("f.h5", "many.h5")]
    described = [(one.name, one.sample_shape, one.n_classes, one.target_shape) for one in found]
    assert described == [("hdf5", (3, 4), 5, ()), ("hdf5", (3, 4), None, (6,))]
    write_hdf5(tmp_path / "g.h5", **{"a/x": np.zeros((10, 1)), "a/y": np.arange(10)})
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
    path = write_hdf5(tmp_path / "f.h5", input=pixels, label=np.arange(12))
    dataset = hdf5(path=str(path), transform="center_crop(4)", val_fraction=0)
    assert dataset.sample_shape == (3, 4, 4)
    np.testing.assert_allclose(dataset[5][0].numpy(), pixels[5, :, 2:6, 2:6] / 255, rtol=1e-6)


def test_a_worker_opens_each_dataset_once_whatever_it_reads(tmp_path, monkeypatch):
    """Opening the file for each sample is what makes HDF5 slow in most training loops."""
    write_file(tmp_path / "f.h5", n=400, labels=np.arange(400), **COMPRESSED)
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


def test_no_open_hdf5_handle_crosses_a_fork_or_lies_in_a_pickle(tmp_path):
    x = write_file(tmp_path / "f.h5", **COMPRESSED)
    dataset = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0)
    dataset.sources = tuple(LibraryRows(layout) for layout in dataset.layouts)
    dataset.get_batch([0])
    assert count_descriptors(tmp_path / "f.h5") == 1  # HDF5 shares one descriptor per file
    parent, child = multiprocessing.Pipe()

    def read():
        child.send((count_descriptors(tmp_path / "f.h5"), dataset.get_batch([2])[1].tolist()))

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    assert parent.recv() == (0, [2]), "no handle was inherited"
    process.join()
    assert dataset.get_batch([3])[1].tolist() == [3]
    data = pickle.dumps(dataset)
    assert len(data) < 3000
    assert np.array_equal(pickle.loads(data).get_batch([9])[0].numpy(), x[[9]])


def count_descriptors(path):
    return [file.path for file in psutil.Process().open_files()].count(str(path))


def test_runs_of_neighbours_are_read_together():
    runs = [(rows.tolist(), places.tolist()) for rows, places in plan_runs([9, 3, 4, 5, 20, 3])]
    assert runs == [([3], [1]), ([3, 4, 5], [5, 2, 3]), ([9], [0]), ([20], [4])]


def test_a_chunk_is_decompressed_once_per_batch(tmp_path, monkeypatch):
    write_file(tmp_path / "f.h5", n=64, chunks=(16, 3, 4), compression="gzip")
    rows, reads, read = hdf5(path=str(tmp_path / "f.h5"), val_fraction=0).sources[0], [], h5py.Dataset.__getitem__

    def note(dataset, key, **options):
        reads.append(key)
        return read(dataset, key, **options)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", note)
    rows.read([1, 40, 3, 44, 15, 33])
    assert reads == [slice(1, 16), slice(33, 45)]


INDICES = [3, 4, 5, 30, 1, 40, 0, 2, 7, 7]
PLAIN = [
    ((41, 6), None),
    ((41,), None),
    ((41,), (7,)),
    ((41, 6), (1, 6)),
    ((41, 6), (16, 6)),
    ((41, 6), (50, 9)),
    ((41, 6, 5), (8, 4, 5)),
    ((41, 6, 5), (8, 4, 2)),
    ((41, 6, 5, 3), (3, 1, 5, 2)),
]


def write_table(path, shape=(41, 6), chunks=None, dtype="f4"):
    x = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    write_hdf5(path, x={"data": x, "chunks": chunks, "maxshape": (None,) * len(shape) if chunks else None})
    return x


def find_layout(path):
    return find_layouts(path, ["x"])[0]


@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "i2", "?"])
@pytest.mark.parametrize(("shape", "chunks"), PLAIN)
def test_plain_rows_come_out_of_the_mapped_file_whatever_the_chunks(tmp_path, shape, chunks, dtype):
    x = write_table(tmp_path / "f.h5", shape, chunks, dtype)
    rows = build_rows(find_layout(tmp_path / "f.h5"))
    assert isinstance(rows, MappedRows)
    for indices in (INDICES, [40], list(range(41)), []):
        read = rows.read(indices)
        assert np.array_equal(read, x[indices])
        assert read.dtype == x.dtype
    assert np.array_equal(pickle.loads(pickle.dumps(rows)).read(INDICES), x[INDICES])


@pytest.mark.parametrize(
    "layout",
    [
        {"chunks": (8, 6), "compression": "gzip"},
        {"chunks": (8, 6), "fletcher32": True},
        {"dtype": ">f4"},
        {"chunks": (8, 6), "fillvalue": 7},  # holes
        {"fillvalue": 7},  # never written
    ],
)
def test_layouts_that_are_not_plain_go_through_the_library(tmp_path, layout):
    x = np.arange(246, dtype="f4").reshape(41, 6)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        table = file.create_dataset("x", **{"shape": x.shape, "dtype": "f4", **layout})
        n_written = 41 if "fillvalue" not in layout else 8 if "chunks" in layout else 0
        if n_written:
            table[:n_written] = x[:n_written]
        expected = table[:][INDICES]
    rows = build_rows(find_layout(tmp_path / "f.h5"))
    assert isinstance(rows, LibraryRows)
    assert np.array_equal(rows.read(INDICES), expected)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [(None, {240: 10, 263: 10, 1: 1}), ((4, 6), {1000: 40, 96: 4, 1: 4}), ((4, 2), {96: 4})],
)
def test_rows_are_counted_in_whole_chunks_and_one_at_least(tmp_path, chunks, expected):
    write_table(tmp_path / "f.h5", (100, 6), chunks)  # 24 bytes a row
    layout = find_layout(tmp_path / "f.h5")
    assert {n_bytes: layout.count_rows_in(n_bytes) for n_bytes in expected} == expected


@pytest.mark.parametrize(("chunks", "expected"), [(None, DirectRows), ((8, 6), LibraryRows)])
def test_a_network_file_system_is_read_and_not_mapped(tmp_path, monkeypatch, chunks, expected):
    away = Filesystem(type="nfs4", is_network=True, free_bytes=None)
    monkeypatch.setattr(hdf5_rows, "read_filesystem", lambda path: away)
    x = write_table(tmp_path / "f.h5", chunks=chunks)
    rows = build_rows(find_layout(tmp_path / "f.h5"))
    assert type(rows) is expected
    assert np.array_equal(rows.read(INDICES), x[INDICES])


@pytest.mark.parametrize("chunks", [None, (8, 6), (8, 4)])
def test_rows_that_are_not_in_the_page_cache_come_right(tmp_path, chunks):
    x = write_table(tmp_path / "f.h5", (4001, 6), chunks)
    layout = find_layout(tmp_path / "f.h5")
    rows = build_rows(layout)
    drop_cache(tmp_path / "f.h5")
    indices = np.random.default_rng(1).permutation(4001)
    assert np.array_equal(rows.read(indices), x[indices])
    assert read_cached_pct(layout) in (None, 100)


def test_ranges_hold_every_piece_and_are_joined_where_they_touch():
    rng = np.random.default_rng(0)
    for length in (8, 4096, 5000, 40_000):
        positions = rng.choice(2_000_000 // length, 50, replace=False) * length + 13
        ranges = plan_ranges(positions.reshape(-1, 2), length)
        for position in positions.tolist():
            assert any(start <= position and position + length <= start + size for start, size in ranges)
        assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(ranges))
        assert all(start % 4096 == 0 and size % 4096 == 0 for start, size in ranges)
    assert plan_ranges(np.arange(0, 81_920, 8192)[:, None], 8192) == [(0, 81_920)]


def test_a_stream_gives_back_what_it_mapped_and_a_memory_map_keeps_it(tmp_path):
    write_table(tmp_path / "f.h5", (4096, 2048))  # 32 MiB
    layout = find_layout(tmp_path / "f.h5")
    resident = {}
    for window_bytes in (1 << 20, None):
        rows = MappedRows(layout, find_pieces(layout), window_bytes=window_bytes)
        for first in range(0, 4096, 64):
            rows.read(np.arange(first, first + 64))
        resident[window_bytes] = read_mapped_bytes(tmp_path / "f.h5")
        del rows
        assert read_mapped_bytes(tmp_path / "f.h5") == 0
    assert resident[1 << 20] < 8 << 20
    assert resident[None] > 24 << 20


def read_mapped_bytes(path):
    return sum(mapping.rss for mapping in psutil.Process().memory_maps() if mapping.path == str(path))


@pytest.mark.parametrize("chunks", [None, (8, 6)])
def test_a_file_cut_before_or_after_it_was_mapped_is_said_so(tmp_path, chunks):
    write_table(tmp_path / "f.h5", (4001, 6), chunks)
    before, after = build_rows(find_layout(tmp_path / "f.h5")), build_rows(find_layout(tmp_path / "f.h5"))
    after.read([0])
    os.truncate(tmp_path / "f.h5", 20_000)
    for rows in (before, after):
        with pytest.raises(DataError, match=r"f\.h5 was cut: 20,000 bytes are there and /x reaches to"):
            rows.read([4000])
    write_file(tmp_path / "g.h5", n=4000, **COMPRESSED)
    dataset = hdf5(path=str(tmp_path / "g.h5"), val_fraction=0)
    os.truncate(tmp_path / "g.h5", 20_000)
    with pytest.raises(DataError, match=r"g\.h5.*cannot be"):
        dataset.get_batch([3999, 2000, 3998])


def test_a_file_replaced_while_in_use_is_read_on_as_it_was(tmp_path):
    x = write_table(tmp_path / "f.h5")
    rows = build_rows(find_layout(tmp_path / "f.h5"))
    rows.read([0])
    (tmp_path / "f.h5").unlink()
    assert np.array_equal(rows.read(INDICES), x[INDICES])
