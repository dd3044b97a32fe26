"""The figures of a language model: its scores of a batch, perplexity, and the error by group of words.

Shapes: B batch, G groups of words.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fulltilt.errors import UsageError

GROUPS = ("frequent", "common", "rare", "number", "punctuation", "line_end", "unknown")
"""Every word is of one group. ``unknown`` and ``line_end`` are the special words; ``number`` holds a digit;
``punctuation`` neither digit nor letter; of the others ``frequent`` are the first of the vocabulary that together make
half of the training text, ``rare`` those with at most ``RARE_COUNT`` occurrences there, ``common`` the rest."""

RARE_COUNT = 10
FREQUENT_SHARE = 0.5
MAX_EXPONENT = 700.0  # exp of more is no float any more
UNKNOWN = "<unk>"
_SPECIAL = {UNKNOWN: "unknown", "<eos>": "line_end"}


def assign_groups(words: Sequence[str], counts: Sequence[int]) -> list[int]:
    """Return the index in ``GROUPS`` of each word; words in falling order of their counts."""
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


class LanguageScores(NamedTuple):
    """What the model returns: every figure of a batch, so that metrics compute nothing again."""

    loss: Tensor  # mean of both directions, with gradients
    losses: Tensor  # (B, 2) mean loss of each sample by direction, without gradients
    accuracy: Tensor | None = None  # (B,) share of right words, ``<unk>`` never; None where ranks were not asked for
    accuracy_with_unk: Tensor | None = None  # (B,) the same where predicting ``<unk>`` for a rare word counts as right
    top5: Tensor | None = None  # (B,) ``<unk>`` never
    shares: Tensor | None = None  # (B, G) share of predictions that are of a group of words
    misses: Tensor | None = None  # (B, G) share of those that are wrong too


def build_metrics(error_analysis: bool) -> dict[str, Callable[[Any, Any], Tensor]]:
    """Return metrics by name; each reads a field of ``LanguageScores``."""
    places: dict[str, tuple[str, Any]] = {  # name → field and index
        "accuracy": ("accuracy", ...),
        "accuracy_with_unk": ("accuracy_with_unk", ...),
        "top5": ("top5", ...),
        "forward_loss": ("losses", (..., 0)),
        "backward_loss": ("losses", (..., 1)),
    }
    for index, group in enumerate(GROUPS if error_analysis else ()):
        places |= {f"share/{group}": ("shares", (..., index)), f"miss/{group}": ("misses", (..., index))}
    return {name: functools.partial(_read, *place) for name, place in places.items()}


def read_loss(outputs: LanguageScores, targets: Tensor) -> Tensor:
    return outputs.loss


def _read(field: str, index: Any, outputs: LanguageScores, targets: Tensor) -> Tensor:
    value = getattr(outputs, field)
    if value is None:
        raise UsageError(
            "this model ranks words in evaluation only; leave training metrics out, or with softmax full or chunked "
            "write task: language_model(training_metrics=true)"
        )
    return value[index]


def derive_figures(means: Mapping[str, float], *, trains_on_all_words: bool) -> dict[str, float]:
    """Derive perplexity from the loss, and the error by group of words from shares.

    A training loss over sampled words has no perplexity; accuracy tells that these are means of an evaluation.
    """
    figures = {}
    if trains_on_all_words or "accuracy" in means:
        figures["perplexity"] = math.exp(means["loss"]) if means["loss"] < MAX_EXPONENT else math.inf
    for group in GROUPS:
        share = means.get(f"share/{group}", 0.0)
        if share > 0:
            figures[f"error_pct/{group}"] = 100 * means[f"miss/{group}"] / share
    return figures
