"""Serves passages of text with the subject that each is about: texts of different lengths.

Shapes: B batch, L words of the longest text of a batch.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from fulltilt.data.batched import Indices
from fulltilt.data.paths import resolve_path
from fulltilt.data.splits import Split, check_split, split_stratified
from fulltilt.data.text.text import read_lines
from fulltilt.data.text.tokens import build_vocabulary
from fulltilt.errors import DataError
from fulltilt.records.words import PAD, Tokenizer, WordTable, split_line

PAD_ID = 0
MIN_WORDS = 4  # shorter lines are headings and remnants
_ARTICLE = re.compile(r"\s*= ([^=].*?) =\s*")  # WikiText: ``= Title =``; ``= = Section = =`` is inside an article

SUBJECTS: Mapping[str, str] = {
    "statements": "assert assignment augassign break continue del else for global if nonlocal pass raise return try "
    "while with yield import compound async class function",
    "expressions": "atom-identifiers atom-literals attribute-references await binary bitwise booleans calls "
    "comparisons conversions exprlists identifiers in lambda lists operator-summary power shifting slicings "
    "subscriptions unary floating imaginary integers numbers",
    "strings": "formatstrings string-methods strings",
    "containers": "sequence-types typesmapping typesseq typesseq-mutable dict",
    "objects": "types specialnames customization attribute-access objects id-classes specialattrs typesmethods "
    "typesfunctions typesmodules callable-types bltin-code-objects bltin-ellipsis-object bltin-null-object "
    "bltin-type-objects numeric-types truth context-managers",
    "execution": "execmodel naming exceptions dynamic-features",
    "debugger": "debugger",
}
"""Subjects of Python's own documentation → its topics in ``pydoc_data``."""

Passage = tuple[str, str]
"""A text and its subject."""


def pad_texts(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Join texts (L,) of different lengths to (B, L), filled with ``PAD_ID``, and their targets to (B,)."""
    tokens, targets = zip(*samples, strict=True)
    return pad_sequence(list(tokens), batch_first=True, padding_value=PAD_ID), torch.tensor(targets)


class Passages(Dataset):
    """Reads paragraphs of WikiText with the article they are of, or of Python's own documentation by subject.

    A sample is word ids (L,) int64, of a length of its own, and the number of its subject. A paragraph that occurs
    twice counts once, so that none is in both splits.

    Args:
        path: A text in WikiText's format; None takes the topics of ``pydoc_data``, that come with Python.
        max_len: Longer passages are cut.
        vocab_size: The most frequent words of the training passages, ``<unk>`` and ``<pad>`` included.
        val_share: Passages for validation, the same share of every subject.
        tokenizer: ``whitespace`` (the default for a file) or ``words`` (the default for Python's documentation).

    Raises:
        DataError: nothing there, or no two subjects in it.
    """

    collate = staticmethod(pad_texts)
    name = "passages"

    def __init__(
        self,
        split: Split = "train",
        path: str | None = None,
        max_len: Annotated[int, Ge(MIN_WORDS)] = 256,
        vocab_size: Annotated[int, Ge(3)] = 8192,
        val_share: Annotated[float, Gt(0), Lt(1)] = 0.2,
        tokenizer: Tokenizer | None = None,
        base_dir: str | None = None,
    ) -> None:
        check_split(split)
        where = resolve_path(path, base_dir) if path is not None else None
        passages, self.source = _read_passages(where)
        kind: Tokenizer = tokenizer or ("whitespace" if where else "words")
        self.classes = sorted({subject for _, subject in passages})
        if len(self.classes) < 2:
            raise DataError(
                f"{self.source} holds passages of {len(self.classes)} subjects, at least 2 are needed to tell apart; "
                "give a text in WikiText's format, whose articles begin with a line = Title ="
            )
        numbers = {subject: number for number, subject in enumerate(self.classes)}
        targets = np.array([numbers[subject] for _, subject in passages])
        words = [split_line(text, kind)[:-1][:max_len] for text, _ in passages]
        rows = split_stratified(targets, split, val_fraction=val_share, seed=0, what=self.source)
        known = split_stratified(targets, "train", val_fraction=val_share, seed=0, what=self.source)
        vocabulary = build_vocabulary(Counter(word for row in known for word in words[row]), vocab_size - 1)
        self.word_table = WordTable(words=(PAD, *vocabulary.words), tokenizer=kind, max_length=max_len)
        self.n_classes, self.vocab_size, self.max_len = len(self.classes), len(vocabulary) + 1, max_len
        self.targets = torch.from_numpy(targets[rows])
        self._texts = [torch.from_numpy(vocabulary.encode(words[row]).astype(np.int64) + 1) for row in rows]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._texts[index], int(self.targets[index])

    def get_batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Read (B, L) int64, padded to the longest of them, and targets (B,)."""
        return pad_texts([self[int(index)] for index in indices])


def _read_passages(where: Any) -> tuple[list[Passage], str]:
    lines, source = read_lines(where)
    found = _read_topics() if where is None else _read_articles(lines)
    first: dict[str, str] = {}
    for text, subject in found:
        if len(text.split()) >= MIN_WORDS:
            first.setdefault(text, subject)
    return list(first.items()), source


def _read_topics() -> list[Passage]:
    """Read the paragraphs of each topic; the short topics first, as the long ones repeat them."""
    from pydoc_data.topics import topics

    subject_of = {topic: subject for subject, names in SUBJECTS.items() for topic in names.split()}
    return [
        (" ".join(paragraph.split()), subject_of[topic])
        for topic in sorted(topics.keys() & subject_of.keys(), key=lambda topic: (len(topics[topic]), topic))
        for paragraph in re.split(r"\n\s*\n", topics[topic])
    ]


def _read_articles(lines: Sequence[str]) -> list[Passage]:
    found, title = [], None
    for line in lines:
        heading = _ARTICLE.fullmatch(line)
        if heading is not None:
            title = heading[1]
        elif title is not None and not line.lstrip().startswith("= "):
            found.append((" ".join(line.split()), title))
    return found
