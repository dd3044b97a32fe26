"""Runs that one rank and two take alike, for the tests of distribution: the functions that the ranks call are here."""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset
from training_cases import N_CLASSES, N_FEATURES, Points, Recorder, build_config, build_workload, run_train

from fulltilt.engine.ranks.world import is_first_rank, is_rank
from fulltilt.records import StepsDone

N_SAMPLES = 91  # in batches of 15: the last one has a single sample, and the second of two ranks none of it


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(17, 17), nn.Tanh()

    def forward(self, x):
        return x + self.act(self.linear(x))


class Net(nn.Module):
    """17 features: sharded weights do not divide evenly. One layer takes no part in any step."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(N_FEATURES, 17), nn.Linear(17, N_CLASSES)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Counting(Net):
    """Its outputs depend on a buffer that every training step changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.n_calls += 1
        return super().forward(x) / (1 + 0.1 * self.n_calls)


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(N_FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, N_CLASSES))


class RankCard(nn.Module):
    """Has no room for more than ``n_rows`` on any rank but the first, from training call ``from_call`` on."""

    def __init__(self, n_rows, from_call):
        super().__init__()
        self.n_rows, self.from_call, self.n_calls = n_rows, from_call, 0

    def forward(self, x):
        self.n_calls += self.training
        if not is_first_rank() and self.n_calls > self.from_call and len(x) > self.n_rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x)} rows.")
        return x


def build_on_card():
    return nn.Sequential(RankCard(4, from_call=5), Net())


class Stream(IterableDataset):
    def __iter__(self):
        points = Points(N_SAMPLES, noise=0)
        return iter([points[i] for i in range(N_SAMPLES)])


def plain_points():
    return Points(N_SAMPLES, noise=0)


def build_plain_workload(**changes):
    """Nothing in it draws a random number, so that it does not matter where a sample is."""
    return build_workload(**({"model": Net, "dataset": plain_points, "prepare": None} | changes))


def build_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


CASES = {
    "plain": ({}, {"optimizer": build_sgd}, {"training_metrics": True}),
    "window": ({"speed__accumulate": 4, "optim__clip_norm": 0.3}, {"optimizer": build_sgd}, {}),
    "changing": ({"speed__static_graph": False, "speed__accumulate": 2, "data__drop_last": True}, {}, {}),
    "bf16": ({"speed__precision": "bf16"}, {}, {}),
    "stream": (
        {"optim__schedule": "constant", "optim__warmup": 0},
        {"dataset": Stream, "optimizer": build_sgd},
        {"max_steps": 14},
    ),
    "average": ({"optim__ema": 0.9}, {"optimizer": build_sgd}, {}),
    "buffers": ({}, {"model": Counting, "optimizer": build_sgd}, {}),
    "sharded": ({"speed__shard": "full", "speed__accumulate": 4, "optim__clip_norm": 0.3}, {}, {}),
}
"""What differs from the plain run: configuration, workload, options of ``train``."""


def run_case(name, folder, device="cpu"):
    changes, workload, options = CASES[name]
    config = build_config(data__batch_size=15, run__device=device, **changes)
    result, recorder = run_train(Path(folder) / name, config, workload=build_plain_workload(**workload), **options)
    return result, recorder.list_figures()


def run_part(folder, *, shard, **options):
    """A part of one run, by however many ranks there are → its logging intervals."""
    config = build_config(data__batch_size=15, speed__shard=shard, speed__accumulate=2, run__epochs=4)
    result, recorder = run_train(folder, config, workload=build_plain_workload(), **options)
    return result.step, [(e.step, e.loss) for e in recorder.of(StepsDone)]


def run_normed(folder):
    """BatchNorm's statistics are of each rank's part, so that this is another run than that of one rank."""
    config = build_config(data__batch_size=15, data__drop_last=True)
    return run_train(folder, config, workload=build_plain_workload(model=Normed))[0].metrics


def run_random(folder, *stops):
    """A run whose every rank draws its own numbers, left at the steps of ``stops`` and taken up again."""
    recorder = Recorder()
    for index, max_steps in enumerate((*stops, None)):
        run_train(folder, recorder=recorder, resume=index > 0, max_steps=max_steps)
    return [(e.step, e.loss) for e in recorder.of(StepsDone)]


def run_stopped(folder):
    """SIGTERM reaches one rank in its fifth step; both have to leave, at the same one."""

    def stop(event):
        if isinstance(event, StepsDone) and event.step >= 5:
            os.kill(os.getpid(), signal.SIGTERM)

    result, _ = run_train(folder, build_config(run__epochs=2000), recorder=stop)
    if not is_first_rank():  # which writes the checkpoint, and may still be at it
        return result.reason, result.step, None
    return result.reason, result.step, torch.load(folder / "checkpoint.pt", weights_only=True)["progress"]["step"]


def run_all(folder):
    """In a rank: every case, the first part of a run that one process ends, and the middle of one that it began."""
    assert is_rank()
    torch.set_num_threads(1)
    folder = Path(folder)
    found = {name: run_case(name, folder) for name in CASES}
    found["begun by two"] = run_part(folder / "begun by two", shard="none", max_steps=5)
    found["divided"] = run_part(folder / "begun by one", shard="full", resume=True, max_steps=11)
    found["normed"] = run_normed(folder / "normed")
    found["random"] = run_random(folder / "whole"), run_random(folder / "cut", 3, 7)
    found["stopped"] = run_stopped(folder / "stopped")
    return found
