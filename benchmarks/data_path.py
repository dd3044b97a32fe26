"""Images per second that reach a model: out of JPEG files, and out of memory, beside other libraries' ways.

Every arm delivers shuffled, augmented, normalised float batches of 256 on the device. All crop (32 pixels out of 40),
flip and normalise. Ours, torchvision's and LitData's draw for every image; SPDL brings no transforms, and torchvision's
on a whole batch draw once for all of its images: less work, and less variety. A block is a whole epoch, with workers
that persist; arms run in turn within a round, and a ratio is taken within its round. Training CPUs are shared by loader
and model: nothing else runs here, so the figures are of the data path alone.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks._rounds import Round, build_arms, compute_means, run_rounds
from benchmarks._runner import Context, Findings, find_data, open_peers_of_data
from benchmarks._schema import Arm, Target, judge_median
from fulltilt.data import DATASETS, BatchTransform, build_loader
from fulltilt.data.images.cifar10 import MEAN, STD
from fulltilt.data.images.cifar10_formats import CLASSES
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.tasks.vision import import_torchvision

CLAIM = (
    "CIFAR-10 images reach the model at least as fast from JPEG files as with DataLoader and torchvision v2, and over "
    "5 times as fast from memory, with other crops and flips for every image."
)
NEEDS_PEERS = True
DEVICES = ("cpu", "cuda")

BATCH_SIZE = 256
N_WORKERS = 2
PIPELINE = f"random_crop(32, padding=4) | random_flip | normalize(mean={list(MEAN)}, std={list(STD)})"
PEERS = {"spdl": "spdl.io", "litdata": "litdata"}

Pass = Callable[[], Iterable[Any]]
NOTES = {
    "spdl, Pillow": f"{N_WORKERS} threads, decoded by Pillow: this machine has no FFmpeg; torchvision v2 by batch",
    "spdl": f"{N_WORKERS} threads, torchvision v2 by batch; https://facebookresearch.github.io/spdl",
    "litdata": f"optimized chunks, {N_WORKERS} workers, torchvision v2; https://github.com/Lightning-AI/litData",
    "torchvision, by batch": "no loader: one crop and one flip for all images of a batch, which is another recipe",
}


def run(context: Context) -> Findings:
    archive = find_data("cifar10_jpeg.tar.xz")
    open_peers_of_data()
    device = torch.device(context.device)
    n_images = 800 if context.quick else 10_000
    arms: list[Arm] = []
    targets: list[Target] = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        unpack_images(archive, images, n_images)
        for case, (plan, least) in CASES.items():
            rounds = measure_case(plan(images, device), device, quick=context.quick)
            unit = "round of two epochs an arm, arms in turn"
            arms += build_arms(rounds, case=case, metric="samples_per_s", unit_of_replication=unit, notes=NOTES)
            targets.append(judge_case(rounds, case, least))
    missing = [name for name in PEERS if not has_peer(name)]
    notes = [f"{n_images:,} training images of 32 × 32, batches of {BATCH_SIZE}, files in the page cache"]
    if missing:
        notes.append(f"not installed here and left out: {', '.join(missing)}")
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=tuple(notes))


def measure_case(passes: dict[str, Pass], device: torch.device, *, quick: bool) -> list[Round[float]]:
    for start in passes.values():
        measure_epoch(start, device)
    return run_rounds(list(passes), lambda name: measure_epoch(passes[name], device), n_rounds=1 if quick else 7)


def measure_epoch(start: Pass, device: torch.device) -> float:
    """Measure the samples per second of one pass, the first batch's wait included."""
    n_samples, began_s = 0, time.perf_counter()
    for images, _ in start():
        n_samples += len(images)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if not n_samples:
        raise RuntimeError("a contestant delivered no image")
    return n_samples / (time.perf_counter() - began_s)


def judge_case(rounds: list[Round[float]], case: str, least: float) -> Target:
    """Hold the best of our arms against the best of torchvision's with a draw for every image, round by round."""
    ours, theirs = (
        [max(rates) for rates in zip(*(compute_means(rounds, name) for name in names), strict=True)]
        for names in (
            [name for name in rounds[0] if name.startswith("fulltilt")],
            [name for name in rounds[0] if name.startswith("torchvision") and "by batch" not in name],
        )
    )
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    return judge_median(f"{case}: best of ours over best of DataLoader with torchvision v2", ratios, at_least=least)


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


CASES: dict[str, tuple[Callable[[Path, torch.device], dict[str, Pass]], float]] = {
    "JPEG files": (plan_file_passes, 1.0),
    "in memory": (plan_memory_passes, 5.0),
}
"""By case: its arms, and how many times as fast as torchvision's the best of ours is to be."""
