"""Contestants of the data path: each gives a pass over the images as batches that a model can take.

All crop (32 pixels out of 40), flip and normalise. Ours, torchvision's and LitData's draw for every image; SPDL brings
no transforms, and torchvision's on a whole batch draw once for all of its images: less work, and less variety.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fulltilt.data import DATASETS, BatchTransform, build_loader
from fulltilt.data.images.cifar10 import MEAN, STD
from fulltilt.data.images.cifar10_formats import CLASSES
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.tasks.vision import import_torchvision

BATCH_SIZE = 256
N_WORKERS = 2
PIPELINE = f"random_crop(32, padding=4) | random_flip | normalize(mean={list(MEAN)}, std={list(STD)})"
PEERS = {"spdl": "spdl.io", "litdata": "litdata"}

Pass = Callable[[], Iterable[Any]]


def unpack_images(archive: Path, folder: Path, n_images: int) -> None:
    """Unpack the first training images of every class, as files."""
    n_left = dict.fromkeys(CLASSES, n_images // len(CLASSES))
    with tarfile.open(archive) as members:
        for member in members:
            parts = Path(member.name).parts
            if not member.isfile() or len(parts) < 3 or parts[-3] != "train" or not n_left.get(parts[-2]):
                continue
            stream = members.extractfile(member)
            assert stream is not None
            target = folder / parts[-2] / parts[-1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(stream.read())
            n_left[parts[-2]] -= 1
            if not any(n_left.values()):
                return
    raise ValueError(f"{archive} has no {n_images} training images: {n_left} are missing")


class OurEpochs:
    """Passes over a loader of ours, each in an order of its own; transforms that are left are done here."""

    def __init__(
        self, dataset: Any, device: torch.device, *, n_workers: int, on_device: bool, placement: str = "stream"
    ):
        options: dict[str, Any] = {"num_workers": n_workers, "placement": placement, "placement_device": device}
        if n_workers:
            options["persistent_workers"] = True
        if device.type == "cuda" and placement != "device":
            options["pin_memory"] = True
        if on_device:
            options["transforms"] = "device"
        self._loader = build_loader(
            dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, seed=0, options=options,
            worker_options={"threads": 1},
        )  # fmt: skip
        transform = getattr(self._loader, "transform", None)
        self._transform = None if transform is None else BatchTransform(transform)
        self._generator = torch.Generator(device).manual_seed(0)
        self._device, self._epoch = device, 0

    def __call__(self) -> Iterator[Any]:
        self._loader.sampler.set_epoch(self._epoch)
        self._epoch += 1
        for batch in self._loader:
            placed = [part.to(self._device, non_blocking=True) for part in batch]
            yield placed if self._transform is None else self._transform(placed, self._generator)


class PerSample(Dataset):
    """A dataset as torchvision's documentation writes it: one image, its transforms."""

    def __init__(self, read: Callable[[int], Any], targets: torch.Tensor, transform: Callable[[Any], torch.Tensor]):
        self._read, self._targets, self._transform = read, targets, transform

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._read(index)), int(self._targets[index])


def build_torchvision(*, from_pillow: bool) -> Callable[[Any], torch.Tensor]:
    """Build v2 in the order its guide recommends: uint8 tensors through the geometry, floats at the end."""
    import_torchvision()
    from torchvision.transforms import v2

    steps = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*([v2.PILToTensor()] if from_pillow else []), *steps, v2.Normalize(MEAN, STD)])


