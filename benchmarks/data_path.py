"""Images per second that reach a model: out of JPEG files, and out of memory, beside other libraries' ways.

Every arm delivers shuffled, augmented, normalised float batches of 256 on the device. A block is a whole epoch, with
workers that persist; arms run in turn within a round, and a ratio is taken within its round. Training CPUs are shared
by loader and model: nothing else runs here, so the figures are of the data path alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import _data_path
from benchmarks._data_path import BATCH_SIZE, N_WORKERS, PEERS, Pass
from benchmarks._rounds import Round, build_arms, compute_means, run_rounds
from benchmarks._runner import Context, Findings, find_data, open_peers_of_data
from benchmarks._schema import Arm, Target, judge_median

NAME = "data_path"
CLAIM = (
    "CIFAR-10 images reach the model at least as fast from JPEG files as with DataLoader and torchvision v2, and over "
    "5 times as fast from memory, with other crops and flips for every image."
)
NEEDS_PEERS = True
DEVICES = ("cpu", "cuda")

LEAST_FROM_FILES, LEAST_FROM_MEMORY = 1.0, 5.0
CASES: dict[str, tuple[Callable[[Path, torch.device], dict[str, Pass]], float]] = {
    "JPEG files": (_data_path.plan_file_passes, LEAST_FROM_FILES),
    "in memory": (_data_path.plan_memory_passes, LEAST_FROM_MEMORY),
}
NOTES = {
    "spdl, Pillow": f"{N_WORKERS} threads, decoded by Pillow: this machine has no FFmpeg; torchvision v2 by batch",
    "spdl": f"{N_WORKERS} threads, torchvision v2 by batch; https://facebookresearch.github.io/spdl",
    "litdata": f"optimized chunks, {N_WORKERS} workers, torchvision v2; https://github.com/Lightning-AI/litData",
    "torchvision, by batch": "no loader: one crop and one flip for all images of a batch, which is another recipe",
}


def run(context: Context) -> Findings:
    archive = find_data("cifar10_jpeg.tar.xz")
    open_peers_of_data()
    device, n_threads = torch.device(context.device), torch.get_num_threads()
    n_images = 800 if context.quick else 10_000
    arms: list[Arm] = []
    targets: list[Target] = []
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            images = Path(folder) / "images"
            _data_path.unpack_images(archive, images, n_images)
            for case, (plan, least) in CASES.items():
                rounds = measure_case(plan(images, device), device, quick=context.quick)
                unit = "round of two epochs an arm, arms in turn"
                arms += build_arms(rounds, case=case, metric="samples_per_s", unit_of_replication=unit, notes=NOTES)
                targets.append(judge_case(rounds, case, least))
    finally:
        torch.set_num_threads(n_threads)
    missing = [name for name in PEERS if not _data_path.has_peer(name)]
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
