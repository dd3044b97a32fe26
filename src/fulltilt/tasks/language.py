"""Bidirectional language models: every word of a window is predicted from what precedes and from what follows it.

Shapes: B batch, S words of a window, T = S + 1, P features, V words, G groups of words.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.errors import UsageError
from fulltilt.tasks.language_metrics import (
    GROUPS,
    UNKNOWN,
    LanguageScores,
    assign_groups,
    build_metrics,
    derive_figures,
    read_loss,
)
from fulltilt.tasks.language_softmax import AdaptiveSoftmax, LinearSoftmax, Softmax, TokenScores
from fulltilt.tasks.losses import Loss
from fulltilt.tasks.workload import Workload

TOP5 = 5


class LanguageModel(nn.Module):
    """An encoder and one output layer for both directions, or one for each.

    Args:
        encoder: ``words_BT → (forwards_BSP, backwards_BSP)``.
        groups_V: The group of each word, for the error by group.
        unknown: Id of ``<unk>``, which is no right answer; None: there is no such word.
        ranks_in_training: Compute accuracy on training batches too.
    """

    groups: Tensor | None

    def __init__(
        self,
        encoder: nn.Module,
        outputs: Sequence[nn.Module],
        *,
        groups_V: Tensor | None,
        unknown: int | None,
        ranks_in_training: bool,
    ) -> None:
        super().__init__()
        self.encoder, self.outputs = encoder, nn.ModuleList(outputs)
        self.register_buffer("groups", groups_V, persistent=False)
        self.unknown, self.ranks_in_training = unknown, ranks_in_training

    def forward(self, words_BT: Tensor) -> LanguageScores:
        wants_ranks = self.ranks_in_training or not self.training
        features = self.encoder(words_BT)
        targets = (words_BT[:, 1:], words_BT[:, :-1])
        targets_DBS = torch.stack(targets)
        if len(self.outputs) == 1:  # one product over both directions
            features, targets = (torch.cat(features),), (torch.cat(targets),)
        scores = [
            layer(features[d].flatten(0, 1), targets[d].flatten(), wants_ranks=wants_ranks)
            for d, layer in enumerate(self.outputs)
        ]
        return self._summarize(scores, targets_DBS, len(words_BT))

    def _summarize(self, scores: Sequence[TokenScores], targets_DBS: Tensor, n_samples: int) -> LanguageScores:
        loss = torch.stack([score.loss for score in scores]).mean()
        losses_DBS = torch.cat([score.losses for score in scores]).view(2, n_samples, -1)
        losses_BD = losses_DBS.mean(2).T
        if scores[0].ranks is None:
            return LanguageScores(loss, losses_BD)
        with torch.no_grad():
            ranks_DBS = torch.cat([score.ranks for score in scores if score.ranks is not None]).view_as(losses_DBS)
            with_unk_B = (ranks_DBS == 0).float().mean((0, 2))
            accuracy_B, top5_B = with_unk_B, (ranks_DBS < TOP5).float().mean((0, 2))
            if self.unknown is not None:
                is_word_DBS = targets_DBS != self.unknown
                accuracy_B = ((ranks_DBS == 0) & is_word_DBS).float().mean((0, 2))
                top5_B = ((ranks_DBS < TOP5) & is_word_DBS).float().mean((0, 2))
            if self.groups is None:
                return LanguageScores(loss, losses_BD, accuracy_B, with_unk_B, top5_B)
            group_BN = self.groups[targets_DBS].transpose(0, 1).flatten(1)
            wrong_BN = (ranks_DBS != 0).float().transpose(0, 1).flatten(1)
            zeros_BG = wrong_BN.new_zeros(n_samples, len(GROUPS))
            shares_BG = zeros_BG.scatter_add(1, group_BN, torch.ones_like(wrong_BN)) / group_BN.shape[1]
            misses_BG = zeros_BG.scatter_add(1, group_BN, wrong_BN) / group_BN.shape[1]
        return LanguageScores(loss, losses_BD, accuracy_B, with_unk_B, top5_B, shares_BG, misses_BG)


def build_language_model(
    *,
    model: Callable[[], nn.Module],
    train: Callable[[], Dataset],
    validation: Callable[[], Dataset] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    name: str = "language_model",
    softmax: Softmax = "chunked",
    heads: Literal["separate", "shared"] = "separate",
    tie_embedding: bool = False,
    n_sampled: Annotated[int, Ge(1)] = 8192,
    cutoffs: Sequence[int] | None = None,
    div_value: Annotated[float, Gt(0)] = 4.0,
    chunk_rows: Annotated[int, Ge(1)] | None = None,
    training_metrics: bool = False,
    error_analysis: bool = False,
) -> Workload:
    """Predict the words of windows from both sides; the loss is the mean of both directions.

    Args:
        model: The encoder: ``embedding`` (V words), ``n_features`` (P), ``words_BT → (forwards_BSP, backwards_BSP)``.
        train: ``(inputs_BS, targets_BS)``, the targets being the inputs moved on by one word; ids in falling order of
            frequency for ``adaptive`` and ``sampled``.
        softmax: ``full``, ``chunked`` (the same numbers in less memory), ``adaptive`` (another model), ``sampled``
            (another training loss); see ``language_softmax``.
        heads: An output layer for each direction, or one for both, as in ELMo.
        tie_embedding: The embedding table is the weight of the output layers.
        n_sampled: Words drawn a step by ``sampled``.
        cutoffs: First ids of the second and later groups of ``adaptive``.
        div_value: How many times fewer features each further group of ``adaptive`` has.
        chunk_rows: Predictions at a time; None: by the device's memory.
        training_metrics: Accuracy of training batches too: a further pass over the logits.
        error_analysis: Validation error by group of words (``GROUPS``); the dataset needs a ``vocabulary``.

    Raises:
        UsageError: options that exclude each other; from the model: an encoder that does not fit.
    """
    if loss is not None:
        raise UsageError("language_model computes its loss in its softmax; remove loss")
    if softmax == "adaptive" and tie_embedding:
        raise UsageError("softmax adaptive has fewer features for rare words and cannot be tied; drop tie_embedding")
    if softmax in ("adaptive", "sampled") and training_metrics:
        raise UsageError(
            f"softmax {softmax} scores a part of the words in training, accuracy needs all; drop training_metrics: "
            "every evaluation has it"
        )
    if softmax != "adaptive" and cutoffs is not None:
        raise UsageError(f"cutoffs are groups of the adaptive softmax, and softmax is {softmax}; drop one of them")
    options = {"n_sampled": n_sampled, "chunk_rows": chunk_rows}
    if softmax == "adaptive":
        options = {"cutoffs": cutoffs, "div_value": div_value, "chunk_rows": chunk_rows}
    n_heads = 2 if heads == "separate" else 1

    def build() -> LanguageModel:
        encoder, dataset = model(), train()
        outputs = _build_outputs(encoder, dataset, softmax, n_heads, tie_embedding, options)
        groups_V = _assign_groups(dataset, encoder.embedding.num_embeddings) if error_analysis else None
        words = getattr(getattr(dataset, "vocabulary", None), "words", ())
        unknown = words.index(UNKNOWN) if UNKNOWN in words else None
        return LanguageModel(encoder, outputs, groups_V=groups_V, unknown=unknown, ranks_in_training=training_metrics)

    return Workload(
        model=build,
        dataset=train,
        validation=validation,
        loss=read_loss,
        optimizer=optimizer,
        metrics=build_metrics(error_analysis),
        prepare=join_window,
        derive=functools.partial(derive_figures, trains_on_all_words=softmax != "sampled"),
        explain=functools.partial(_explain, train, softmax, n_sampled),
        training_metrics=training_metrics,
        name=name,
    )


def join_window(batch: Any, generator: Generator) -> tuple[Tensor, Tensor]:
    """Join words (B, S) and the words behind them (B, S) to windows (B, T); the targets stay as they came."""
    inputs_BS, targets_BS = batch
    return torch.cat((inputs_BS, targets_BS[:, -1:]), dim=1), targets_BS


def _build_outputs(
    encoder: Any, dataset: Any, softmax: Softmax, n_heads: int, tie_embedding: bool, options: Mapping[str, Any]
) -> list[nn.Module]:
    embedding, n_features = getattr(encoder, "embedding", None), getattr(encoder, "n_features", None)
    if not isinstance(embedding, nn.Embedding) or not isinstance(n_features, int):
        raise UsageError(
            f"language_model needs an encoder with embedding (nn.Embedding) and n_features, {type(encoder).__name__} "
            "has not both; use model: bilm, or give your own these attributes"
        )
    n_words, n_known = embedding.num_embeddings, getattr(dataset, "vocab_size", 0)
    if n_words < n_known:
        raise UsageError(f"the model knows {n_words} words, the data has {n_known}; raise the model's vocab_size")
    if softmax == "adaptive":
        return [AdaptiveSoftmax(n_features, n_words, **options) for _ in range(n_heads)]
    tied = embedding if tie_embedding else None
    return [LinearSoftmax(n_features, n_words, softmax, tied=tied, **options) for _ in range(n_heads)]


def _assign_groups(dataset: Any, n_words: int) -> Tensor:
    vocabulary = getattr(dataset, "vocabulary", None)
    if vocabulary is None:
        raise UsageError(
            f"error_analysis needs the words, and {type(dataset).__name__} has no vocabulary; drop error_analysis"
        )
    groups = assign_groups(vocabulary.words, vocabulary.counts)
    return torch.tensor(groups + [0] * (n_words - len(groups)))


def _explain(
    train: Callable[[], Dataset], softmax: Softmax, n_sampled: int, batch_size: int, accumulate: int
) -> list[str]:
    dataset = train()
    seq_len = getattr(dataset, "sample_shape", (0,))[0]
    n_words = batch_size * accumulate * seq_len
    notes = [f"a step predicts {n_words:,} words, each from both sides ({batch_size} × {accumulate} windows)"]
    if softmax == "sampled":
        notes.append(
            f"the training loss compares with {n_sampled:,} sampled words: it lies below that of all words and has no "
            "perplexity; validation is over all words"
        )
        vocab_size = getattr(dataset, "vocab_size", None)
        if vocab_size is not None and n_sampled >= vocab_size:
            notes.append(f"n_sampled {n_sampled:,} is no less than the {vocab_size:,} words there are: full takes less")
    return notes if seq_len else notes[1:]
