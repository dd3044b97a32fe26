"""Text: vocabulary by frequency, prepared folders and what can be wrong with one, windows."""

import collections
import importlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fulltilt.data import prepare_text
from fulltilt.data.text.text import text
from fulltilt.data.text.tokens import build_vocabulary, open_tokens
from fulltilt.errors import DataError, StorageError
from fulltilt.records.words import split_line


def write_text(path, lines=("b a a", "", "a b c d", "<unk> e a", "c f a")):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_long(path, n_lines=300):
    draw = np.random.default_rng(0)
    return write_text(path, [" ".join(f"w{i}" for i in draw.zipf(1.3, 10) % 50) for _ in range(n_lines)])


def test_words_come_by_frequency_and_ties_by_first_appearance():
    words = [*"baaabcdc", "<unk>", *"eacfa"]
    vocabulary = build_vocabulary(collections.Counter(words), 5)
    assert vocabulary.words == ("a", "c", "<unk>", "b", "d")
    assert vocabulary.counts == (5, 3, 3, 2, 1)  # <unk> stands for e and f too
    assert vocabulary.encode(["a", "never seen", "d"]).tolist() == [0, 2, 4]
    for size, dtype in ((65_536, "uint16"), (65_537, "int32")):  # two bytes while they fit
        vocabulary = build_vocabulary({f"w{i}": 1 for i in range(size)}, size)
        ids = vocabulary.encode([vocabulary.words[-1]])
        assert (ids.dtype, ids.tolist()) == (dtype, [size - 1])


def test_lines_end_with_a_token_and_empty_ones_vanish():
    assert split_line("don't (stop)! 3.5 <unk>", "words") == [
        *["don't", "(", "stop", ")", "!", "3", ".", "5", "<unk>", "<eos>"]
    ]
    assert split_line("======  x", "words") == ["======", "x", "<eos>"]
    assert split_line("don't (stop)", "whitespace") == ["don't", "(stop)", "<eos>"]
    assert split_line("   ", "words") == []


def test_a_prepared_folder_holds_the_text_word_for_word(tmp_path):
    source = write_text(tmp_path / "t.txt")
    done = prepare_text([source], tmp_path / "out", val_file=write_text(tmp_path / "v.txt", ["a z"]))
    stream = open_tokens(tmp_path / "out", "train")
    said = [stream.vocabulary.words[i] for i in stream.ids]
    assert said == [*"baa", "<eos>", *"abcd", "<eos>", "<unk>", *"ea", "<eos>", *"cfa", "<eos>"]
    val = open_tokens(tmp_path / "out", "val")
    assert [val.vocabulary.words[i] for i in val.ids] == ["a", "<unk>", "<eos>"]
    assert (done.n_train, done.n_val, done.n_words) == (17, 3, len(stream.vocabulary))
    assert list(stream.vocabulary.counts) == sorted(stream.vocabulary.counts, reverse=True)


def test_validation_is_the_end_of_the_text_and_no_word_is_lost(tmp_path):
    first, second = write_long(tmp_path / "a.txt"), write_long(tmp_path / "b.txt", 100)
    done = prepare_text([first, second], tmp_path / "out", val_share=0.1)
    whole = [w for f in (first, second) for line in f.read_text().splitlines() for w in split_line(line, "whitespace")]
    train, val = (open_tokens(tmp_path / "out", split) for split in ("train", "val"))
    decoded = [train.vocabulary.words[i] for i in np.concatenate([train.ids, val.ids])]
    known = train.vocabulary.ids
    assert decoded == [w if w in known else "<unk>" for w in whole]
    assert done.n_val == pytest.approx(0.1 * len(whole), rel=0.05)
    assert train.ids[-1] == known["<eos>"]
    counts = collections.Counter(decoded[: done.n_train])
    assert dict(zip(train.vocabulary.words, train.vocabulary.counts, strict=True)) == {"<unk>": 0} | counts


def test_windows_hold_every_word_once_as_a_target(tmp_path):
    write_long(tmp_path / "t.txt")
    dataset = text("train", path="t.txt", base_dir=str(tmp_path), seq_len=7)
    inputs, targets = dataset.get_batch(range(len(dataset)))
    n = len(dataset) * 7
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.flatten().tolist() == dataset.ids[:n].tolist()
    assert targets.flatten().tolist() == dataset.ids[1 : n + 1].tolist()
    assert n + 7 > len(dataset.ids) - 1
    assert torch.equal(dataset[3][1], targets[3])


def test_a_text_file_gives_the_words_that_its_folder_gives(tmp_path):
    prepare_long(tmp_path)
    prepared, plain = (text("train", path=str(tmp_path / name), seq_len=8) for name in ("out", "t.txt"))
    first = [[stream.vocabulary.words[i] for i in stream.ids[:2000]] for stream in (prepared, plain)]
    assert first[0] == first[1]
    assert isinstance(prepared.ids, np.memmap)


def test_the_default_text_comes_with_python():
    train, val = (text(split, seq_len=32, vocab_size=2000) for split in ("train", "val"))
    assert train.vocabulary.words == val.vocabulary.words
    assert len(train.vocabulary) == 2000
    assert len(train) > 5 * len(val) > 500
    assert {"the", "<eos>"} <= set(train.vocabulary.words[:10])


