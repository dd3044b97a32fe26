"""The loops that ``loop_overhead`` compares train the same model on the same data with the same loader and optimizer.

Every block is one call of what a user would call, on a model built anew. Its weights lie where those of the block
before lay, and the process keeps the memory that a step frees: where a block happens to lie moves a step of 1 ms by
more than the loops do, and is of no loop's making. Time is taken by the dataset, when it is asked for the batches at
either end of the timed steps: the same two reads in every loop, whatever hooks it has. Loops that fetch a batch ahead
do so at both ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import io
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks._runner import silence_peers
from fulltilt.config import config_from_values
from fulltilt.data import build_loader
from fulltilt.engine.loop.train import train
from fulltilt.levers.retain_freed_memory import RETAINING, find_obstacle
from fulltilt.tasks import Workload

N_FEATURES = 64
N_CLASSES = 10
N_HIDDEN_LAYERS = 4
LIGHTNING_REFRESH_STEPS = 10  # its default of 1 draws at every step; ours reads its figures every 10
SPARE_STEPS = 4  # behind the timed ones: loops that fetch ahead need batches to fetch
NEVER = {"evaluate_every": None, "checkpoint_every": None}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and a batch of one size, and how many steps make a block."""

    name: str
    width: int
    batch_size: int
    n_warmup: int
    n_steps: int
    device: str = "cpu"

    @property
    def n_samples(self) -> int:
        return (self.n_warmup + self.n_steps + SPARE_STEPS) * self.batch_size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Mean time of a step over the timed steps of one run."""

    wall_us: float
    cpu_us: float  # user and system time of the process: without what other processes took from it
    waits: float  # times the process gave the core back by itself


class Mark(NamedTuple):
    wall_s: float
    cpu_s: float
    n_waits: int


def read_mark(device: str) -> Mark:
    """Read the clocks, once the device has done what it was given: on a GPU a loop is ahead of its steps."""
    if device != "cpu":
        torch.cuda.synchronize()
    return Mark(time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw)


class MarkedRows(Dataset):
    """Rows in memory that read the clocks when batch ``first`` and batch ``last`` are asked for, counted from 0."""

    def __init__(self, inputs: Tensor, targets: Tensor, *, batch_size: int, first: int, last: int, device: str = "cpu"):
        self.batch_size = batch_size
        self.device = device  # of the model; every loop copies its batches there
        self._inputs, self._targets = inputs, targets
        self._first, self._last = first, last
        self._n_asked = 0
        self.marks: list[Mark] = []

    def __len__(self) -> int:
        return len(self._inputs)

    def get_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self._n_asked == self._first or self._n_asked == self._last:
            self.marks.append(read_mark(self.device))
        self._n_asked += 1
        return self._inputs[indices], self._targets[indices]


def build_model(width: int) -> nn.Module:
    """Build an MLP; of width 0 one layer, the smallest step there is."""
    if not width:
        return nn.Sequential(nn.Linear(N_FEATURES, N_CLASSES))
    layers: list[nn.Module] = [nn.Linear(N_FEATURES, width), nn.ReLU()]
    for _ in range(N_HIDDEN_LAYERS - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, N_CLASSES))


_HOMES: dict[tuple[int, int], Tensor] = {}
"""(width, number of the parameter) → the memory that it lies in, in every block of this process."""


def move_home(model: nn.Module, width: int) -> nn.Module:
    """Put the weights where those of the models of this width before it lay."""
    for number, parameter in enumerate(model.parameters()):
        home = _HOMES.setdefault((width, number), torch.empty_like(parameter.data))
        home.copy_(parameter.data)
        parameter.data = home
    return model


def may_keep_memory(device: str) -> bool:
    return device == "cpu" and find_obstacle() is None


def keep_freed_memory(device: str) -> None:
    """Have glibc keep what tensors free, for all arms alike, as ``speed.retain_freed_memory`` does for a run."""
    if may_keep_memory(device):
        libc = ctypes.CDLL(None)
        for parameter, value in RETAINING.items():
            libc.mallopt(parameter, value)


def is_right(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the metric of the arms that have one, a figure for each sample."""
    return (logits.argmax(1) == targets).float()


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def build_shared_loader(dataset: MarkedRows) -> DataLoader:
    """Build the loader of every arm; fulltilt's engine builds this one by itself."""
    return build_loader(dataset, batch_size=dataset.batch_size, shuffle=True, drop_last=False, seed=0)


