"""Prepare a folder of tokens from text files: one pass counts words, one writes ids."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fulltilt.data.new_file import Counter, Progress, check_room, new_file
from fulltilt.data.text.tokens import (
    FORMAT,
    MANIFEST,
    WORDS,
    Vocabulary,
    build_vocabulary,
    compute_digest,
    count_words,
    describe_source,
)
from fulltilt.errors import DataError
from fulltilt.records.run_folder import write_atomic
from fulltilt.records.words import Tokenizer, split_line

BUFFER_TOKENS = 1 << 16
_TOLD_BYTES = 1 << 16  # progress is told in steps of these
_NO_ROOM = "a disk with room for two bytes a word"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Reports what was written; ``n_words``: the vocabulary's size, ``unknown_pct``: ``<unk>`` share in training."""

    folder: Path
    n_train: int
    n_val: int
    n_words: int
    n_distinct: int
    unknown_pct: float
    dtype: str


def prepare_text(
    files: Sequence[str | Path],
    folder: str | Path,
    *,
    vocab_size: int = 50_000,
    val_share: float = 0.1,
    val_file: str | Path | None = None,
    tokenizer: Tokenizer = "whitespace",
    force: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Write the token ids of ``files`` and their vocabulary into ``folder``.

    The last ``val_share`` of the lines, by bytes, are for validation, or those of ``val_file``. Only training lines
    count for the vocabulary of at most ``vocab_size`` words, ``<unk>`` included. ``progress`` is called with the bytes
    read and to be read in both passes.

    Raises:
        DataError: a file is missing or no UTF-8, the folder holds something else or was prepared before, a text
            holds no words.
        StorageError: no room.
    """
    sources, val = [Path(file) for file in files], Path(val_file) if val_file else None
    folder = Path(folder)
    if val is None and not 0 <= val_share < 1:
        raise DataError(f"val_share {val_share} is not a share: 0 or more, and below 1")
    _check_places([*sources, *([val] if val else [])], folder, force)
    parts = _plan_parts(sources, val, val_share)
    n_bytes = {split: sum(end - start for _, start, end in ranges) for split, ranges in parts.items()}
    meter = Counter(progress, 2 * n_bytes["train"] + n_bytes["val"])
    counts = count_words(_read_parts(parts["train"], meter), tokenizer)
    vocabulary = build_vocabulary(counts, vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder / "train.bin", sum(n_bytes.values()), remedy=_NO_ROOM)
    (folder / MANIFEST).unlink(missing_ok=True)  # from here on the folder is not prepared
    n_tokens = {
        split: _write_tokens(folder / f"{split}.bin", _read_parts(ranges, meter), vocabulary, tokenizer)
        for split, ranges in parts.items()
    }
    if val_file is not None and not n_tokens["val"]:
        raise DataError(f"{val_file} holds no word; give another text for validation, or a share of the training text")
    write_atomic(folder / WORDS, vocabulary.to_text())
    manifest = _build_manifest(folder, vocabulary, n_tokens, tokenizer, parts)
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return Prepared(
        folder=folder,
        n_train=n_tokens["train"],
        n_val=n_tokens["val"],
        n_words=len(vocabulary),
        n_distinct=len(counts),
        unknown_pct=100 * vocabulary.counts[vocabulary.unknown] / n_tokens["train"],
        dtype=vocabulary.dtype.name,
    )


Part = tuple[Path, int, int]
"""A file and its bytes from … to."""


def _build_manifest(
    folder: Path, vocabulary: Vocabulary, n_tokens: dict[str, int], tokenizer: Tokenizer, parts: dict[str, list[Part]]
) -> dict[str, Any]:
    """Describe the folder, for ``open_tokens`` to check it."""
    files = dict.fromkeys(path for ranges in parts.values() for path, _, _ in ranges)
    return {
        "format": FORMAT,
        "dtype": vocabulary.dtype.name,
        "n_tokens": n_tokens,
        "n_words": len(vocabulary),
        "tokenizer": tokenizer,
        "vocabulary_blake2b": compute_digest(folder / WORDS),
        "sources": [describe_source(path) for path in files],
    }


def _check_places(sources: Sequence[Path], folder: Path, force: bool) -> None:
    for path in sources:
        if not path.is_file():
            raise DataError(f"{path} is not a file; name text files, and the folder to write last")
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; the last name is the folder to write")
    if (folder / MANIFEST).exists() and not force:
        raise DataError(f"{folder} is prepared already; give another folder, or --force to prepare it again")
    known = {MANIFEST, WORDS, "train.bin", "val.bin"}
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    strangers = sorted(name for name in there if name not in known and not name.startswith("."))
    if strangers:
        raise DataError(f"{folder} holds other files ({', '.join(strangers[:3])}); give a new folder")


def _plan_parts(sources: Sequence[Path], val_file: Path | None, val_share: float) -> dict[str, list[Part]]:
    """Plan which bytes of which file are for training and which for validation, cut at the start of a line."""
    whole = [(path, 0, path.stat().st_size) for path in sources]
    if val_file is not None:
        return {"train": whole, "val": [(val_file, 0, val_file.stat().st_size)]}
    left = round(sum(end for _, _, end in whole) * (1 - val_share))
    parts: dict[str, list[Part]] = {"train": [], "val": []}
    for path, start, end in whole:
        cut = end if left >= end else _find_line(path, max(0, left))
        parts["train"] += [(path, start, cut)] if cut > start else []
        parts["val"] += [(path, cut, end)] if end > cut else []
        left -= end
    return parts


def _find_line(path: Path, at: int) -> int:
    """Find the first start of a line at or behind byte ``at``."""
    if at == 0:
        return 0
    with path.open("rb") as stream:
        stream.seek(at - 1)
        stream.readline()
        return stream.tell()


def _read_parts(parts: Sequence[Part], meter: Counter) -> Iterator[str]:
    """Yield lines and count their bytes."""
    for path, start, end in parts:
        at = told = start
        with path.open("rb") as stream:
            stream.seek(at)
            while at < end and (line := stream.readline()):
                try:
                    yield line.decode()
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}: byte {at + error.start:,} is not UTF-8; convert the text first") from None
                at += len(line)
                if at - told >= _TOLD_BYTES or at >= end:
                    meter.add(at - told)
                    told = at


def _write_tokens(path: Path, lines: Iterator[str], vocabulary: Vocabulary, tokenizer: Tokenizer) -> int:
    n_tokens, words = 0, []

    def flush() -> int:
        vocabulary.encode(words).tofile(stream)
        return len(words)

    with new_file(path, remedy=_NO_ROOM) as temporary, temporary.open("wb") as stream:
        for line in lines:
            words += split_line(line, tokenizer)
            if len(words) >= BUFFER_TOKENS:
                n_tokens += flush()
                words.clear()
        n_tokens += flush()
    return n_tokens
