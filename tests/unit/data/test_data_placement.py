"""Placements: the same samples in the same order wherever the rows lie, in every kind of process."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from data_cases import assert_equal, write_hdf5

from fulltilt.data import DATASETS, build_loader, count_held_bytes, find_placements, make_sensor_hdf5, place
from fulltilt.data.loading import placement as placement_module
from fulltilt.data.loading.placement import count_mixed_blocks, plan_blocks
from fulltilt.data.tables.hdf5_rows import LibraryRows
from fulltilt.data.tables.held_rows import WindowedRows, hold_rows
from fulltilt.errors import DataError

CPU = torch.device("cpu")
N = 300
GIB = 2**30


def open_rows(path, dtype="f4", **layout):
    x = np.random.default_rng(0).integers(0, 50, (N, 6, 4)).astype(dtype)
    write_hdf5(path, input={"data": x, **layout}, label=np.arange(N))
    return DATASETS["hdf5"](path=str(path), val_fraction=0.1)


@pytest.fixture
def plain(tmp_path):
    return open_rows(tmp_path / "plain.h5")


@pytest.fixture
def packed(tmp_path):
    return open_rows(tmp_path / "packed.h5", chunks=(8, 6, 4), compression="gzip")


def load(dataset, placement, *, start=0, epoch=1, shuffle=True, collate=None, **options):
    given = {"batch_size": 16, "shuffle": shuffle, "drop_last": False, "seed": 4, "collate": collate}
    loader = build_loader(dataset, **given, options={"placement": placement, "placement_device": CPU, **options})
    loader.sampler.set_epoch(epoch, start)
    return list(loader)


@pytest.mark.parametrize("placement", ["memory_map", "ram", "block_shuffled"])
def test_placed_rows_survive_pickling_and_the_dataset_stays_as_it_is(plain, placement):
    placed = place(plain, placement, CPU)
    placed.get_batch([0])
    assert_equal([pickle.loads(pickle.dumps(placed)).get_batch([5, 3])], [plain.get_batch([5, 3])])
    assert (placed.placement, plain.placement) == (placement, "stream")


@pytest.mark.parametrize(
    ("context", "placement"),
    [
        *(("fork", placement) for placement in ("stream", "memory_map", "ram", "device", "block_shuffled")),
        # To both of these the rows go in a pickle.
        *(pytest.param("spawn", placement, marks=pytest.mark.slow) for placement in ("stream", "ram", "device")),
        *(pytest.param("forkserver", name, marks=pytest.mark.slow) for name in ("memory_map", "block_shuffled")),
    ],
)
def test_workers_of_every_start_method_deliver_the_batches_of_the_stream(request, placement, context):
    dataset = request.getfixturevalue("packed" if placement in ("stream", "block_shuffled") else "plain")
    dataset.get_batch([0])  # the parent has the file open
    expected = load(dataset, placement)
    if placement != "block_shuffled":
        assert_equal(expected, load(dataset, "stream"))
    assert_equal(load(dataset, placement, num_workers=2, multiprocessing_context=context), expected)
    dataset.get_batch([1])


@pytest.mark.parametrize("placement", ["memory_map", "ram", "device"])
def test_sensor_events_are_scaled_alike_wherever_they_lie(tmp_path, placement):
    dataset = DATASETS["sensor_hdf5"](path=str(make_sensor_hdf5(tmp_path / "s.h5", 80, 60, chunk_rows=8)))
    assert_equal(load(dataset, placement), load(dataset, "stream"))


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


def test_what_a_dataset_can_be_placed_as(tmp_path, plain, packed):
    assert find_placements(plain) == ("stream", "block_shuffled", "ram", "memory_map", "device")
    assert find_placements(packed) == ("stream", "block_shuffled", "ram", "device")
    assert find_placements(DATASETS["digits"]()) == ("stream", "ram", "device")
    path = str(write_hdf5(tmp_path / "p.h5", input=np.zeros((20, 3, 8, 8), np.uint8), label=np.arange(20)))
    assert "device" in find_placements(DATASETS["hdf5"](path=path, transform="random_flip"))
    images = DATASETS["hdf5"](path=path, transform=lambda image: image)
    assert "device" not in find_placements(images)
    with pytest.raises(DataError, match="device cannot apply to Hdf5Dataset; it can be stream, block_shuffled, ram"):
        place(images, "device", CPU)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "u1", "u2", "i1", "i4", "?"])
def test_rows_held_are_the_rows_of_the_file_in_the_smallest_type(tmp_path, dtype):
    dataset = open_rows(tmp_path / "f.h5", dtype=dtype, chunks=(7, 6, 4), compression="lzf")
    held = place(dataset, "ram", CPU)
    indices = [5, 200, 5, 0, 269]
    assert torch.equal(held.get_batch(indices)[0], dataset.get_batch(indices)[0])
    tables = [source.table for source in held.sources]
    assert count_held_bytes(dataset) == sum(table.nbytes for table in tables)
    assert tables[0].element_size() == {"f8": 4, "u2": 8}.get(dtype, np.dtype(dtype).itemsize)


def test_holding_decompresses_every_chunk_once(packed, monkeypatch):
    reads = []
    monkeypatch.setattr("fulltilt.data.tables.held_rows._BLOCK_BYTES", 2000)
    monkeypatch.setattr(LibraryRows, "read", count_reads(LibraryRows.read, reads))
    hold_rows(packed.sources[0], packed.rows, CPU)
    assert len({first // 16 for first in reads}) == len(reads) == 19


@pytest.mark.parametrize("placement", ["stream", "ram", "block_shuffled"])
def test_a_collate_function_of_the_users_own_gets_samples_in_the_order_of_the_file(plain, placement):
    def join(samples):
        return [(tuple(inputs.shape), int(target)) for inputs, target in samples]

    batches = load(plain, placement, shuffle=False, collate=join)
    assert list(itertools.chain(*batches)) == [((6, 4), row) for row in plain.rows]


def test_blocks_say_how_far_from_a_full_shuffle_they_are(plain, monkeypatch):
    assert "100 % of all pairs" in plan_blocks(plain).describe(64)
    assert count_mixed_blocks(plain) is None, "one window: a full shuffle"
    monkeypatch.setattr(placement_module, "BLOCK_BYTES", 96 * 10)
    monkeypatch.setattr(placement_module, "WINDOW_BYTES", 96 * 10 * 10)
    words = plan_blocks(plain).describe(16)
    assert "30 blocks of 10 rows, 5 mixed at a time" in words
    assert "18.2 % of all pairs" in words
    assert count_mixed_blocks(plain) == 5


def test_free_memory_is_the_least_of_the_machines_and_its_control_groups(tmp_path):
    """Bug: under the limit of a group the reading was a TypeError."""
    group = "sys/fs/cgroup/a"
    files = {"meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n", "self/cgroup": "0::/a\n"}
    files |= {"self/mountinfo": "35 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"}
    for folder in ("proc/self", group):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "proc" / name).write_text(text)
    (tmp_path / group / "memory.current").write_text(f"{500 * 1024}\n")
    for limit, rooms_kib in ((f"{700 * 1024}", (200, 100)), ("max", (900, 450)), (f"{400 * 1024}", (0, 0))):
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
        read = [placement_module.read_free_ram_bytes(tmp_path, n_processes=n) / 1024 for n in (1, 2)]
        assert tuple(read) == rooms_kib


@pytest.mark.parametrize(
    ("reading", "free_gib"),
    [
        ({}, 22),  # 20 free and 2 reserved, of which nothing is in use
        ({"allocated": 1}, 21),
        ({"limit": 12}, 12),
        ({"limit": 12, "allocated": 1}, 11),
        ({"limit": 12, "free": 3}, 5),
        ({"limit": 1, "allocated": 2}, 0),
        ({"free": 22, "is_wsl": True}, 0.95 * 24),  # past that the driver spills
        ({"is_wsl": True, "limit": 12}, 12),
    ],
)
def test_a_memory_limit_and_the_spill_under_wsl_count_against_what_a_gpu_has_free(monkeypatch, reading, free_gib):
    given = {"free": 20, "allocated": 0, "limit": None, "is_wsl": False} | reading
    limit_bytes = None if given["limit"] is None else given["limit"] * GIB
    answers = {"is_available": True, "mem_get_info": (given["free"] * GIB, 24 * GIB), "memory_reserved": 2 * GIB}
    for name, answer in {**answers, "memory_allocated": given["allocated"] * GIB}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    monkeypatch.setattr(placement_module, "find_memory_limit_bytes", lambda device: limit_bytes)
    monkeypatch.setattr(placement_module, "is_wsl", lambda: given["is_wsl"])
    free_bytes = placement_module.read_free_device_bytes(torch.device("cuda"))
    assert free_bytes == pytest.approx(free_gib * GIB, abs=1)
