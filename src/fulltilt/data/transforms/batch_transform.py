"""Transforms on the device: taken out of the dataset and applied to whole batches at the head of the step."""

import copy
from typing import Any, Literal

import torch
from torch import Tensor

from fulltilt.data.transforms.mixing import Mix
from fulltilt.data.transforms.pipeline import Pipeline, Raw, check_images
from fulltilt.errors import DataError
from fulltilt.levers.compile import CompiledGraphs

Kind = Literal["none", "pipeline", "own"]


def find_transforms(dataset: Any) -> Kind:
    """Tell how a dataset transforms its samples; only a ``pipeline`` can run on the device instead."""
    transform = getattr(dataset, "transform", None)
    if isinstance(transform, Raw):
        return "none"
    if not getattr(dataset, "yields_pixels", False):
        return "none" if transform is None else "own"
    if transform is None:
        return "pipeline"  # uint8 still has to become float
    return "pipeline" if isinstance(transform, Pipeline) and not transform.own_steps else "own"


def detach_transform(dataset: Any) -> tuple[Any, Pipeline]:
    """Split a dataset into one that returns images as read, and the pipeline taken out of it.

    A dataset whose images may differ in size (``sizes_images``) keeps the steps that give them one size.
    """
    if find_transforms(dataset) != "pipeline":
        raise DataError(
            f"the transforms of {type(dataset).__name__} cannot run on the device; use data.transforms loader"
        )
    pipeline = dataset.transform if isinstance(dataset.transform, Pipeline) else Pipeline()
    sizing, rest = pipeline.split_at_size() if getattr(dataset, "sizes_images", False) else (Pipeline(), pipeline)
    other = copy.copy(dataset)
    other.transform = Raw(sizing)
    return other, rest


def take_raw(source: Any) -> Any:
    """Return a dataset of the same images in uint8, untransformed; its ``sample_shape`` stays that of ``source``.

    Raises:
        DataError: The source is no dataset of uint8 images.
    """
    if not (getattr(source, "yields_pixels", False) and hasattr(source, "hold")):
        raise DataError(
            f"{type(source).__name__} is no dataset of images in uint8; views are made of stl10, cifar10, image_folder "
            "or digits"
        )
    raw = copy.copy(source)
    raw.transform = Raw()
    return raw


class BatchTransform:
    """Transforms a batch of (images, targets) on its device: the pipeline, then mixing.

    Args:
        pipeline: For uint8 or float images; None leaves them as they are.
        mix: Applied behind the pipeline.
        memory_format: Of the images returned; None leaves it.

    Attributes:
        graphs: Counts the runs of compiled graphs, once compiled.
        seen: Type and device of the newest batch's images.

    Device: draws with one call of the generator; does not synchronise.
    """

    def __init__(
        self, pipeline: Pipeline | None, *, mix: Mix | None = None, memory_format: torch.memory_format | None = None
    ):
        self.pipeline, self.mix, self.memory_format = pipeline, mix, memory_format
        self.graphs: CompiledGraphs | None = None
        self.seen: tuple[torch.dtype, str] | None = None
        self._apply = pipeline.apply if pipeline is not None else None
        self._notes: list[str] = []

    def compile(self, notes: list[str]) -> None:
        """Compile the pipeline at its first batch; where that fails, run it eagerly and append the reason to ``notes``.

        Random numbers are drawn outside of the graph, so both ways give the same images.
        """
        if self.pipeline is None:
            return
        self.graphs, self._notes = CompiledGraphs(), notes
        self._apply = torch.compile(self.pipeline.apply, dynamic=False, fullgraph=True, backend=self.graphs)

    def uncompiled(self) -> "BatchTransform":
        """Return the same transforms without a compiled graph, for a batch of another size."""
        return BatchTransform(self.pipeline, mix=self.mix, memory_format=self.memory_format)

    def __call__(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        """Transform a batch as the loader returned it; DataError where it is no pair of images and targets."""
        images, targets = _read_pair(batch)
        self.seen = images.dtype, images.device.type
        if self.pipeline is not None:
            check_images(images)
            images = self._run_pipeline(images, self.pipeline.draw(images, generator))
        if self.mix is not None:
            images, targets = self.mix((images, targets), generator)
        if self.memory_format is not None and images.dim() == 4:
            images = images.contiguous(memory_format=self.memory_format)
        return images, targets

    def _run_pipeline(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        assert self.pipeline is not None
        assert self._apply is not None
        if self.graphs is None:
            return self._apply(x_BCHW, u_BD)
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._apply(x_BCHW, u_BD)
        except TorchDynamoException as error:
            if isinstance(error.__cause__, DataError):
                raise error.__cause__ from None
            self.graphs, self._apply = None, self.pipeline.apply
            reason = str(error).strip().splitlines()[0]
            self._notes.append(f"the transforms could not be compiled and run as they are ({reason})")
            return self._apply(x_BCHW, u_BD)


def _read_pair(batch: Any) -> tuple[Tensor, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], Tensor):
        return batch[0], batch[1]
    what = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
    raise DataError(f"data.transforms and data.mix take batches of (images, targets), and a batch is {what}")
