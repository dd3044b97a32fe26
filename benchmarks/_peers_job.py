"""The training job that a peer's finder runs again and again, and a record of what it ran.

What was tried, what ended, and with which words it failed is seen from inside the training step: a finder's own word
for what it did is not taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from fulltilt.data import build_loader
from fulltilt.measure import apply_memory_limit
from fulltilt.records import Evidence, Status, classify_outcome
from fulltilt.tasks import Workload


@dataclasses.dataclass(kw_only=True, slots=True)
class Attempt:
    """One batch size that was tried, as far as it got."""

    batch_size: int  # that of the loader
    largest_step: int = 0  # samples of the largest step that ended: forward, backward and update
    status: Status = "error"  # until it ends
    said: str | None = None  # the error that ended it

    def count_step(self, n_samples: int) -> None:
        self.largest_step = max(self.largest_step, n_samples)


class Job:
    """A workload on a device, for a few steps at a batch size that a finder chooses."""

    def __init__(
        self, workload: Workload, *, device: str, n_steps: int, on_attempt: Callable[[Job], None] = lambda job: None
    ):
        self.workload, self.device, self.n_steps = workload, torch.device(device), n_steps
        self.on_attempt = on_attempt  # called when one begins: the process may not live to its end
        self.dataset = workload.dataset()
        self.attempts: list[Attempt] = []

    def open_attempt(self, batch_size: int) -> None:
        self.attempts.append(Attempt(batch_size=batch_size))
        self.on_attempt(self)

    @contextlib.contextmanager
    def watch(self) -> Iterator[Attempt]:
        """Note with which error the running attempt failed, and hand the error on."""
        attempt = self.attempts[-1]
        try:
            yield attempt
        except Exception as error:  # whatever it is, it belongs to the record; the finder decides what to make of it
            evidence = Evidence(exception_type=type(error).__name__, message=str(error))
            attempt.status, said = classify_outcome(evidence)
            attempt.said = (said or "").splitlines()[0]
            raise

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.workload.model().train()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert self.workload.optimizer is not None
        return self.workload.optimizer(model.parameters())

    def build_loader(self, batch_size: int) -> DataLoader:
        """Build the loader of every finder; the tuner's trials build this one by themselves."""
        return build_loader(self.dataset, batch_size=batch_size, shuffle=True, drop_last=False, seed=0)

    def run_steps(self, batch_size: int, prepare: Callable[..., tuple] = lambda *parts: parts) -> None:
        """Train a new model for ``n_steps`` by a hand-written loop; passes begin again where data is short.

        Args:
            prepare: ``(model, optimizer, loader) -> the same three``, as Accelerate has it.
        """
        self.open_attempt(batch_size)
        with self.watch() as attempt:
            model = self.build_model().to(self.device)
            model, optimizer, loader = prepare(model, self.build_optimizer(model), self.build_loader(batch_size))
            batches = itertools.chain.from_iterable(itertools.repeat(loader))
            for inputs, targets in itertools.islice(batches, self.n_steps):
                self.workload.loss(model(inputs.to(self.device)), targets.to(self.device)).backward()
                optimizer.step()
                optimizer.zero_grad()
                attempt.count_step(len(targets))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            attempt.status = "ok"


def limit_memory(device: torch.device, room_bytes: int) -> None:
    """Let this process take ``room_bytes`` more and no byte of slack: than it has mapped on a CPU, of a GPU's memory.

    Call it after a first step: threads and libraries are loaded then and do not count. ``RLIMIT_DATA`` counts private
    writable memory that is mapped, touched or not, which is ``VmData``.
    """
    if device.type == "cuda":
        apply_memory_limit(device, room_bytes)
        return
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped_bytes = int(fields["VmData"].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (mapped_bytes + room_bytes, hard))