def prepare_long(tmp_path):
    source = write_long(tmp_path / "t.txt")
    prepare_text([source], tmp_path / "out")
    return source, tmp_path / "out"


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("train.bin", lambda content: content[:-5], r"train\.bin has 5,\d+ bytes, 5,\d+ were written"),
        ("train.bin", None, r"train\.bin is not there"),
        ("tokens.json", None, "holds no tokens.json"),
        ("tokens.json", lambda content: content[:-5], "cannot be read"),
        ("tokens.json", lambda content: json.dumps({**json.loads(content), "format": 99}).encode(), "not of format 1"),
        ("vocabulary.txt", lambda content: content.replace(b"w1\t", b"x\t", 1), "not the one that the tokens were"),
        ("vocabulary.txt", None, r"vocabulary\.txt cannot be read"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_with_the_command_that_mends_it(tmp_path, name, spoil, said):
    source, folder = prepare_long(tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if spoil:
        (folder / name).write_bytes(spoil(content))
    source.unlink()
    with pytest.raises(DataError, match=said) as error:
        text("train", path=str(folder))
    assert "fulltilt data prepare-text" in str(error.value)


def test_a_folder_whose_text_has_changed_is_stale(tmp_path):
    source, folder = prepare_long(tmp_path)
    os.utime(source)  # touched and the same: not stale
    assert len(text("train", path=str(folder), seq_len=8))
    content = source.read_text()
    source.write_text(content.replace("w1", "w2", 1))
    with pytest.raises(DataError, match=r"is stale: .*same size"):
        text("train", path=str(folder))
    source.write_text(content + "more\n")
    with pytest.raises(DataError, match=r"bytes then, .* now"):
        text("train", path=str(folder))
    prepare_text([source], folder, force=True)
    assert len(text("train", path=str(folder), seq_len=8))


def test_no_room_leaves_the_old_preparation_and_one_that_is_cut_short_nothing_that_opens(tmp_path, monkeypatch):
    source, folder = prepare_long(tmp_path)

    def refuse(*args, **options):
        raise StorageError("full")

    with monkeypatch.context() as patched:
        patched.setattr(importlib.import_module("fulltilt.data.text.prepare"), "check_room", refuse)
        with pytest.raises(StorageError):
            prepare_text([source], folder, force=True)
    assert len(text("train", path=str(folder), seq_len=8))
    source.write_bytes(source.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"byte [\d,]+ is not UTF-8"):
        prepare_text([source], folder, force=True, val_share=0.01)
    with pytest.raises(DataError, match=r"cut short|stale"):
        text("train", path=str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_len": 10_000}, "lower seq_len"),
        ({"vocab_size": 10}, "vocab_size is 10; raise it"),
        ({"split": "test"}, "use train or val"),
        ({"path": "none.txt"}, "does not exist"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, change, said):
    prepare_long(tmp_path)
    with pytest.raises(DataError, match=said):
        text(**{"path": "out", "base_dir": str(tmp_path), **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"val_share": 1.0}, "is not a share"),
        ({"files": ["none.txt"]}, "is not a file"),
        ({"folder": "t.txt"}, "is a file"),
        ({"folder": "."}, "holds other files"),
        ({}, "is prepared already"),
        ({"vocab_size": 1, "force": True}, "no word beside"),
        ({"files": ["empty.txt"], "folder": "new"}, "holds no word"),
        ({"val_file": "empty.txt", "folder": "new"}, r"empty\.txt holds no word"),
    ],
)
def test_a_preparation_that_cannot_be_is_refused_and_leaves_the_one_before(tmp_path, monkeypatch, change, said):
    prepare_long(tmp_path)
    write_text(tmp_path / "empty.txt", ["", " "])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=said):
        prepare_text(**{"files": ["t.txt"], "folder": "out", **change})
    assert len(text("train", path="out", seq_len=8))


def test_wikitext(tmp_path):
    folder = Path(os.environ.get("FULLTILT_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
    source = folder / "wikitext2_valid.txt"
    if not source.is_file():
        pytest.skip(f"wikitext2_valid.txt is not in {folder} (FULLTILT_DATA)")
    done = prepare_text([source], tmp_path / "out", vocab_size=5000)
    words = source.read_text(encoding="utf-8").split()
    n_lines = sum(bool(line.strip()) for line in source.read_text(encoding="utf-8").split("\n"))
    assert done.n_train + done.n_val == len(words) + n_lines
    assert open_tokens(done.folder, "train").vocabulary.words[:3] == ("<unk>", "the", ",")


def test_a_word_number_beyond_the_vocabulary_is_named_before_the_model_sees_it(tmp_path):
    prepare_text([write_text(tmp_path / "a.txt", ["a b c d"] * 40)], tmp_path / "out", val_share=0.1)
    ids = np.memmap(tmp_path / "out" / "train.bin", dtype=np.uint16, mode="r+")
    ids[20] = 60_000
    ids.flush()
    dataset = text(path=str(tmp_path / "out"), seq_len=5)
    with pytest.raises(DataError, match=r"out holds a word number 60,000, its vocabulary has 6 words"):
        dataset.get_batch(range(len(dataset)))
