"""What a language model tells of a batch, and the figures that follow from it.

Shapes: B batch, G groups of words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fulltilt.errors import UsageError
from fulltilt.tasks.language_groups import GROUPS

MAX_EXPONENT = 700.0  # exp of more is no float any more


class LanguageScores(NamedTuple):
    """What the model returns: every figure of a batch, so that nothing is computed again for the metrics.

    Attributes:
        loss: Mean of both directions, with gradients.
        losses: (B, 2) mean loss of each sample by direction, without gradients.
        accuracy, top5: (B,) share of right words, None where ranks were not asked for.
        shares, misses: (B, G) share of predictions that are of a group of words, and of those that are wrong too.
    """

    loss: Tensor
    losses: Tensor
    accuracy: Tensor | None = None
    top5: Tensor | None = None
    shares: Tensor | None = None
    misses: Tensor | None = None


def build_metrics(error_analysis: bool) -> dict[str, Callable[[Any, Any], Tensor]]:
    metrics: dict[str, Callable[[Any, Any], Tensor]] = {
        "accuracy": functools.partial(_read, "accuracy"),
        "top5": functools.partial(_read, "top5"),
        "forward_loss": functools.partial(_read_direction, 0),
        "backward_loss": functools.partial(_read_direction, 1),
    }
    if error_analysis:
        for index, group in enumerate(GROUPS):
            metrics[f"share/{group}"] = functools.partial(_read_group, "shares", index)
            metrics[f"miss/{group}"] = functools.partial(_read_group, "misses", index)
    return metrics


def read_loss(outputs: LanguageScores, targets: Tensor) -> Tensor:
    return outputs.loss


def _read(field: str, outputs: LanguageScores, targets: Tensor) -> Tensor:
    value = getattr(outputs, field)
    if value is None:
        raise UsageError(
            "this model ranks words in evaluation only; leave training metrics out, or with softmax full or chunked "
            "write task: language_model(training_metrics=true)"
        )
    return value


def _read_direction(index: int, outputs: LanguageScores, targets: Tensor) -> Tensor:
    return outputs.losses[:, index]


def _read_group(field: str, index: int, outputs: LanguageScores, targets: Tensor) -> Tensor:
    return _read(field, outputs, targets)[:, index]


def derive_figures(means: Mapping[str, float], *, trains_on_all_words: bool) -> dict[str, float]:
    """Perplexity from the loss, error by group from shares.

    A training loss over sampled words has no perplexity; accuracy tells that these are means of an evaluation.
    """
    figures = {}
    if trains_on_all_words or "accuracy" in means:
        figures["perplexity"] = _exp(means["loss"])
    for group in GROUPS:
        share = means.get(f"share/{group}", 0.0)
        if share > 0:
            figures[f"error_pct/{group}"] = 100 * means[f"miss/{group}"] / share
    return figures


def _exp(value: float) -> float:
    return math.exp(value) if value < MAX_EXPONENT else math.inf
