"""A training process for the fault tests: ``train_slowly.py OUT_DIR [--resume] [--fast] [--n-weights N] …``.

Prints the step of every logging interval at once, so that a test knows where to strike; ends with the codes of the
command line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from fulltilt.config import config_from_values
from fulltilt.engine.loop.train import train
from fulltilt.errors import FulltiltError
from fulltilt.listeners import CsvLog, EventLog
from fulltilt.records import Event, Noted, Replanned, StepsDone
from fulltilt.tasks import Workload

N_STEPS = 4 * 16  # epochs × steps


QUICK_S, SLOW_S = 0.005, 0.1  # a sample


class SlowPoints(Dataset):
    """``n_quick`` samples a process come quickly, then slowly: who waits for an early step has time to strike."""

    def __init__(self, n_quick: int | None = None):
        self.inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        self.targets = self.inputs[:, :3].argmax(1)
        self.n_quick, self.n_read = n_quick, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.n_quick is not None:
            self.n_read += 1
            time.sleep(QUICK_S if self.n_read <= self.n_quick else SLOW_S)
        return self.inputs[index] + 0.1 * torch.randn(8), self.targets[index]


def build_model(n_weights: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    if n_weights:
        model.register_parameter("ballast", nn.Parameter(torch.zeros(n_weights)))
    return model


def say(event: Event) -> None:
    if isinstance(event, StepsDone):
        print(f"step {event.step} loss {event.loss!r}", flush=True)
    elif isinstance(event, Replanned):
        print(f"replanned {event.batch_size} {event.accumulate}", flush=True)
    elif isinstance(event, Noted):
        print(event.message, flush=True)


class Terminated(BaseException):
    pass


def terminate(number: int, frame: object) -> None:
    raise Terminated


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out_dir")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--n-quick", type=int, default=72)
    parser.add_argument("--n-weights", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--persistent-workers", action="store_true")
    parser.add_argument("--start-method")
    parser.add_argument("--async-checkpoint", action="store_true")
    parser.add_argument("--n-ranks", type=int)
    parser.add_argument("--max-restarts", type=int, default=0)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    if args.start_method:
        multiprocessing.set_start_method(args.start_method)
    run = {"epochs": 4, "device": "cpu", "log_every_n_steps": 2, "checkpoint_every": "5 steps"}
    run |= {name: getattr(args, name) for name in ("async_checkpoint", "n_ranks", "max_restarts")}
    data = {"batch_size": 4, "num_workers": args.num_workers, "persistent_workers": args.persistent_workers}
    config = config_from_values({"data": data, "optim": {"schedule": "cosine"}, "run": run}, base_dir=".")
    workload = Workload(
        model=lambda: build_model(args.n_weights),
        dataset=lambda: SlowPoints(None if args.fast else args.n_quick),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        validation=SlowPoints,
        name="slow",
    )
    try:
        listeners = [CsvLog(args.out_dir), EventLog(args.out_dir), say]
        train(config, out_dir=args.out_dir, listeners=listeners, resume=args.resume, workload=workload)
    except FulltiltError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Terminated:
        return 143
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(main())
