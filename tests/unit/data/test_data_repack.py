"""Repacking: the same file with its samples laid out anew, or nothing at all."""

import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest
from data_cases import write_hdf5

from fulltilt.data import repack_hdf5
from fulltilt.data.tables import hdf5_repack
from fulltilt.errors import DataError, StorageError, UsageError

N = 150


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        x = rng.random((N, 40, 5), dtype=np.float32)
        file.create_dataset("input", data=x, chunks=(37, 7, 2), compression="gzip", shuffle=True)
        file["input"].attrs["unit"] = "V"
        file["input"].attrs["scale"] = np.arange(3, dtype=">i2")
        file["label"] = np.arange(N)
        file.create_dataset("g/mask", data=rng.random((N, 3)) < 0.5)
        file["g/swapped"] = np.arange(N, dtype=">f8")
        file["g"].attrs["note"] = "a group"
        file.create_dataset("pairs", data=np.zeros(N, np.dtype([("a", "f4"), ("b", "i8")])))
        file["names"] = [f"row {i}" for i in range(N)]
        file["positions"] = rng.random((7, 3))
        file["nothing"] = h5py.Empty("f4")
        file["other"] = file["input"]
        file["soft"] = h5py.SoftLink("/g/mask")
        file["elsewhere"] = h5py.ExternalLink("other.h5", "/x")
        file.attrs["made"] = "for a test"
    return tmp_path / "in.h5"


def read_everything(path):
    """Values, types, attributes and links of a file."""
    found = {}
    with h5py.File(path) as file:
        for name in ("input", "label", "g/mask", "g/swapped", "pairs", "names", "positions", "other", "soft"):
            found[name] = (file[name].dtype, file[name][:].tobytes() if name != "names" else file[name][:].tolist())
        found["nothing"] = file["nothing"].shape
        found["links"] = [type(file.get(name, getlink=True)).__name__ for name in ("soft", "elsewhere")]
        found["one object"] = file["other"] == file["input"]
        for name in ("/", "g", "input"):
            found[f"attributes of {name}"] = {key: str(value) for key, value in file[name].attrs.items()}
    return found


@pytest.mark.parametrize(
    ("options", "chunks", "kind"),
    [
        ({}, None, None),
        ({"chunk_rows": 8}, (8, 40, 5), None),
        ({"compression": "gzip"}, (N, 40, 5), "gzip"),
        ({"compression": "lzf", "chunk_rows": 16}, (16, 40, 5), "lzf"),
    ],
)
def test_everything_is_there_again_and_samples_lie_as_asked(source, tmp_path, monkeypatch, options, chunks, kind):
    monkeypatch.setattr(hdf5_repack, "_BLOCK_BYTES", 40_000)  # several blocks
    told = []
    done = repack_hdf5(source, tmp_path / "out.h5", progress=lambda *counts: told.append(counts), **options)
    assert told[-1][0] == told[-1][1], "writing and reading back"
    assert told == sorted(told)
    assert read_everything(tmp_path / "out.h5") == read_everything(source)
    with h5py.File(tmp_path / "out.h5") as file:
        assert (file["input"].chunks, file["input"].compression) == (chunks, kind)
        assert (file["label"].chunks is None) is (chunks is None)
        assert file["positions"].chunks is None
        assert file["input"].attrs["scale"].dtype == np.dtype(">i2")
    assert set(done.datasets) == {"input", "label", "g/mask", "g/swapped", "pairs"}
    assert set(done.n_rows) == {N}
    assert done.target_bytes == (tmp_path / "out.h5").stat().st_size < 400_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.h5", "out.h5"]


def test_names_that_are_taken_or_the_same_are_refused(source, tmp_path):
    (tmp_path / "link.h5").symlink_to(source)
    for target in (source, tmp_path / "link.h5"):
        with pytest.raises(UsageError, match="is the file to be read"):
            repack_hdf5(source, target, force=True)
    (tmp_path / "out.h5").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"exists \(4 bytes\).*--force"):
        repack_hdf5(source, tmp_path / "out.h5")
    assert (tmp_path / "out.h5").read_bytes() == b"mine"
    repack_hdf5(source, tmp_path / "out.h5", force=True)
    assert read_everything(tmp_path / "out.h5") == read_everything(source)
    with pytest.raises(DataError, match="cannot be made"):
        repack_hdf5(source, tmp_path / "out.h5" / "out.h5")
    repack_hdf5(source, tmp_path / "new" / "folder" / "out.h5")
    assert read_everything(tmp_path / "new" / "folder" / "out.h5") == read_everything(source)
    with pytest.raises(UsageError, match="chunk_rows 0 must be 1 or more"):
        repack_hdf5(source, tmp_path / "other.h5", chunk_rows=0)


