"""Placements: the same samples in the same order wherever the rows lie, in every kind of process."""

from __future__ import annotations

import pickle

import h5py
import numpy as np
import pytest
import torch

from fulltilt.data import DATASETS, build_loader, count_held_bytes, find_placements, make_sensor_hdf5, place
from fulltilt.data.loading import placement as placement_module
from fulltilt.data.loading.placement import (
    compute_free_device_bytes,
    count_mixed_blocks,
    plan_blocks,
    read_free_ram_bytes,
)
from fulltilt.data.tables.hdf5_rows import LibraryRows
from fulltilt.data.tables.held_rows import WindowedRows, find_held_type, hold_rows
from fulltilt.errors import DataError

CPU = torch.device("cpu")
N = 300
GIB = 2**30


def write_file(path, dtype="f4", **layout):
    x = np.random.default_rng(0).integers(0, 50, (N, 6, 4)).astype(dtype)
    with h5py.File(path, "w") as file:
        file.create_dataset("input", data=x, **layout)
        file["label"] = np.arange(N)
    return x


@pytest.fixture
def plain(tmp_path):
    write_file(tmp_path / "plain.h5")
    return DATASETS["hdf5"](path=str(tmp_path / "plain.h5"), val_fraction=0.1)


@pytest.fixture
def packed(tmp_path):
    write_file(tmp_path / "packed.h5", chunks=(8, 6, 4), compression="gzip")
    return DATASETS["hdf5"](path=str(tmp_path / "packed.h5"), val_fraction=0.1)


def load(dataset, placement, *, start=0, epoch=1, shuffle=True, collate=None, **options):
    given = {"placement": placement, "placement_device": CPU, **options}
    loader = build_loader(
        dataset, batch_size=16, shuffle=shuffle, drop_last=False, seed=4, options=given, collate=collate
    )
    loader.sampler.set_epoch(epoch, start)
    return list(loader)


def assert_equal(batches, expected):
    for (inputs, targets), (x, y) in zip(batches, expected, strict=True):
        assert torch.equal(inputs, x)
        assert torch.equal(targets, y)
        assert inputs.dtype == x.dtype


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("placement", ["memory_map", "ram", "device"])
def test_batches_are_those_of_the_stream(plain, placement, workers):
    assert_equal(load(plain, placement, num_workers=workers), load(plain, "stream"))


@pytest.mark.parametrize("placement", ["memory_map", "ram", "block_shuffled"])
def test_placed_rows_survive_pickling(plain, placement):
    placed = place(plain, placement, CPU)
    placed.get_batch([0])
    assert_equal([pickle.loads(pickle.dumps(placed)).get_batch([5, 3])], [plain.get_batch([5, 3])])


@pytest.mark.parametrize(
    ("placement", "context"),
    [
        *((placement, "fork") for placement in ("stream", "memory_map", "ram", "block_shuffled")),
        ("stream", "forkserver"),
        *(
            pytest.param(placement, context, marks=pytest.mark.slow)
            for placement in ("stream", "memory_map", "ram", "block_shuffled")
            for context in ("forkserver", "spawn")
        ),
    ],
)
def test_workers_of_every_start_method_deliver_the_same(request, placement, context):
    kind = "packed" if placement in ("stream", "block_shuffled") else "plain"
    dataset = request.getfixturevalue(kind)
    dataset.get_batch([0])  # the parent has the file open
    expected = load(dataset, placement)
    assert_equal(load(dataset, placement, num_workers=2, multiprocessing_context=context), expected)
    dataset.get_batch([1])


