"""Text as token ids: splitting into words, the vocabulary, and the files of a prepared folder.

A prepared folder holds ``train.bin`` and ``val.bin`` (token ids, native uint16 or int32, one after the other),
``vocabulary.txt`` (a word and its count a line, the line number is the id) and ``tokens.json``, written last.
"""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fulltilt.errors import DataError
from fulltilt.records.words import UNKNOWN, Tokenizer, split_line

MANIFEST, WORDS = "tokens.json", "vocabulary.txt"
FORMAT = 1
MAX_UINT16_WORDS = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """Words by falling count in the training text; the index is the id.

    The count of ``<unk>`` is that of all words that were left out.
    """

    words: tuple[str, ...]
    counts: tuple[int, ...]

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    @property
    def unknown(self) -> int:
        return self.ids[UNKNOWN]

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds all ids."""
        return np.dtype(np.uint16 if len(self.words) <= MAX_UINT16_WORDS else np.int32)

    def encode(self, words: Iterable[str]) -> np.ndarray:
        find, unknown = self.ids.get, self.unknown
        return np.fromiter((find(word, unknown) for word in words), dtype=self.dtype)

    def to_text(self) -> str:
        return "".join(f"{word}\t{count}\n" for word, count in zip(self.words, self.counts, strict=True))


def build_vocabulary(counts: Mapping[str, int], size: int) -> Vocabulary:
    """Keep the ``size`` most frequent words and ``<unk>`` for all others; equal counts keep the order of ``counts``."""
    if size < 2:
        raise DataError(f"a vocabulary of {size} holds no word beside {UNKNOWN}; ask for 2 or more")
    if not counts:
        raise DataError("the training text holds no word; give another text")
    ranked = sorted((word for word in counts if word != UNKNOWN), key=lambda word: -counts[word])
    kept = ranked[: size - 1]
    rest = sum(counts[word] for word in ranked[size - 1 :]) + counts.get(UNKNOWN, 0)
    rows = sorted([*((word, counts[word]) for word in kept), (UNKNOWN, rest)], key=lambda row: -row[1])
    words, numbers = zip(*rows, strict=True)
    return Vocabulary(tuple(words), tuple(numbers))


def count_words(lines: Iterable[str], tokenizer: Tokenizer) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for line in lines:
        counts.update(split_line(line, tokenizer))
    return counts


class TokenStream(NamedTuple):
    """The ids (N,) of one split, and what they stand for."""

    ids: np.ndarray
    vocabulary: Vocabulary
    source: str
    tokenizer: Tokenizer = "words"


def describe_source(path: Path) -> dict[str, Any]:
    """Describe a text, so that a later change of it is noticed."""
    digest, stat = compute_digest(path), path.stat()
    return {"path": str(path.resolve()), "n_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "blake2b": digest}


def compute_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def open_tokens(folder: Path, split: str) -> TokenStream:
    """Map one split of a prepared folder into memory."""
    manifest = _read_manifest(folder)
    _check_sources(folder, manifest["sources"])
    vocabulary = _read_vocabulary(folder / WORDS, manifest)
    path, n_tokens = folder / f"{split}.bin", manifest["n_tokens"][split]
    if not n_tokens:
        raise DataError(
            f"{folder} was prepared without a word for {split}; prepare it again with a larger --val-share, or with "
            "--val and a text that has some"
        )
    dtype = np.dtype(manifest["dtype"])
    n_bytes = path.stat().st_size if path.is_file() else -1
    if n_bytes != n_tokens * dtype.itemsize:
        is_there = f"has {n_bytes:,} bytes" if n_bytes >= 0 else "is not there"
        raise DataError(
            f"{path} {is_there}, {n_tokens * dtype.itemsize:,} were written ({n_tokens:,} tokens as {dtype}); "
            f"{_remedy(folder)}"
        )
    return TokenStream(np.memmap(path, dtype=dtype, mode="r"), vocabulary, str(folder), manifest["tokenizer"])


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no {MANIFEST}: it is not prepared, or the preparation was cut short; {_remedy(folder)}"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_remedy(folder)}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is not of format {FORMAT}; {_remedy(folder)}")
    return manifest


def _check_sources(folder: Path, sources: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError where a text has changed since it was prepared; it may be gone."""
    for source in sources:
        path = Path(source["path"])
        if not path.is_file():
            continue
        stat, change = path.stat(), "same size"
        if stat.st_size != source["n_bytes"]:
            change = f"{source['n_bytes']:,} bytes then, {stat.st_size:,} now"
        elif stat.st_mtime_ns == source["mtime_ns"] or compute_digest(path) == source["blake2b"]:
            continue
        raise DataError(f"{folder} is stale: {path} has changed since it was prepared ({change}); {_remedy(folder)}")


def _read_vocabulary(path: Path, manifest: Mapping[str, Any]) -> Vocabulary:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_remedy(path.parent)}") from None
    if compute_digest(path) != manifest["vocabulary_blake2b"]:
        raise DataError(f"{path} is not the one that the tokens were written with; {_remedy(path.parent)}")
    rows = [line.rpartition("\t") for line in text.split("\n")[:-1]]
    return Vocabulary(tuple(word for word, _, _ in rows), tuple(int(count) for _, _, count in rows))


def _remedy(folder: Path) -> str:
    return f"prepare it: fulltilt data prepare-text FILE … {folder} --force"
