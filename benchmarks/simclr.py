"""SimCLR on CIFAR-10 images: views per second beside a plain loop, what gradient caching costs, and what is learnt.

Views are made by the same steps in all arms, ours and the plain loop's on one thread and without data workers:
``views`` alone, beside torchvision v2 without and with two workers, ``step`` with a small network. ``window`` is one
optimizer step over 256 images: plain accumulation of 64 × 4 (126 negatives), gradient caching over 64 × 4, and one
batch of 256 (510 negatives both); on a GPU over 2,048 in batches of 512. Arms run in turn within a round. ``learning``
trains from a seed on 10,000 images and reads the accuracy of 20 nearest neighbours before and after.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import _rounds
from benchmarks._rounds import Round, compute_differences_pct, compute_means, compute_ratios, run_rounds
from benchmarks._runner import Context, Findings, find_data, open_peers_of_data
from benchmarks._schema import Arm, Target, build_arm, judge, judge_median
from benchmarks._simclr_loop import build_plain_loader, build_v2_loader, run_plain_steps
from fulltilt.config import Config, config_from_values, plan_of
from fulltilt.data import make_stl10
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.loop.evaluate import evaluate
from fulltilt.engine.loop.train import train
from fulltilt.engine.step.cached_step import build_step
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.measure import NullTimer
from fulltilt.stats import compute_interval

CLAIM = (
    "Views for SimCLR are made faster than image by image, the exact large batch costs less than twice plain "
    "accumulation, and features learnt without a label beat those of a random encoder."
)
NEEDS_PEERS = True
DEVICES = ("cpu", "cuda")

IMAGES = "cifar10_jpeg.tar.xz"
SIDE, WINDOW = 32, 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What a device trains: its model, its batch, and what it computes in."""

    device: str
    batch_size: int
    model: str
    precision: str


SIZES = {
    "cpu": Size(device="cpu", batch_size=64, model="small_cnn(width=16)", precision="fp32"),
    "cuda": Size(device="cuda", batch_size=512, model="small_cnn(width=64)", precision="bf16"),
}
LEARNING_BATCH_SIZE = 64  # on every device: larger windows would leave too few steps to learn in
LEARNING_SIDE = 24  # of the views that are learnt from: half the work of 32, which evaluations see
VIEWS = (
    "random_resized_crop({side}, scale=[0.2, 1.0]) | random_flip | "
    "color_jitter(brightness=0.4, contrast=0.4, saturation=0.4) | random_grayscale(probability=0.2)"
)
N_IMAGES, N_LABELLED = 10_000, 2_000
MIN_SPEEDUP, MAX_CACHING_COST_PCT, MIN_MARGIN = 2.0, 100.0, 0.03
MIN_OVER_V2 = 1.0
PLAIN, OURS = "plain loop", "fulltilt"
V2 = {"torchvision v2, 0 workers": 0, "torchvision v2, 2 workers": 2}
ACCUMULATED, CACHED, LARGE = "plain accumulation", "gradient caching", "one large batch"

Arms = dict[str, Callable[[], float]]
"""Name → one block, returning views per second."""


def run(context: Context) -> Findings:
    source = find_data(IMAGES)
    open_peers_of_data()
    size = SIZES[context.device]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        limit, n_labelled = count_images(size, quick=context.quick)
        make_stl10(source, folder, size=SIDE, limit=limit, n_labelled=n_labelled)
        arms, targets = measure_speed(Path(folder), size, quick=context.quick)
        learnt, margin = measure_learning(Path(folder), size, quick=context.quick)
    notes = (
        f"views of both loops: {VIEWS.format(side=SIDE)}; what is learnt from has {LEARNING_SIDE} pixels",
        f"{size.model} with SimCLR's projector, temperature 0.2, AdamW, {size.precision}, 1 thread; workers only in v2",
        "the plain loop is benchmarks/_simclr_loop.py: PIL images through torchvision's transforms, one by one",
        "torchvision v2: on uint8 tensors in memory, floats at the end, persistent workers; a block is "
        "a pass of its own, its start included",
        f"BatchNorm sees {size.batch_size} images at a time in accumulation and caching, "
        f"{size.batch_size * WINDOW} in the large batch",
    )
    return Findings(arms=(*arms, *learnt), targets=(*targets, margin), notes=notes)


