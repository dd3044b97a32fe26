"""Groups of words that errors are told apart by. Every word is of exactly one."""

from __future__ import annotations

from collections.abc import Sequence

GROUPS = ("frequent", "common", "rare", "number", "punctuation", "line_end", "unknown")
"""``unknown`` and ``line_end`` are the special words; ``number`` holds a digit; ``punctuation`` neither digit nor
letter; of the others ``frequent`` are the first of the vocabulary that together make half of the training text,
``rare`` those with at most ``RARE_COUNT`` occurrences there, ``common`` the rest."""

RARE_COUNT = 10
FREQUENT_SHARE = 0.5
_SPECIAL = {"<unk>": "unknown", "<eos>": "line_end"}


def assign_groups(words: Sequence[str], counts: Sequence[int]) -> list[int]:
    """The index in ``GROUPS`` of each word; words in falling order of their counts."""
    total, passed, groups = sum(counts), 0, []
    for word, count in zip(words, counts, strict=True):
        groups.append(GROUPS.index(_name_group(word, count, is_frequent=passed < FREQUENT_SHARE * total)))
        passed += count
    return groups


def _name_group(word: str, count: int, *, is_frequent: bool) -> str:
    if word in _SPECIAL:
        return _SPECIAL[word]
    if any(letter.isdigit() for letter in word):
        return "number"
    if not any(letter.isalnum() for letter in word):
        return "punctuation"
    return "frequent" if is_frequent else "rare" if count <= RARE_COUNT else "common"
