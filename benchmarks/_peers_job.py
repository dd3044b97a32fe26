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
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fulltilt.data import build_loader
from fulltilt.measure import apply_memory_limit
from fulltilt.records import Evidence, Status, classify_outcome
from fulltilt.tasks import Workload


@dataclasses.dataclass(kw_only=True, slots=True)
class Attempt:
    """One batch size, as far as it got."""

    batch_size: int  # that of the loader
    largest_step: int = 0  # samples of the largest step that ended: forward, backward and update
    status: Status = "error"  # until it ends
    said: str | None = None  # the error that ended it

    def count_step(self, n_samples: int) -> None:
        self.largest_step = max(self.largest_step, n_samples)

    def fail(self, error: BaseException) -> None:
        evidence = Evidence(exception_type=type(error).__name__, message=str(error))
        status, said = classify_outcome(evidence)
        self.status, self.said = status, (said or "").splitlines()[0]


class Job:
    """A workload on a device, for a few steps at a batch size that a finder chooses."""

    def __init__(
        self, workload: Workload, *, device: str, n_steps: int, on_attempt: Callable[[Job], None] | None = None
    ):
        self.workload, self.device, self.n_steps = workload, torch.device(device), n_steps
        self.on_attempt = on_attempt  # called when one begins: the process may not live to its end
        self.dataset = workload.dataset()
        self.attempts: list[Attempt] = []

    def open_attempt(self, batch_size: int) -> Attempt:
        attempt = Attempt(batch_size=batch_size)
        self.attempts.append(attempt)
        if self.on_attempt is not None:
            self.on_attempt(self)
        return attempt

    @contextlib.contextmanager
    def watch(self) -> Iterator[Attempt]:
        """Notes with which error the running attempt failed, and hands the error on."""
        attempt = self.attempts[-1]
        try:
            yield attempt
        except Exception as error:  # whatever it is, it belongs to the record; the finder decides what to make of it
            attempt.fail(error)
            raise

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.workload.model().train()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert self.workload.optimizer is not None
        return self.workload.optimizer(model.parameters())

    def build_loader(self, batch_size: int) -> DataLoader:
        """The loader of every finder; the tuner's trials build this one by themselves."""
        return build_loader(self.dataset, batch_size=batch_size, shuffle=True, drop_last=False, seed=0)

    def run_steps(self, batch_size: int, prepare: Callable[..., tuple] | None = None) -> None:
        """A model built anew, trained for ``n_steps`` by a hand-written loop; passes begin again where data is short.

        Args:
            prepare: ``(model, optimizer, loader) -> the same three``, as Accelerate has it.
        """
        self.open_attempt(batch_size)
        with self.watch() as attempt:
            model = self.build_model().to(self.device)
            parts = model, self.build_optimizer(model), self.build_loader(batch_size)
            model, optimizer, loader = prepare(*parts) if prepare else parts
            batches = itertools.chain.from_iterable(itertools.repeat(loader))
            for inputs, targets in itertools.islice(batches, self.n_steps):
                self._step(model, optimizer, inputs.to(self.device), targets.to(self.device))
                attempt.count_step(len(targets))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            attempt.status = "ok"

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
        self.workload.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def limit_memory(device: torch.device, room_bytes: int) -> None:
    """From here on this process can take ``room_bytes`` more, and no byte of slack: on a CPU more than it has mapped
    now, on a GPU that much of the device.

    Call it after a first step: threads and libraries are loaded then and do not count.
    """
    if device.type == "cuda":
        apply_memory_limit(device, room_bytes)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_mapped_bytes() + room_bytes, hard))


def read_mapped_bytes() -> int:
    """Private writable memory that is mapped, touched or not: what ``RLIMIT_DATA`` counts."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) * 1024