def plan_torchvision(dataset: Dataset, device: torch.device, n_workers: int) -> Pass:
    loader = DataLoader(
        dataset, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=n_workers, persistent_workers=n_workers > 0,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    return lambda: ([part.to(device, non_blocking=True) for part in batch] for batch in loader)


def plan_batched_torchvision(images: torch.Tensor, targets: torch.Tensor, device: torch.device) -> Pass:
    """Run v2 on whole batches of a table that lies on the device: one draw a batch."""
    transform = build_torchvision(from_pillow=False)
    images, targets = images.to(device), targets.to(device)

    def epoch() -> Iterator[Any]:
        order = torch.randperm(len(images), device=device)
        for rows in order.split(BATCH_SIZE)[: len(images) // BATCH_SIZE]:
            yield transform(images.index_select(0, rows)), targets.index_select(0, rows)

    return epoch


def open_pillow(files: np.ndarray, index: int) -> Any:
    from PIL import Image

    return Image.open(files[index]).convert("RGB")


def plan_file_passes(folder: Path, device: torch.device) -> dict[str, Pass]:
    """Return every arm over the same JPEG files."""
    dataset = DATASETS["image_folder"](path=str(folder), transform=PIPELINE, val_fraction=0.01)
    files, targets = dataset.files, dataset.targets
    per_sample = PerSample(functools.partial(open_pillow, files), targets, build_torchvision(from_pillow=True))
    passes: dict[str, Pass] = {}
    for n_workers in (0, N_WORKERS):
        passes[f"fulltilt, {n_workers} workers"] = OurEpochs(dataset, device, n_workers=n_workers, on_device=False)
        passes[f"torchvision, {n_workers} workers"] = plan_torchvision(per_sample, device, n_workers)
    passes[f"fulltilt, {N_WORKERS} workers, device"] = OurEpochs(dataset, device, n_workers=N_WORKERS, on_device=True)
    if has_peer("spdl"):
        by_ffmpeg = has_ffmpeg(str(files[0]))
        name = "spdl" if by_ffmpeg else "spdl, Pillow"
        passes[name] = plan_spdl(files, targets, device, by_ffmpeg=by_ffmpeg)
    if has_peer("litdata"):
        passes["litdata"] = plan_litdata(files, targets, folder.parent / "litdata", device)
    return passes


def plan_memory_passes(folder: Path, device: torch.device) -> dict[str, Pass]:
    """Return every arm over the same images, decoded before."""
    files = DATASETS["image_folder"](path=str(folder), transform=PIPELINE, val_fraction=0.01)
    held = files.hold(torch.device("cpu"))
    dataset = MemoryImages("cifar10", held.images, held.targets, classes=CLASSES, transform=held.transform)
    per_sample = PerSample(held.images.__getitem__, held.targets, build_torchvision(from_pillow=False))
    placement = "device" if device.type == "cuda" else "ram"
    return {
        "fulltilt, 0 workers": OurEpochs(dataset, device, n_workers=0, on_device=False),
        "fulltilt, device": OurEpochs(dataset, device, n_workers=0, on_device=True, placement=placement),
        "torchvision, 0 workers": plan_torchvision(per_sample, device, 0),
        f"torchvision, {N_WORKERS} workers": plan_torchvision(per_sample, device, N_WORKERS),
        "torchvision, by batch": plan_batched_torchvision(held.images, held.targets, device),
    }


def has_peer(name: str) -> bool:
    return importlib.util.find_spec(name) is not None and importlib.util.find_spec(PEERS[name]) is not None


def has_ffmpeg(file: str) -> bool:
    """Tell whether SPDL finds an FFmpeg on this machine to decode with."""
    import spdl.io

    try:
        spdl.io.demux_image(file)
    except RuntimeError:
        return False
    return True


def plan_spdl(files: np.ndarray, targets: torch.Tensor, device: torch.device, *, by_ffmpeg: bool) -> Pass:
    """Run its pipeline: batches decoded in threads, by FFmpeg or by Pillow; v2 behind it on whole batches."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    transform = build_torchvision(from_pillow=False)

    def load(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if by_ffmpeg:
            buffer = spdl.io.load_image_batch([str(files[row]) for row in rows], width=None, height=None)
            images = spdl.io.to_torch(buffer)
        else:
            images = torch.from_numpy(np.stack([np.asarray(open_pillow(files, row)) for row in rows]))
        return images.permute(0, 3, 1, 2), targets[rows]

    def epoch() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(torch.randperm(len(files)).tolist())
        builder = builder.aggregate(BATCH_SIZE, drop_last=True).pipe(load, concurrency=N_WORKERS).add_sink(3)
        pipeline = builder.build(num_threads=N_WORKERS)
        with pipeline.auto_stop():
            for images, labels in pipeline.get_iterator():
                yield transform(images.to(device)), labels.to(device)

    return epoch


def plan_litdata(files: np.ndarray, targets: torch.Tensor, folder: Path, device: torch.device) -> Pass:
    """Read its optimized chunks of the JPEG bytes by its loader; v2 for every image."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    optimize(
        fn=functools.partial(read_record, files, targets.tolist()),
        inputs=list(range(len(files))),
        output_dir=str(folder),
        chunk_bytes="16MB",
        num_workers=1,
        verbose=False,
        start_method="fork",  # by itself it makes spawn the default of this process, for every arm
    )
    decode = functools.partial(decode_record, build_torchvision(from_pillow=True))
    dataset = StreamingDataset(str(folder), shuffle=True, drop_last=True, transform=decode)
    loader = StreamingDataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=N_WORKERS, drop_last=True, persistent_workers=True
    )
    return lambda: ([part.to(device) for part in batch] for batch in loader)


def read_record(files: np.ndarray, targets: list[int], index: int) -> dict[str, Any]:
    return {"image": Path(files[index]).read_bytes(), "target": targets[index]}


def decode_record(transform: Callable[[Any], torch.Tensor], record: dict[str, Any]) -> tuple[torch.Tensor, int]:
    from PIL import Image

    return transform(Image.open(io.BytesIO(record["image"])).convert("RGB")), record["target"]
