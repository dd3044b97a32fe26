"""Passages of text by subject: what is read of either source, split without repetition, padded, and read again."""

import os
from pathlib import Path

import pytest
import torch

from fulltilt.data.text.passages import PAD_ID, Passages, pad_texts
from fulltilt.errors import DataError
from fulltilt.records import dumps, loads
from fulltilt.records.words import WordTable

ARTICLES = """
 = Lobster =

 The lobster lives in the sea .
 = = Food = =
 People eat the lobster with butter .
 Too short
 = Chess =
 Two players move pieces on a board .
 The king is the piece that matters .
 The lobster lives in the sea .
"""


def write(tmp_path, text=ARTICLES, name="wiki.txt"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return {"path": name, "base_dir": str(tmp_path)}


def list_texts(dataset):
    return [dataset.word_table.decode(tokens.tolist()) for tokens, _ in dataset]


def test_articles_are_subjects_and_a_repeated_paragraph_counts_once(tmp_path):
    both = [Passages(split, val_share=0.5, **write(tmp_path)) for split in ("train", "val")]
    assert both[0].classes == ["Chess", "Lobster"]
    assert [len(part) for part in both] == [2, 2]
    assert sorted(target for part in both for _, target in part) == [0, 0, 1, 1]
    known = set(both[0].word_table.words)
    for text in list_texts(both[0]):
        assert set(text.split()) <= known
    assert {"<pad>", "<unk>"} <= known
    assert both[0].word_table == both[1].word_table, "both splits number words alike"


def test_long_passages_are_cut_and_rare_words_are_unknown(tmp_path):
    found = Passages("train", max_len=4, vocab_size=4, **write(tmp_path))
    assert {len(tokens) for tokens, _ in found} == {4}
    assert found.vocab_size == 4
    assert "<unk>" in " ".join(list_texts(found))


def test_a_batch_is_padded_to_its_longest_and_no_longer(tmp_path):
    found = Passages("train", **write(tmp_path))
    tokens_BL, targets_B = found.get_batch([0, 1])
    lengths = [len(found[row][0]) for row in (0, 1)]
    assert tokens_BL.shape == (2, max(lengths))
    assert (tokens_BL != PAD_ID).sum(1).tolist() == lengths
    assert targets_B.tolist() == [found[0][1], found[1][1]]
    joined = pad_texts([found[0], found[1]])
    assert torch.equal(joined[0], tokens_BL)
    assert torch.equal(joined[1], targets_B)


def test_pythons_own_documentation_has_subjects_and_real_lengths():
    train, val = Passages("train"), Passages("val")
    assert {"statements", "strings", "debugger"} <= set(train.classes)
    assert len(train) > 4 * (len(val) - 10) > 800
    assert not set(list_texts(train)) & set(list_texts(val)), "no passage is in both"
    lengths = [len(tokens) for tokens, _ in train]
    assert min(lengths) < 10
    assert max(lengths) > 150


def test_what_tells_nothing_apart_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"passages of 1 subjects.* = Title ="):
        Passages("train", **write(tmp_path, " = One =\n the only article that there is\n"))
    with pytest.raises(DataError, match="does not exist"):
        Passages("train", path="nowhere.txt", base_dir=str(tmp_path))


def test_words_that_were_kept_read_text_as_the_training_did(tmp_path):
    found = Passages("train", **write(tmp_path))
    table = loads(WordTable, dumps(found.word_table))
    tokens, _ = found[0]
    assert table.encode(table.decode(tokens.tolist())) == tokens.tolist()
    assert table.encode("zebra king") == [table.numbers["<unk>"], table.encode("king")[0]]
    assert table.encode("") == []
    lines = WordTable(words=("<unk>", "<eos>", "a"), tokenizer="words", ends_lines=True)
    assert lines.encode("a\na") == [2, 1, 2]
    assert lines.decode([2, 1, 2]) == "a \na"


def test_wikitext_articles():
    folder = Path(os.environ.get("FULLTILT_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
    path = folder / "wikitext2_valid.txt"
    if not path.exists():
        pytest.skip(f"wikitext2_valid.txt is not in {folder} (FULLTILT_DATA)")
    found = Passages("train", path=str(path))
    assert found.n_classes == 56
    assert "Homarus gammarus" in found.classes
    assert sum(len(tokens) for tokens, _ in found) > 130_000
