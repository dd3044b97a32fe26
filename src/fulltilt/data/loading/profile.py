"""Measure the time of each part of the data path: reading, every transform, collating.

The parts run one after another in one process, as training runs them. Only decoding, and resizing while sizes differ,
run image by image; later steps take whole batches.
"""

import collections
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fulltilt.data.collate import fast_collate
from fulltilt.data.loading.sampler import EpochSampler
from fulltilt.data.transforms.batch_transform import find_transforms
from fulltilt.data.transforms.colors import to_unit_float
from fulltilt.data.transforms.pipeline import Pipeline, Raw
from fulltilt.errors import DataError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """Holds the mean time per sample of one part; ``where`` is ``loader`` or a type of device."""

    name: str
    where: str
    ms_per_sample: float
    share_pct: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataProfile:
    """Holds all parts, slowest first, and the samples per second that one loading process delivers."""

    dataset: str
    n_samples: int
    batch_size: int
    parts: tuple[PartTime, ...]
    loader_samples_per_s: float | None
    note: str | None = None


def measure_data_path(
    dataset: Any,
    *,
    batch_size: int,
    device: torch.device,
    on_device: bool = False,
    n_samples: int = 1024,
    max_s: float = 20.0,
    seed: int = 0,
) -> DataProfile:
    """Time the parts on random samples, the first batch left out.

    Args:
        dataset: Map-style. Every step of a pipeline is timed; transforms of its own are one part.
        on_device: Transforms run on ``device`` (``data.transforms: device``).
        n_samples: Timed samples at most.
        max_s: Stop after the batch in which so many seconds have gone.

    Raises:
        DataError: The dataset streams, or a sample cannot be read.

    Device: synchronises behind every part.
    """
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{type(dataset).__name__} streams: its samples cannot be drawn at random to be timed")
    order = EpochSampler(len(dataset), True, seed).compute_order()
    size = min(batch_size, len(order))
    timer = _Timer(device if on_device else torch.device("cpu"))
    run = _build_parts(dataset, timer, device if on_device else None)
    generator = torch.Generator(device if on_device else "cpu").manual_seed(seed)
    n_timed, n_batches = 0, max(2, -(-n_samples // size) + 1)
    began_s = time.perf_counter()
    for number in range(n_batches):
        first = number * size % max(1, len(order) - size + 1)
        run(order[first : first + size].tolist(), generator)
        if number == 0:
            timer.seconds.clear()
            began_s = time.perf_counter()
            continue
        n_timed += size
        if time.perf_counter() - began_s >= max_s:
            break
    return _summarize(dataset, timer, n_timed, size)


class _Timer:
    """Sums up seconds by (part, place)."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds: dict[tuple[str, str], float] = collections.defaultdict(float)

    def run(self, name: str, where: str, function: Callable[..., T], *arguments: Any) -> T:
        began_s = time.perf_counter()
        result = function(*arguments)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name, where] += time.perf_counter() - began_s
        return result

    def run_steps(self, images: Tensor, pipeline: Pipeline, where: str, generator: torch.Generator | None) -> Tensor:
        for step in pipeline.steps:
            images = self.run(step.name, where, step, images, generator)
        return images


def _build_parts(dataset: Any, timer: _Timer, device: torch.device | None) -> Callable[[list[int], Any], None]:
    transform = getattr(dataset, "transform", None)
    is_known = getattr(dataset, "yields_pixels", False) and (transform is None or isinstance(transform, Pipeline))
    if not is_known:
        return functools.partial(_time_whole, dataset, timer)
    pipeline = transform if isinstance(transform, Pipeline) else Pipeline()
    raw = copy.copy(dataset)
    raw.transform = Raw()
    is_by_image = getattr(dataset, "sizes_images", False)
    if device is None:
        host, rest = pipeline, Pipeline()
    elif find_transforms(dataset) != "pipeline":
        raise DataError("a transform of your own runs in the loader only; use data.transforms loader")
    else:
        host, rest = pipeline.split_at_size() if is_by_image else (Pipeline(), pipeline)

    def run(indices: list[int], generator: torch.Generator) -> None:
        own = generator if device is None else None
        if is_by_image:
            images = [timer.run("decode", "loader", dataset.decode, index) for index in indices]
            batch = _join(images, host, timer, own)
        else:
            batch = timer.run("read", "loader", raw.get_batch, indices)[0]
            batch = timer.run_steps(batch, host, "loader", own)
        where = "loader" if device is None else device.type
        if device is not None:
            if device.type != "cpu":
                batch = timer.run("copy to device", where, batch.to, device)
            batch = timer.run_steps(batch, rest, where, generator)
        timer.run("to float", where, lambda images: to_unit_float(images).contiguous(), batch)

    return run


def _join(images: list[Tensor], pipeline: Pipeline, timer: _Timer, generator: torch.Generator | None) -> Tensor:
    """Transform and collate images as ``join_images`` does."""
    if len({image.shape for image in images}) == 1:
        sizing, rest = Pipeline(), pipeline
    else:
        sizing, rest = pipeline.split_at_size()
        images = [timer.run_steps(image[None], sizing, "loader", generator)[0] for image in images]
    return timer.run_steps(timer.run("collate", "loader", fast_collate, images), rest, "loader", generator)


def _time_whole(dataset: Any, timer: _Timer, indices: Sequence[int], generator: Any) -> None:
    if callable(getattr(dataset, "get_batch", None)):
        timer.run("read and transform", "loader", dataset.get_batch, indices)
        return
    samples = timer.run("read and transform", "loader", lambda: [dataset[index] for index in indices])
    timer.run("collate", "loader", fast_collate, samples)


def _summarize(dataset: Any, timer: _Timer, n_samples: int, batch_size: int) -> DataProfile:
    total_s = sum(timer.seconds.values())
    loader_s = sum(seconds for (_, where), seconds in timer.seconds.items() if where == "loader")
    is_whole = ("read and transform", "loader") in timer.seconds
    parts = []
    for (name, where), part_s in sorted(timer.seconds.items(), key=lambda item: -item[1]):
        share_pct = 100 * part_s / total_s if total_s else 0.0
        parts.append(PartTime(name=name, where=where, ms_per_sample=1e3 * part_s / n_samples, share_pct=share_pct))
    return DataProfile(
        dataset=type(dataset).__name__,
        n_samples=n_samples,
        batch_size=batch_size,
        parts=tuple(parts),
        loader_samples_per_s=n_samples / loader_s if loader_s > 0 else None,
        note="the dataset transforms by itself: its parts cannot be told apart" if is_whole else None,
    )