def test_sensor_events_are_scaled_alike_wherever_they_lie(tmp_path):
    path = make_sensor_hdf5(tmp_path / "s.h5", 80, 60, chunk_rows=8)
    dataset = DATASETS["sensor_hdf5"](path=str(path))
    expected = load(dataset, "stream")
    for placement in ("memory_map", "ram", "device"):
        assert_equal(load(dataset, placement), expected)


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_block_shuffle_delivers_every_sample_once_and_resumes(request, monkeypatch, kind):
    monkeypatch.setattr(placement_module, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(placement_module, "WINDOW_BYTES", 20_000)
    dataset = request.getfixturevalue(kind)
    assert len(plan_blocks(dataset).edges) > 10
    whole = load(dataset, "block_shuffled")
    rows = torch.cat([targets for _, targets in whole])
    assert sorted(rows.tolist()) == dataset.rows.tolist()
    for inputs, targets in whole:
        assert torch.equal(inputs, dataset.get_batch(np.searchsorted(dataset.rows, targets.numpy()))[0])
    assert_equal(load(dataset, "block_shuffled", start=96), whole[6:])
    assert not torch.equal(torch.cat([t for _, t in load(dataset, "block_shuffled", epoch=2)]), rows)


def test_block_shuffle_reads_every_block_of_the_file_once_an_epoch(packed, monkeypatch):
    monkeypatch.setattr(placement_module, "BLOCK_BYTES", 800)
    monkeypatch.setattr(placement_module, "WINDOW_BYTES", 9000)
    reads = []
    source = packed.sources[0]
    monkeypatch.setattr(type(source), "read", count_reads(type(source).read, reads))
    blocks = plan_blocks(packed)
    assert blocks.block_rows == 8
    load(packed, "block_shuffled")
    assert sorted(reads) == list(range(0, N, 8))
    reads.clear()
    load(packed, "stream")
    assert len(reads) == 17


def count_reads(read, reads):
    def counting(self, indices):
        if self.layout.name == "/input":
            reads.append(int(min(indices)))
        return read(self, indices)

    return counting


def test_an_order_without_blocks_does_not_thrash_the_window(plain):
    rows = WindowedRows(plain.sources[0], block_rows=10, n_kept=3)
    indices = np.random.default_rng(0).permutation(N)
    assert np.array_equal(rows.read(indices), plain.sources[0].read(indices))
    for first in range(0, N, 7):
        few = np.arange(first, min(first + 7, N))[::-1]
        assert np.array_equal(rows.read(few), plain.sources[0].read(few))


def test_unshuffled_block_placement_keeps_the_order_of_the_file(plain):
    batches = load(plain, "block_shuffled", epoch=0, shuffle=False)
    assert torch.cat([targets for _, targets in batches]).tolist() == plain.rows.tolist()


def test_what_a_dataset_can_be_placed_as(tmp_path, plain, packed):
    assert find_placements(plain) == ("stream", "block_shuffled", "ram", "memory_map", "device")
    assert find_placements(packed) == ("stream", "block_shuffled", "ram", "device")
    assert find_placements(DATASETS["digits"]()) == ("stream", "ram", "device")
    pixels = np.zeros((20, 3, 8, 8), np.uint8)
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["input"], file["label"] = pixels, np.arange(20)
    assert "device" in find_placements(DATASETS["hdf5"](path=str(tmp_path / "p.h5"), transform="random_flip"))
    images = DATASETS["hdf5"](path=str(tmp_path / "p.h5"), transform=lambda image: image)
    assert "device" not in find_placements(images)
    with pytest.raises(DataError, match="device cannot apply to Hdf5Dataset; it can be stream, block_shuffled, ram"):
        place(images, "device", CPU)


def test_placing_says_where_rows_lie_and_leaves_the_dataset_as_it_is(plain, packed):
    for dataset, placements in ((plain, ("memory_map", "ram", "block_shuffled")), (packed, ("ram", "block_shuffled"))):
        for placement in placements:
            assert place(dataset, placement, CPU).placement == placement
        assert dataset.placement == "stream"
        assert len(dataset.rows) == 270


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "u1", "u2", "i1", "i4", "?"])
def test_rows_held_are_the_rows_of_the_file_in_the_smallest_type(tmp_path, dtype):
    write_file(tmp_path / "f.h5", dtype=dtype, chunks=(7, 6, 4), compression="lzf")
    dataset = DATASETS["hdf5"](path=str(tmp_path / "f.h5"), val_fraction=0.1)
    held = place(dataset, "ram", CPU)
    indices = [5, 200, 5, 0, 269]
    assert torch.equal(held.get_batch(indices)[0], dataset.get_batch(indices)[0])
    tables = [source.table for source in held.sources]
    assert count_held_bytes(dataset) == sum(table.numel() * table.element_size() for table in tables)
    assert tables[0].element_size() == {"f8": 4, "u2": 8}.get(dtype, np.dtype(dtype).itemsize)
    assert tables[0].dtype == find_held_type(np.dtype(dtype))


