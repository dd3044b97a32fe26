"""Where transforms run: taken out of a dataset, and done to whole batches at the head of the training step."""

from __future__ import annotations

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
    """What a dataset does to its samples: nothing that is known of, a pipeline, or a callable of the user's own.

    Only a pipeline can be taken out of the dataset and run on the device.
    """
    if not getattr(dataset, "yields_pixels", False):
        return "none" if getattr(dataset, "transform", None) is None else "own"
    transform = dataset.transform
    if transform is None or isinstance(transform, Raw):
        return "pipeline"  # uint8 to float is left to do
    return "pipeline" if isinstance(transform, Pipeline) and not transform.own_steps else "own"


def detach_transform(dataset: Any) -> tuple[Any, Pipeline]:
    """The dataset with images as they were read, and what was taken out of it.

    What brings images of any size to one size stays with a dataset whose images may differ (``sizes_images``).

    Raises:
        DataError: The dataset has no pipeline to take out.
    """
    if find_transforms(dataset) != "pipeline":
        raise DataError(
            f"the transforms of {type(dataset).__name__} cannot run on the device; use data.transforms loader"
        )
    pipeline = dataset.transform if isinstance(dataset.transform, Pipeline) else Pipeline(())
    sizing, rest = pipeline.split_at_size() if getattr(dataset, "sizes_images", False) else (Pipeline(()), pipeline)
    other = copy.copy(dataset)
    other.transform = Raw(sizing)
    return other, rest


class BatchTransform:
    """Transforms of a batch of (images, targets), where the batch lies: the pipeline, then mixing.

    Args:
        pipeline: On uint8 or float images; None: they are ready.
        mix: Behind the pipeline; None: none.
        memory_format: Of the images that leave; None: as they come.

    Attributes:
        graphs: Once compiled: counts the runs of compiled graphs.
        seen: Type and device of the images that came in at the newest batch.

    Device: one call of the generator for the pipeline, then operators without a wait.
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
        """Compile the pipeline at its first batch; where that fails it goes on without, and ``notes`` gets the reason.

        Random numbers are drawn outside of the graph: they are the same with and without.
        """
        if self.pipeline is None:
            return
        self.graphs, self._notes = CompiledGraphs(), notes
        self._apply = torch.compile(self.pipeline.apply, dynamic=False, fullgraph=True, backend=self.graphs)

    def uncompiled(self) -> BatchTransform:
        """The same transforms without a compiled graph: for a batch of another size."""
        return BatchTransform(self.pipeline, mix=self.mix, memory_format=self.memory_format)

    def __call__(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        """A batch as the dataset left it to the batch that the step takes.

        Raises:
            DataError: The batch is no pair of images and targets.
        """
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
