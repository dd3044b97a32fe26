"""``fulltilt data``: what a user types and sees."""

import errno
import json
import re
import shlex
import tempfile
import types

import h5py
import numpy as np
import pytest

from fulltilt.cli import run_command
from fulltilt.cli.data import describe_cache


@pytest.fixture
def path(tmp_path):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        x = np.random.default_rng(0).random((800, 64, 4), dtype=np.float32)
        file.create_dataset("input", data=x, chunks=(200, 64, 4), compression="gzip")
        file["label"] = np.arange(800)
    return tmp_path / "f.h5"


def find_commands(said):
    lines = [line.strip() for line in said.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("fulltilt data repack")]


def test_inspect_prints_tables_and_a_command_that_works(path, tmp_path, capsys, monkeypatch):
    # That it is worth it was measured for 0.05 s, in which a busy machine shows anything.
    monkeypatch.setattr("fulltilt.data.tables.hdf5_inspect._WORTH", 0.0)
    assert run_command(["data", "inspect", str(path), "--seconds", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "cache: these figures say nothing of a disk" in out
    for word in ("input", "(800, 64, 4)", "gzip", "rows/s", "random batches", "whole blocks, shuffled", "in order"):
        assert word in out
    assert "warm figures" in out or "cannot be told" in out
    # 4 % of a file of 7 GB made its random batches slower than single rows that were read after them.
    for cached_pct, said in ((100.0, "these are warm figures"), (96.0, "the figures are partly cold, the first most")):
        report = types.SimpleNamespace(reader="mapped", cached_before_pct=cached_pct)
        assert said in describe_cache(report, is_cold=False)
    (command,) = find_commands(out)
    assert run_command(command) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in ("800 rows of input, label", "every row was read back and is equal"))
    with h5py.File(path) as before, h5py.File(tmp_path / "f.repacked.h5") as after:
        assert np.array_equal(before["input"][:], after["input"][:])
        assert after["input"].chunks is None


def test_inspect_writes_json_alone_to_stdout(path, capsys):
    words = ["--seconds", "0.05", "--dataset", "label", "--batch-size", "50", "--json", "-"]
    assert run_command(["data", "inspect", str(path), *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["batch_size"]) == (1, 50)
    label = next(report for report in document["datasets"] if report["name"] == "label")
    assert {rate["access"] for rate in label["rates"]} >= {"random", "sequential"}
    assert label["rates"][0]["rows_per_s"] > 0


def test_repack_takes_chunks_and_compression(path, tmp_path, capsys):
    words = ["data", "repack", str(path), str(tmp_path / "out.h5"), "--chunk-rows", "16", "--compression", "lzf"]
    assert run_command(words) == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert (file["input"].chunks, file["input"].compression) == ((16, 64, 4), "lzf")
    assert run_command(words) == 2
    assert "--force to replace it" in capsys.readouterr().err
    assert run_command([*words, "--force"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "none.h5"], "does not exist"),
        (["inspect", "{path}", "--dataset", "inputs"], "did you mean input?"),
        (["inspect", "{path}", "--seconds", "0"], "--seconds 0 must lie above 0"),
        (["repack", "{path}", "{path}", "--force"], "is the file to be read"),
        (["repack", "{path}", "{path}.new", "--chunk-rows", "0"], "--chunk-rows 0 must be 1 or more"),
        (["inspect", "{path}", "--batch-size", "0"], "--batch-size 0 must be 1 or more"),
        (["prepare-text", "{path}", "{path}.out", "--val-share", "1"], "--val-share 1 is not a share"),
        (["prepare-text", "{path}", "{path}.out", "--vocabulary", "1"], "--vocabulary 1 must be 2 or more"),
        (["make-stl10", "{path}", "{path}.out", "--size", "0"], "--size 0 must be 1 or more"),
        (["make", "{path}", "--n-samples", "0"], "--n-samples 0 must be 1 or more"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(path, capsys, words, message):
    assert run_command(["data", *(word.format(path=path) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_no_fault_of_ours(tmp_path, capsys, monkeypatch):
    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)  # root may write everywhere
    assert run_command(["data", "make", str(tmp_path / "events.h5"), "--n-samples", "1"]) == 2
    assert f"{tmp_path} cannot be written (Permission denied); give another name\n" in capsys.readouterr().err


def test_prepare_text_says_what_it_kept(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("a b a c\n" * 20)
    words = ["data", "prepare-text", str(tmp_path / "t.txt"), str(tmp_path / "out"), "--vocabulary", "3"]
    assert run_command(words) == 0
    said = capsys.readouterr().out
    assert "90 tokens for training, 10 for validation, as uint16" in said
    assert "a vocabulary of 3 with <unk>, 4 distinct words in the training text, 40.00 % of it is <unk>" in said
    assert run_command(words) == 2
    assert "--force to prepare it again" in capsys.readouterr().err
    assert run_command([*words, "--force", "--val", str(tmp_path / "t.txt")]) == 0
    assert "100 tokens for training, 100 for validation" in capsys.readouterr().out
    (tmp_path / "t.txt").write_text("one line alone\n")
    assert run_command([*words, "--force"]) == 0
    assert "no word is left for validation" in capsys.readouterr().err


def test_the_advice_of_inspect_followed_to_the_letter_leaves_nothing_to_advise(tmp_path, capsys):
    """Two datasets of other lengths in a folder with a blank, and an earlier copy that is in the way."""
    folder = tmp_path / "my data"
    folder.mkdir()
    x = np.random.default_rng(0).integers(0, 9, (1200, 64, 8)).astype("f4")
    with h5py.File(folder / "f.h5", "w") as file:
        for name, rows in (("train", x), ("test", x[:500])):
            file.create_dataset(name, data=rows, chunks=(250, 64, 8), compression="gzip")
    (folder / "f.repacked.h5").touch()
    words = ["--dataset", "train", "test", "--seconds", "0.05", "--json", str(tmp_path / "i.json")]
    assert run_command(["data", "inspect", str(folder / "f.h5"), *words]) == 0
    said = capsys.readouterr().out
    (repack,) = find_commands(said)  # one does for both
    assert run_command(repack) == 0
    assert "1,200 rows of train" in capsys.readouterr().out
    assert run_command(["data", "inspect", repack[3], *words]) == 0
    assert find_commands(capsys.readouterr().out) == []
    after = json.loads((tmp_path / "i.json").read_text())["datasets"]
    assert {report["advice"] for report in after} == {"every row is one piece of the file: nothing to repack"}


def test_what_is_small_has_a_size_too(tmp_path, capsys):
    file = str(tmp_path / "s.h5")
    for words in (["make", file, "--n-samples", "5", "--n-sensors", "20"], ["inspect", file, "--seconds", "0.01"],
                  ["repack", file, str(tmp_path / "t.h5")]):  # fmt: skip
        assert run_command(["data", *words]) == 0
        said = capsys.readouterr().out
        assert "KiB" in said
        assert re.search(r"\b0\.0+ [KMGT]iB", said) is None  # a spread may be ± 0.0 %
        assert words[0] != "make" or "5 synthetic events of 20 sensors, " in said