def test_holding_decompresses_every_chunk_once(packed, monkeypatch):
    reads = []
    monkeypatch.setattr("fulltilt.data.tables.held_rows._BLOCK_BYTES", 2000)
    monkeypatch.setattr(LibraryRows, "read", count_reads(LibraryRows.read, reads))
    hold_rows(packed.sources[0], packed.rows, CPU)
    assert len({first // 16 for first in reads}) == len(reads) == 19


@pytest.mark.parametrize("placement", ["stream", "ram", "block_shuffled"])
def test_a_collate_function_of_the_users_own_gets_samples(plain, placement):
    def join(samples):
        return [(tuple(inputs.shape), int(target)) for inputs, target in samples]

    assert load(plain, placement, shuffle=False, collate=join)[0] == [((6, 4), row) for row in plain.rows[:16]]


def test_blocks_say_how_far_from_a_full_shuffle_they_are(plain, monkeypatch):
    assert "100 % of all pairs" in plan_blocks(plain).describe(64)
    assert count_mixed_blocks(plain) is None, "one window: a full shuffle"
    monkeypatch.setattr(placement_module, "BLOCK_BYTES", 96 * 10)
    monkeypatch.setattr(placement_module, "WINDOW_BYTES", 96 * 10 * 10)
    words = plan_blocks(plain).describe(16)
    assert "30 blocks of 10 rows, 5 mixed at a time" in words
    assert "18.2 % of all pairs" in words
    assert count_mixed_blocks(plain) == 5


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_free_memory_is_read_under_the_limit_of_a_control_group(kind, tmp_path):
    """Bug: under any such limit the reading was a TypeError."""
    mounts = {
        "v1": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "v2": "35 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    }
    names = {
        "v1": ("memory/a/memory.limit_in_bytes", "memory/a/memory.usage_in_bytes"),
        "v2": ("a/memory.max", "a/memory.current"),
    }
    limit, usage = (f"sys/fs/cgroup/{name}" for name in names[kind])
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
        "proc/self/cgroup": {"v1": "4:memory:/a\n", "v2": "0::/a\n"}[kind],
        "proc/self/mountinfo": mounts[kind],
        limit: f"{700 * 1024}\n",
        usage: f"{500 * 1024}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_free_ram_bytes(tmp_path) == 200 * 1024
    assert read_free_ram_bytes(tmp_path, n_processes=2) == 100 * 1024
    (tmp_path / usage).write_text(f"{701 * 1024}\n")
    assert read_free_ram_bytes(tmp_path) == 0
    (tmp_path / limit).write_text("max\n" if kind == "v2" else "9223372036854771712\n")
    assert read_free_ram_bytes(tmp_path) == 900 * 1024


@pytest.mark.parametrize(
    ("reading", "free_gib"),
    [
        ({}, 22),  # 20 free and 2 reserved, of which nothing is in use
        ({"allocated_bytes": GIB}, 21),
        ({"limit_bytes": 12 * GIB}, 12),
        ({"limit_bytes": 12 * GIB, "allocated_bytes": GIB}, 11),
        ({"limit_bytes": 12 * GIB, "free_bytes": 3 * GIB}, 5),
        ({"limit_bytes": 1 * GIB, "allocated_bytes": 2 * GIB}, 0),
        ({"free_bytes": 22 * GIB, "is_wsl": True}, 0.95 * 24),  # past that the driver spills
        ({"is_wsl": True, "limit_bytes": 12 * GIB}, 12),
    ],
)
def test_a_memory_limit_and_the_spill_under_wsl_count_against_what_a_gpu_has_free(reading, free_gib):
    given = {
        "free_bytes": 20 * GIB, "total_bytes": 24 * GIB, "reserved_bytes": 2 * GIB, "allocated_bytes": 0,
        "limit_bytes": None, "is_wsl": False, **reading,
    }  # fmt: skip
    assert compute_free_device_bytes(**given) == pytest.approx(free_gib * GIB, abs=1)
