"""Contrastive learning of images without labels: SimCLR (Chen et al. 2020, arXiv 2002.05709).

Shapes: B images, R = 2·B rows of views, C channels, H height, W width.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.errors import ConfigError, UsageError
from fulltilt.tasks.encoder import ContrastiveModel, build_encoder
from fulltilt.tasks.features import BATCH_SIZE, extract_features, find_labelled, spread
from fulltilt.tasks.losses import Loss, NtXent
from fulltilt.tasks.neighbours import choose_k, compute_knn_accuracy
from fulltilt.tasks.workload import Workload

Views = Callable[[Tensor, Generator], Tensor]
"""Makes views in float32 of images (B, C, H, W) in uint8, each with draws of its own."""
LabelledImages = Callable[[], tuple[Any, Any]]
"""Builds two datasets as an evaluation sees them: training images, some with a target of 0 or more; validation."""


class TwoViews:
    """``prepare`` of the task: draws two views of every image on the device; rows 2·i and 2·i + 1 are of image i."""

    def __init__(self, build_views: Callable[[], Views]) -> None:
        self._build, self._views = build_views, None

    def __call__(self, batch: Any, generator: Generator) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(f"contrastive needs batches (images, targets), got {type(batch).__name__}")
        images_BCHW, targets_B = batch
        if self._views is None:
            self._views = self._build()
        rows_RCHW = self._views(images_BCHW.repeat_interleave(2, dim=0), generator)
        if images_BCHW.is_contiguous(memory_format=torch.channels_last) and not images_BCHW.is_contiguous():
            rows_RCHW = rows_RCHW.contiguous(memory_format=torch.channels_last)
        return rows_RCHW, targets_B


class NeighbourAssessment:
    """``assess`` of the task: measures the accuracy of the nearest labelled neighbours of validation images.

    It looks at no more than ``limit`` images of either dataset, evenly spread, ``batch_size`` at a time.
    """

    def __init__(self, labelled: LabelledImages, *, limit: int | None) -> None:
        self.labelled, self._limit, self.batch_size = labelled, limit, BATCH_SIZE

    def __call__(self, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        assert isinstance(model, ContrastiveModel)
        bank, queries, bank_rows, query_rows = self._choose_rows()
        if not len(bank_rows) or not len(query_rows):
            return {}
        known = extract_features(model.encode, bank, bank_rows, device, batch_size=self.batch_size)
        asked = extract_features(model.encode, queries, query_rows, device, batch_size=self.batch_size)
        return {"knn_accuracy": compute_knn_accuracy(*known, *asked)}

    def explain(self) -> str:
        """Say how many images the figure is made of."""
        bank, queries, bank_rows, query_rows = self._choose_rows()
        if not len(bank_rows) or not len(query_rows):
            return "no labelled images: no accuracy of nearest neighbours at evaluations"
        return (
            f"knn_accuracy at evaluations: {choose_k(len(bank_rows))} nearest of {len(bank_rows):,} labelled training "
            f"images (of {len(find_labelled(bank)):,}), asked for {len(query_rows):,} validation images (of "
            f"{len(find_labelled(queries)):,})"
        )

    def _choose_rows(self) -> tuple[Any, Any, Any, Any]:
        bank, queries = self.labelled()
        return bank, queries, *(spread(find_labelled(images), self._limit) for images in (bank, queries))


def build_contrastive(
    *,
    model: Callable[[], nn.Module],
    train: Callable[[], Dataset],
    views: Callable[[], Views],
    labelled: LabelledImages | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    name: str = "contrastive",
    projector: Annotated[int, Ge(1)] = 128,
    hidden: Annotated[int, Ge(1)] | None = None,
    temperature: Annotated[float, Gt(0)] = 0.5,
    exact_batch: bool = True,
    knn_limit: Annotated[int, Ge(1)] | None = 10_000,
) -> Workload:
    """Find the other view of the same image among all views of the batch, with NT-Xent.

    Args:
        model: A classifier; its last linear layer is replaced by the projector.
        train: Images in uint8, untransformed.
        views: Builds what makes the views, on the device.
        projector: Width of the projection that the loss compares.
        hidden: Width between the projector's two layers; that of the features when None.
        exact_batch: Compute an accumulation window as one batch, by gradient caching. False: plain accumulation,
            where each micro-batch only sees its own negatives.
        knn_limit: The most labelled images that an evaluation looks at, of training and of validation; null: all.
    """
    assessment = NeighbourAssessment(labelled, limit=knn_limit) if labelled is not None else None

    def build_model() -> ContrastiveModel:
        shape = tuple(getattr(train(), "sample_shape"))  # noqa: B009
        return build_encoder(model(), shape, projector=projector, hidden=hidden)

    def explain(batch_size: int, accumulate: int) -> list[str]:
        notes = [explain_negatives(batch_size, accumulate, exact=exact_batch)]
        return [*notes, assessment.explain()] if assessment is not None else notes

    return Workload(
        model=build_model,
        dataset=train,
        loss=loss or NtXent(temperature),
        optimizer=optimizer,
        prepare=TwoViews(views),
        assess=assessment,
        explain=explain,
        couples_samples=exact_batch,
        compares_samples=True,
        name=name,
    )


def explain_negatives(batch_size: int, accumulate: int, *, exact: bool, what: str = "images") -> str:
    """Say how many negatives an anchor has: the views of all other samples in its batch; refuse none."""
    effective = batch_size * accumulate
    own, joint = 2 * batch_size - 2, 2 * effective - 2
    if not (joint if exact else own):
        raise ConfigError(
            "one sample at a time has no negatives, so its loss is 0 whatever the model does; take 2 or more",
            key="data.batch_size",
        )
    if accumulate == 1:
        return f"NT-Xent over batches of {batch_size}: {own:,} negatives per anchor"
    if exact:
        return (
            f"NT-Xent over {effective:,} {what} as one batch ({batch_size} × {accumulate}, gradient caching): "
            f"{joint:,} negatives per anchor, at the memory of {batch_size} and one more forward a step; BatchNorm "
            f"sees {batch_size} {what} at a time"
        )
    return (
        f"NT-Xent over batches of {batch_size}: {own:,} negatives per anchor; accumulate {accumulate} adds up "
        f"gradients (effective batch {effective:,}) and adds no negatives: exact_batch=true has {joint:,}"
    )
