"""Rows out of every layout a file can have, from the mapped file and otherwise."""

from __future__ import annotations

import itertools
import os
import pickle
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from fulltilt.data.tables import hdf5_rows
from fulltilt.data.tables.hdf5_file import find_layouts
from fulltilt.data.tables.hdf5_layout import find_pieces
from fulltilt.data.tables.hdf5_mapped import MappedRows, plan_ranges
from fulltilt.data.tables.hdf5_rates import drop_cache, read_cached_pct
from fulltilt.data.tables.hdf5_rows import DirectRows, LibraryRows, build_rows
from fulltilt.errors import DataError
from fulltilt.hardware import Filesystem

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


def write_table(path, shape=(41, 6), chunks=None, dtype="f4", **options):
    x = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    with h5py.File(path, "w") as file:
        kept = {"maxshape": (None,) * len(shape)} if chunks else {}
        file.create_dataset("x", data=x, chunks=chunks, **kept, **options)
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


def test_layouts_that_are_not_plain_go_through_the_library(tmp_path):
    path = tmp_path / "f.h5"
    x = np.arange(246, dtype="f4").reshape(41, 6)
    with h5py.File(path, "w") as file:
        file.create_dataset("gzip", data=x, chunks=(8, 6), compression="gzip")
        file.create_dataset("checked", data=x, chunks=(8, 6), fletcher32=True)
        file["swapped"] = x.astype(">f4")
        holes = file.create_dataset("holes", shape=x.shape, dtype="f4", chunks=(8, 6), fillvalue=7)
        holes[:8] = x[:8]
        file.create_dataset("unwritten", shape=x.shape, dtype="f4", fillvalue=7)
    for name in ("gzip", "checked", "swapped", "holes", "unwritten"):
        layout = find_layouts(path, [name])[0]
        rows = build_rows(layout)
        assert isinstance(rows, LibraryRows), name
        with h5py.File(path) as file:
            assert np.array_equal(rows.read(INDICES), file[name][:][INDICES])


@pytest.mark.parametrize(
    ("chunks", "n_bytes", "expected"),
    [
        (None, 240, 10),
        (None, 263, 10),
        (None, 1, 1),
        ((4, 6), 1000, 40),
        ((4, 6), 96, 4),
        ((4, 6), 1, 4),
        ((4, 2), 96, 4),
    ],
)
def test_rows_are_counted_in_whole_chunks_and_one_at_least(tmp_path, chunks, n_bytes, expected):
    write_table(tmp_path / "f.h5", (100, 6), chunks)  # 24 bytes a row
    assert find_layout(tmp_path / "f.h5").count_rows_in(n_bytes) == expected


def test_a_network_file_system_is_read_and_not_mapped(tmp_path, monkeypatch):
    away = Filesystem(type="nfs4", is_network=True, free_bytes=None)
    monkeypatch.setattr(hdf5_rows, "read_filesystem", lambda path: away)
    for chunks, expected in ((None, DirectRows), ((8, 6), LibraryRows)):
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
    pieces = find_pieces(layout)
    resident = {}
    for window_bytes in (1 << 20, None):
        rows = MappedRows(layout, pieces, window_bytes=window_bytes)
        for first in range(0, 4096, 64):
            rows.read(np.arange(first, first + 64))
        resident[window_bytes] = read_mapped_bytes(tmp_path / "f.h5")
        del rows
        assert read_mapped_bytes(tmp_path / "f.h5") == 0
    assert resident[1 << 20] < 8 << 20
    assert resident[None] > 24 << 20


def read_mapped_bytes(path: Path) -> int:
    """Resident bytes of this process' mappings of a file."""
    blocks = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return sum(1024 * int(re.search(r"Rss:\s+(\d+)", block)[1]) for block in blocks if f"{path}\n" in block)


@pytest.mark.parametrize("chunks", [None, (8, 6)])
def test_a_file_cut_before_or_after_it_was_mapped_is_said_so(tmp_path, chunks):
    write_table(tmp_path / "f.h5", (4001, 6), chunks)
    before, after = build_rows(find_layout(tmp_path / "f.h5")), build_rows(find_layout(tmp_path / "f.h5"))
    after.read([0])
    os.truncate(tmp_path / "f.h5", 20_000)
    for rows in (before, after):
        with pytest.raises(DataError, match=r"f\.h5 was cut: 20,000 bytes are there and /x reaches to"):
            rows.read([4000])


def test_a_file_replaced_while_in_use_is_read_on_as_it_was(tmp_path):
    x = write_table(tmp_path / "f.h5")
    rows = build_rows(find_layout(tmp_path / "f.h5"))
    rows.read([0])
    (tmp_path / "f.h5").unlink()
    assert np.array_equal(rows.read(INDICES), x[INDICES])