def test_files_that_cannot_be_repacked(tmp_path):
    path = write_hdf5(tmp_path / "in.h5", names=["a", "b"])
    with pytest.raises(DataError, match="no dataset with rows of a fixed size"):
        repack_hdf5(path, tmp_path / "out.h5")
    with h5py.File(path, "w") as file:
        file["x"], file["scale"] = np.zeros((5, 2)), np.arange(5)
        file["scale"].make_scale("s")
        file["x"].dims[0].attach_scale(file["scale"])
    with pytest.raises(DataError, match=r"attribute REFERENCE_LIST of /scale.*h5repack"):
        repack_hdf5(path, tmp_path / "out.h5")
    assert [file.name for file in tmp_path.iterdir()] == ["in.h5"]


def test_a_damaged_chunk_or_a_lack_of_room_is_said_and_leaves_nothing(source, tmp_path, monkeypatch):
    with h5py.File(source) as file, source.open("r+b") as stream:
        chunk = file["input"].id.get_chunk_info(20)
        stream.seek(chunk.byte_offset + 30)
        stream.write(b"\xff" * 40)
    with pytest.raises(DataError, match=rf"in\.h5: input cannot be read at row {chunk.chunk_offset[0]} .*damaged"):
        repack_hdf5(source, tmp_path / "out.h5")
    monkeypatch.setattr(hdf5_repack, "_HEADROOM_BYTES", 1 << 60)
    with pytest.raises(StorageError, match=r"needs [\d,]+\.\d+ TiB and .* has [\d.,]+ \w+ free; "):
        repack_hdf5(source, tmp_path / "out.h5")
    assert [file.name for file in tmp_path.iterdir()] == ["in.h5"]


def test_a_row_that_comes_back_different_leaves_nothing(source, tmp_path, monkeypatch):
    digest_rows = hdf5_repack._digest_rows

    def write_and_damage(path, file, plan, report, target=None):
        checksum = digest_rows(path, file, plan, report, target)
        if target is not None:
            target["label"][77] += 1
        return checksum

    monkeypatch.setattr(hdf5_repack, "_digest_rows", write_and_damage)
    with pytest.raises(DataError, match="differ from what was written"):
        repack_hdf5(source, tmp_path / "out.h5")
    assert [file.name for file in tmp_path.iterdir()] == ["in.h5"]


def test_memory_stays_at_a_block(tmp_path):
    """A file of 200 MiB through a process that may not take 200 MiB more than it has when it starts."""
    with h5py.File(tmp_path / "in.h5", "w") as file:
        table = file.create_dataset("x", (51_200, 1024), dtype="f4", chunks=(512, 32))
        for first in range(0, 51_200, 5120):
            table[first : first + 5120] = np.random.default_rng(first).random((5120, 1024), dtype=np.float32)
    script = """
        import resource, h5py
        from fulltilt.data import repack_hdf5
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        repack_hdf5("in.h5", "out.h5")
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout) < 128


def test_datasets_with_other_numbers_of_rows_are_laid_out_when_they_are_named_perhaps_by_a_link(source, tmp_path):
    x = np.arange(40.0).reshape(20, 2)
    write_hdf5(source, "r+", held_out={"data": x, "chunks": (3, 1), "compression": "gzip"})
    with h5py.File(source, "r+") as file:
        file["link"], file["second"] = h5py.SoftLink("/held_out"), file["held_out"]
    for name in ("held_out", "link", "second"):
        done = repack_hdf5(source, tmp_path / "whole.h5", datasets=[name], force=True)
        assert dict(zip(done.datasets, done.n_rows, strict=True))["held_out"] == 20
    repack_hdf5(source, tmp_path / "chunked.h5", datasets=["/held_out"], compression="gzip")
    repack_hdf5(source, tmp_path / "copied.h5")
    for name, chunks in {"whole": None, "chunked": (20, 2), "copied": (3, 1)}.items():
        with h5py.File(tmp_path / f"{name}.h5") as file:
            assert file["held_out"].chunks == chunks
            assert file["held_out"][:].tolist() == x.tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inputs", "did you mean input"),
        ("names", "no rows of a fixed size"),
        ("elsewhere", r"elsewhere lies in .*other\.h5; repack that file"),
    ],
)
def test_a_named_dataset_that_cannot_be_laid_out_is_refused(source, tmp_path, name, message):
    write_hdf5(tmp_path / "other.h5", x=np.zeros((20, 2)))
    with pytest.raises(DataError, match=message):
        repack_hdf5(source, tmp_path / "out.h5", datasets=[name])
    assert not (tmp_path / "out.h5").exists()
