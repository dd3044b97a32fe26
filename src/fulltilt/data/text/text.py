"""Serves text for language models as non-overlapping windows; a token is a whole word.

Shapes: B batch, S words of a window.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from fulltilt.data.batched import BatchedDataset, Indices
from fulltilt.data.paths import resolve_path
from fulltilt.data.splits import Split, check_split
from fulltilt.data.text.tokens import TokenStream, build_vocabulary, count_words, open_tokens
from fulltilt.errors import DataError
from fulltilt.records import format_bytes
from fulltilt.records.words import Tokenizer, WordTable, split_line

LARGE_TEXT_BYTES = 64 << 20  # a text is split into words at every start, a second for 10 MiB; a prepared one is not


def text(
    split: Split = "train",
    path: str | None = None,
    seq_len: Annotated[int, Ge(1)] = 128,
    vocab_size: Annotated[int, Ge(2)] = 50_000,
    val_share: Annotated[float, Gt(0), Lt(1)] = 0.1,
    tokenizer: Tokenizer | None = None,
    base_dir: str | None = None,
) -> "TokenWindows":
    """Read windows of ``seq_len`` words from a prepared folder, a text file, or Python's own documentation.

    Args:
        path: A folder written by ``fulltilt data prepare-text``, which decides vocabulary and split itself, or a text
            file; None takes the topics of ``pydoc_data``, that come with Python.
        vocab_size: The most frequent words of the training part, ``<unk>`` included; a prepared folder must not have
            more.
        val_share: The last lines of a text, by their number, are for validation.
        tokenizer: ``whitespace`` for text that is tokenised already (the default for a file), ``words`` to separate
            punctuation (the default for Python's documentation).

    Raises:
        DataError: nothing there, a prepared folder that is truncated or stale, too few words for a window.
    """
    check_split(split)
    where = resolve_path(path, base_dir) if path is not None else None
    if where is not None and where.is_dir():
        stream = open_tokens(where, split)
        if len(stream.vocabulary) > vocab_size:
            raise DataError(
                f"{where} has {len(stream.vocabulary):,} words, vocab_size is {vocab_size:,}; raise it, or prepare the "
                f"text again with --vocabulary {vocab_size}"
            )
    else:
        lines, name = read_lines(where)
        stream = _encode(lines, name, split, vocab_size, val_share, tokenizer or ("whitespace" if where else "words"))
    return TokenWindows(stream, seq_len)


class TokenWindows(BatchedDataset):
    """Serves non-overlapping windows of S word ids; targets are the same ids shifted by one.

    Words behind the last whole window are left out.
    """

    n_classes = None
    transform = None

    def __init__(self, stream: TokenStream, seq_len: int):
        n_windows = (len(stream.ids) - 1) // seq_len
        if n_windows < 1:
            raise DataError(
                f"{stream.source} holds {len(stream.ids)} words of this split, a window takes {seq_len} and the one "
                "behind it; lower seq_len, or give more text"
            )
        self.name, self.source = "text", stream.source
        self.ids, self.vocabulary, self.seq_len = stream.ids, stream.vocabulary, seq_len
        self.vocab_size = len(stream.vocabulary)
        self.sample_shape, self.max_len = (seq_len,), seq_len
        self.word_table = WordTable(words=stream.vocabulary.words, tokenizer=stream.tokenizer, ends_lines=True)
        self._n_windows, self._offsets = n_windows, np.arange(seq_len + 1)

    def __len__(self) -> int:
        return self._n_windows

    def get_batch(self, indices: Indices, **options: Any) -> tuple[Tensor, Tensor]:
        """Read (B, S) int64 words and the words (B, S) that follow them."""
        at_BS = np.asarray(indices)[:, None] * self.seq_len + self._offsets
        ids_BS = self.ids[at_BS]
        if ids_BS.max() >= self.vocab_size or ids_BS.min() < 0:
            raise DataError(
                f"{self.source} holds a word number {ids_BS.max():,}, its vocabulary has {self.vocab_size:,} words: "
                "the file is damaged; prepare the text again"
            )
        words_BS = torch.from_numpy(ids_BS.astype(np.int64))
        return words_BS[:, :-1].contiguous(), words_BS[:, 1:].contiguous()


def read_lines(path: Path | None) -> tuple[list[str], str]:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).split("\n"), "pydoc_data"
    if not path.is_file():
        raise DataError(f"{path} does not exist; give a text file, or a folder of fulltilt data prepare-text")
    n_bytes = path.stat().st_size
    if n_bytes > LARGE_TEXT_BYTES:
        raise DataError(
            f"{path} is a text of {format_bytes(n_bytes)}, and every start would split it into words; prepare it "
            f"once: fulltilt data prepare-text {path} FOLDER, and give the folder"
        )
    try:
        return path.read_text(encoding="utf-8").split("\n"), str(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start:,} is not UTF-8; convert the text first") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _encode(
    lines: list[str], name: str, split: str, vocab_size: int, val_share: float, tokenizer: Tokenizer
) -> TokenStream:
    cut = round(len(lines) * (1 - val_share))
    vocabulary = build_vocabulary(count_words(lines[:cut], tokenizer), vocab_size)
    chosen = lines[:cut] if split == "train" else lines[cut:]
    words = (word for line in chosen for word in split_line(line, tokenizer))
    return TokenStream(vocabulary.encode(words), vocabulary, name, tokenizer)