def count_images(size: Size, *, quick: bool) -> tuple[int, int]:
    """Count all images, and those with a label; never fewer than a window takes, since short batches are dropped."""
    return (max(600, 2 * WINDOW * size.batch_size), 200) if quick else (N_IMAGES, N_LABELLED)


def measure_speed(folder: Path, size: Size, *, quick: bool) -> tuple[list[Arm], list[Target]]:
    n_rounds, n_steps, n_view_batches = (2, 2, 4) if quick else (15, 8, 64)  # workers need long blocks to get going
    n_windows = max(1, n_steps // WINDOW)
    arms: list[Arm] = []
    targets: list[Target] = []
    for case, contestants, n_batches in (
        ("views", build_view_arms(folder, size, n_view_batches), n_view_batches),
        ("step", build_step_arms(folder, size, n_steps), n_steps),
        ("window", build_window_arms(folder, size, n_windows), n_windows * WINDOW),
    ):
        for block in contestants.values():
            block()
        rounds = run_rounds(list(contestants), lambda name: contestants[name](), n_rounds=n_rounds)  # noqa: B023
        unit = f"round of two blocks an arm, {n_batches} batches of {size.batch_size} images each, arms in turn"
        arms += _rounds.build_arms(rounds, case=case, metric="views_per_s", unit_of_replication=unit)
        if case == "window":
            costs = compute_differences_pct(rounds, ACCUMULATED, CACHED)
            name = "window: time of gradient caching above plain accumulation, %"
            targets.append(judge_median(name, costs, at_most=MAX_CACHING_COST_PCT))
        else:
            least = MIN_SPEEDUP if case == "views" else 1.0
            name = f"{case}: times as fast as the plain loop"
            targets.append(judge_median(name, compute_ratios(rounds, OURS, PLAIN), at_least=least))
        if case == "views":
            targets.append(judge_against_v2(rounds))
    return arms, targets


def judge_against_v2(rounds: Sequence[Round[float]]) -> Target:
    """Hold ours against the better of v2's arms, round by round."""
    ours, *theirs = (compute_means(rounds, name) for name in (OURS, *V2))
    ratios = [own / max(others) for own, *others in zip(ours, *theirs, strict=True)]
    return judge_median("views: times as fast as DataLoader with torchvision v2", ratios, at_least=MIN_OVER_V2)


def build_view_arms(folder: Path, size: Size, n_steps: int) -> Arms:
    run = build(folder, size, accumulate=1)
    ours, plain = cycle(run), cycle_plain(run, size)
    place = TrainStep(run).place  # views count where they are trained on

    def make_ours() -> None:
        for _ in range(n_steps):
            prepare = run.workload.prepare
            assert prepare is not None
            prepare(place(next(ours)), run.generator)

    def make_plain() -> None:
        for _ in range(n_steps):
            place(next(plain))

    def plan_v2(n_workers: int) -> Callable[[], None]:
        images = read_images(run)
        loader = build_v2_loader(images, SIDE, size.batch_size, n_batches=n_steps, n_workers=n_workers)

        def make_v2() -> None:
            for views in loader:
                place(views)

        return make_v2

    blocks = {PLAIN: make_plain, OURS: make_ours} | {name: plan_v2(n_workers) for name, n_workers in V2.items()}
    n_views = 2 * size.batch_size * n_steps
    return {name: time_block(block, n_views, size.device) for name, block in blocks.items()}


def build_step_arms(folder: Path, size: Size, n_steps: int) -> Arms:
    other = build(folder, size, accumulate=1)
    plain = cycle_plain(other, size)

    def train_plain() -> None:
        run_plain_steps(
            other.setup.model, other.setup.optimizer, plain, n_steps, device=size.device, precision=size.precision
        )

    n_views = 2 * size.batch_size * n_steps
    ours = plan_training(build(folder, size, accumulate=1), n_steps)
    return {PLAIN: time_block(train_plain, n_views, size.device), OURS: time_block(ours, n_views, size.device)}


def build_window_arms(folder: Path, size: Size, n_steps: int) -> Arms:
    large = dataclasses.replace(size, batch_size=size.batch_size * WINDOW)
    runs = {
        ACCUMULATED: build(folder, size, accumulate=WINDOW, exact=False),
        CACHED: build(folder, size, accumulate=WINDOW),
        LARGE: build(folder, large, accumulate=1),
    }
    n_views = 2 * large.batch_size * n_steps
    return {name: time_block(plan_training(run, n_steps), n_views, size.device) for name, run in runs.items()}


def plan_training(run: Run, n_steps: int) -> Callable[[], None]:
    """Return a block of optimizer steps of ours; each call goes on with the next batches."""
    step, batches = build_step(run), cycle(run)

    def train_steps() -> None:
        for _ in range(n_steps):
            step(batches, NullTimer())

    return train_steps


def time_block(block: Callable[[], None], n_views: int, device: str) -> Callable[[], float]:
    """Return a block that is timed; on a GPU the device is done before it begins and when it ends."""

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def measure() -> float:
        synchronize()
        started = time.perf_counter()
        block()
        synchronize()
        return n_views / (time.perf_counter() - started)

    return measure


def cycle(run: Run) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from run.start_epoch(epoch)
        epoch += 1


def cycle_plain(run: Run, size: Size) -> Iterator[Any]:
    loader = build_plain_loader(read_images(run), SIDE, size.batch_size)
    while True:
        yield from loader


def read_images(run: Run) -> torch.Tensor:
    return run.dataset.get_batch(range(len(run.dataset)))[0]


def build(folder: Path, size: Size, *, accumulate: int, exact: bool = True) -> Run:
    config = build_config(folder, size, accumulate=accumulate, exact=exact)
    return build_run(config, plan_of(config), device=size.device)


def build_config(
    folder: Path,
    size: Size,
    *,
    accumulate: int = WINDOW,
    exact: bool = True,
    side: int = SIDE,
    epochs: int = 1,
    seed: int = 0,
) -> Config:
    return config_from_values(
        {
            "task": f"contrastive(temperature=0.2, exact_batch={str(exact).lower()})",
            "model": size.model,
            "data": {
                "dataset": "stl10(part=train+unlabeled)",
                "path": str(folder),
                "batch_size": size.batch_size,
                "drop_last": True,
                "transform": {"train": VIEWS.format(side=side)},
            },
            "optim": {"lr": 4e-3, "weight_decay": 1e-4, "schedule": "cosine", "warmup": 0.1},
            "speed": {"accumulate": accumulate, "threads": 1, "precision": size.precision},
            "run": {"epochs": epochs, "device": size.device, "seed": seed, "evaluate_every": f"{epochs} epochs"},
        },
        base_dir=".",
    )


def measure_learning(folder: Path, size: Size, *, quick: bool) -> tuple[list[Arm], Target]:
    """Read the accuracy of nearest neighbours by features of the encoder as it is drawn, and as it is trained."""
    n_seeds, epochs = (1, 1) if quick else (6, 10)
    size = dataclasses.replace(size, batch_size=LEARNING_BATCH_SIZE)
    before, after = [], []
    for seed in range(n_seeds):
        config = build_config(folder, size, side=LEARNING_SIDE, epochs=epochs, seed=seed)
        drawn = evaluate(build_run(config, plan_of(config), device=size.device), None)
        assert drawn is not None
        before.append(drawn["knn_accuracy"])
        with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as out_dir:
            after.append(train(config, out_dir=out_dir).metrics["knn_accuracy"])
    note = f"{epochs} epochs in windows of {LEARNING_BATCH_SIZE} × {WINDOW}"
    common = {"case": "learning", "unit_of_replication": "seed"}
    margins = [late - early for early, late in zip(before, after, strict=True)]
    arms = [
        build_arm(before, arm="random encoder", metric="knn_accuracy", note=note, **common),
        build_arm(after, arm="trained encoder", metric="knn_accuracy", note=note, **common),
        build_arm(margins, arm="trained encoder", metric="knn_accuracy_margin", **common),
    ]
    return arms, judge_margins(margins)


def judge_margins(margins: Sequence[float]) -> Target:
    """Hold the mean margin over seeds against its target, by Student's t, as seeds are too few for more."""
    interval = compute_interval(margins) if len(margins) > 1 else (None, None)
    name = "learning: accuracy above the random encoder's, mean"
    return judge(name, statistics.fmean(margins), interval, at_least=MIN_MARGIN)
