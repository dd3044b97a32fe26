"""A small workload with every source of randomness that a resumed run has to bring back, for the tests of training."""

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from fulltilt.config import config_from_values, plan_of
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.loop.train import train
from fulltilt.records import EpochDone, Evaluated, Noted, StepsDone
from fulltilt.tasks import Workload

N_SAMPLES, N_FEATURES, N_CLASSES = 90, 6, 3
CONSTANT = {"optim__schedule": "constant", "optim__warmup": 0}  # what needs no length, so a stream can have it


class Points(Dataset):
    """Three clouds of points; each sample gets noise from torch's global generator, as many datasets do."""

    def __init__(self, n_samples=N_SAMPLES, noise=0.1):
        generator = torch.Generator().manual_seed(1)
        self.targets = torch.arange(n_samples) % N_CLASSES
        centers = torch.randn(N_CLASSES, N_FEATURES, generator=generator)
        self.inputs = centers[self.targets] + 0.5 * torch.randn(n_samples, N_FEATURES, generator=generator)
        self.noise = noise

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        inputs = self.inputs[index]
        return inputs + self.noise * torch.randn(N_FEATURES) if self.noise else inputs, int(self.targets[index])


class PointStream(IterableDataset):
    def __init__(self, noise=0.1):
        self.noise = noise

    def __iter__(self):
        points = Points(noise=self.noise)
        return iter([points[i] for i in range(N_SAMPLES)])


def build_model():
    return nn.Sequential(
        nn.Linear(N_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, N_CLASSES)
    )


def add_noise(batch, generator):
    inputs, targets = batch
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator, device=inputs.device), targets


def is_right(outputs, targets):
    return (outputs.argmax(1) == targets).float()


def build_workload(**changes):
    values = {
        "model": build_model,
        "dataset": Points,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        "validation": lambda: Points(n_samples=31, noise=0),
        "metrics": {"accuracy": is_right},
        "prepare": add_noise,
        "name": "points",
    }
    return Workload(**(values | changes))


def build_config(**changes):
    """``data__batch_size=16`` and so on; two epochs of 90 samples, logged every 2 steps."""
    values = {
        "data": {"batch_size": 16},
        "optim": {"schedule": "cosine", "warmup": 2},
        "run": {"epochs": 2, "device": "cpu", "seed": 3, "log_every_n_steps": 2},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return config_from_values(values, base_dir=".")


def build_cpu_run(config=None, **changes):
    config = config or build_config()
    return build_run(config, plan_of(config), device="cpu", workload=build_workload(**changes))


def fail(error):
    def raise_it(*args):
        raise error

    return raise_it


class Recorder:
    """A listener that keeps every event."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def list_notes(self, words=""):
        return [event.message for event in self.of(Noted) if words in event.message]

    def list_figures(self):
        """What must not depend on interruptions: figures of steps, epochs and evaluations, no times."""
        return (
            [(e.epoch, e.step, e.step_in_epoch, e.n_steps, e.n_samples, e.loss, e.lr) for e in self.of(StepsDone)],
            [(e.epoch, e.step, e.loss, e.metrics) for e in self.of(EpochDone)],
            [(e.epoch, e.step, e.metrics) for e in self.of(Evaluated)],
        )


def run_train(out_dir, config=None, recorder=None, *, workload=None, listeners=(), **options):
    recorder = recorder if recorder is not None else Recorder()
    given = {"listeners": [*listeners, recorder], "workload": workload or build_workload(), **options}
    return train(config or build_config(), out_dir=out_dir, **given), recorder


def read_state(out_dir):
    return torch.load(out_dir / "checkpoint.pt", weights_only=True)


def read_weights(out_dir):
    return read_state(out_dir)["model"]


def read_step(out_dir):
    return read_state(out_dir)["progress"]["step"]


def assert_equal_weights(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