def fetch_batches(dataset: MarkedRows) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield batches on the dataset's device; on a CPU return the loader itself, so that nothing is added to a step."""
    loader, device = build_shared_loader(dataset), dataset.device
    if device == "cpu":
        return loader
    return ((inputs.to(device), targets.to(device)) for inputs, targets in loader)


def run_by_hand(model: nn.Module, dataset: MarkedRows) -> None:
    model.to(dataset.device)
    optimizer = build_optimizer(model.parameters())
    for inputs, targets in fetch_batches(dataset):
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run_fulltilt(model: nn.Module, dataset: MarkedRows, *, with_listeners: bool = False) -> None:
    config = config_from_values(
        {
            "data": {"batch_size": dataset.batch_size},
            # False would turn it off, for the blocks after this one too.
            "speed": {"threads": torch.get_num_threads(), "retain_freed_memory": may_keep_memory(dataset.device)},
            "run": {"epochs": 1, "device": dataset.device, "seed": 0} | NEVER,
        },
        base_dir=".",
    )
    workload = Workload(
        model=lambda: model,
        dataset=lambda: dataset,
        loss=functional.cross_entropy,
        optimizer=build_optimizer,
        metrics={"accuracy": is_right},
    )
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        listeners = build_listeners(Path(folder)) if with_listeners else ()
        train(config, out_dir=folder, listeners=listeners, workload=workload, training_metrics=with_listeners)


def build_listeners(folder: Path) -> tuple[Callable[[Any], None], ...]:
    """Build those of ``fulltilt train``; the bar draws on a terminal that nobody sees."""
    from rich.console import Console

    from fulltilt.listeners import CsvLog, EventLog, ProgressBar

    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    return CsvLog(folder), EventLog(folder), ProgressBar(console)


def _build_lightning_module(model: nn.Module, *, with_metric: bool = False) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = batch
            logits = self.model(inputs)
            if with_metric:
                self.log("accuracy", is_right(logits.detach(), targets).mean())
            return functional.cross_entropy(logits, targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self.model.parameters())

    return Module()


def run_lightning(model: nn.Module, dataset: MarkedRows) -> None:
    import lightning

    trainer = lightning.Trainer(
        accelerator=dataset.device, devices=1, max_epochs=1, barebones=True, use_distributed_sampler=False
    )
    trainer.fit(_build_lightning_module(model), build_shared_loader(dataset))


def run_lightning_listening(model: nn.Module, dataset: MarkedRows) -> None:
    """Turn on what ``fulltilt train`` has on, as far as Lightning has it; its bar draws where nobody sees it, too."""
    import lightning
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    # The bar takes sys.stdout as it is when training starts.
    with tempfile.TemporaryDirectory(prefix="lightning-bench-") as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = lightning.Trainer(
            accelerator=dataset.device,
            devices=1,
            max_epochs=1,
            logger=CSVLogger(folder),
            callbacks=[TQDMProgressBar(refresh_rate=LIGHTNING_REFRESH_STEPS)],
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(_build_lightning_module(model, with_metric=True), build_shared_loader(dataset))


def run_fabric(model: nn.Module, dataset: MarkedRows) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=dataset.device, devices=1)
    wrapped, optimizer = fabric.setup(model, build_optimizer(model.parameters()))
    moves = dataset.device != "cpu"
    loader = fabric.setup_dataloaders(build_shared_loader(dataset), use_distributed_sampler=False, move_to_device=moves)
    for inputs, targets in loader:
        loss = functional.cross_entropy(wrapped(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def run_accelerate(model: nn.Module, dataset: MarkedRows) -> None:
    from accelerate import Accelerator

    is_cpu = dataset.device == "cpu"
    accelerator = Accelerator(cpu=is_cpu, device_placement=not is_cpu)
    wrapped, optimizer, loader = accelerator.prepare(
        model, build_optimizer(model.parameters()), build_shared_loader(dataset)
    )
    for inputs, targets in loader:
        loss = functional.cross_entropy(wrapped(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()


REFERENCE = "hand-written"
AGAIN = "hand-written again"
OURS = "fulltilt"
OURS_LISTENING = "fulltilt with metrics, CSV and progress"
LIGHTNING_LISTENING = "lightning with a metric, CSV and progress"


class Loop(NamedTuple):
    """An arm: what trains a model on a dataset, its settings, and the package of another library that it needs."""

    run: Callable[[nn.Module, MarkedRows], None]
    note: str
    package: str | None = None


LOOPS: Mapping[str, Loop] = {
    REFERENCE: Loop(
        run_by_hand, "for inputs, targets in loader: forward, backward, step, zero_grad; the loss is never read"
    ),
    AGAIN: Loop(run_by_hand, "the reference against itself: what the method calls a difference when there is none"),
    OURS: Loop(
        run_fulltilt,
        "engine.train.train with no listener; keeps the loss, reads it every 10 steps, sets the learning rate",
    ),
    OURS_LISTENING: Loop(
        functools.partial(run_fulltilt, with_listeners=True),
        "the same with what `fulltilt train` has on, CSV, event log, progress bar on a terminal, and with accuracy "
        "over all training samples (training_metrics); rows are stored once a second and the bar is drawn twice a "
        "second, so its blocks last two seconds",
    ),
    "lightning": Loop(
        run_lightning,
        "Trainer(barebones=True): "
        "https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.trainer.trainer.Trainer.html",
        "lightning",
    ),
    LIGHTNING_LISTENING: Loop(
        run_lightning_listening,
        f"CSVLogger, TQDMProgressBar(refresh_rate={LIGHTNING_REFRESH_STEPS}), self.log of the batch's accuracy in "
        "every step, log_every_n_steps at its 50, no checkpoints, no model summary: "
        "https://lightning.ai/docs/pytorch/stable/extensions/logging.html, .../common/progress_bar.html",
        "lightning",
    ),
    "fabric": Loop(
        run_fabric,
        "setup, setup_dataloaders(move_to_device=False on a CPU), backward: "
        "https://lightning.ai/docs/fabric/stable/fundamentals/convert.html",
        "lightning",
    ),
    "accelerate": Loop(
        run_accelerate,
        "Accelerator(device_placement=False on a CPU), prepare, backward: "
        "https://huggingface.co/docs/accelerate/package_reference/accelerator",
        "accelerate",
    ),
}


def measure_block(arm: str, case: Case) -> Block:
    """Train a new model by one loop and return what a step took. Cost: the whole run, warm-up included."""
    torch.manual_seed(0)
    dataset = MarkedRows(
        torch.randn(case.n_samples, N_FEATURES),
        torch.randint(N_CLASSES, (case.n_samples,)),
        batch_size=case.batch_size,
        first=case.n_warmup,
        last=case.n_warmup + case.n_steps,
        device=case.device,
    )
    with silence_peers():
        LOOPS[arm].run(move_home(build_model(case.width), case.width), dataset)
    if len(dataset.marks) != 2:
        raise RuntimeError(f"{arm} asked for too few batches: {len(dataset.marks)} of 2 marks were passed")
    start, end = dataset.marks
    return Block(
        wall_us=1e6 * (end.wall_s - start.wall_s) / case.n_steps,
        cpu_us=1e6 * (end.cpu_s - start.cpu_s) / case.n_steps,
        waits=(end.n_waits - start.n_waits) / case.n_steps,
    )


def calibrate_batch_size(target_ms: float, *, width: int, n_tries: int = 5, device: str = "cpu") -> int:
    """Find the batch size, a multiple of 8, at which a step of the hand-written loop takes about ``target_ms``.

    The time is that of a core, on a GPU that of the wall clock. The batch grows and not the model: weights and the
    optimizer's state stay in the cache, where neighbours on the machine disturb a step least.
    """
    low, high = 1, 512  # in units of 8
    while low < high:
        middle = (low + high) // 2
        n_steps = max(5, round(20 / target_ms))
        case = Case(name="calibration", width=width, batch_size=8 * middle, n_warmup=3, n_steps=n_steps, device=device)
        blocks = [measure_block(REFERENCE, case) for _ in range(n_tries)]
        # The fastest try: what slows a short block down is never the block.
        fastest_us = min(block.cpu_us if device == "cpu" else block.wall_us for block in blocks)
        low, high = (middle + 1, high) if fastest_us < 1000 * target_ms else (low, middle)
    return 8 * low


def load_loops() -> tuple[list[str], list[str]]:
    """Import peers, before anything is timed and before their loggers are turned down; return ours, and theirs."""
    packages = {loop.package for loop in LOOPS.values() if loop.package and importlib.util.find_spec(loop.package)}
    for package in packages:
        importlib.import_module(package)
    ours = [name for name, loop in LOOPS.items() if loop.package is None]
    return ours, [name for name, loop in LOOPS.items() if loop.package in packages]
