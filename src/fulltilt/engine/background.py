"""Checkpoints beside training: the state is copied to host memory, and a thread writes the copy.

Training waits for the copy only. One write at a time: the next one waits for the one before. A crash leaves what a
crash of a write in the foreground leaves, since both write through ``checkpoint.save_checkpoint``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulltilt.engine.checkpoint import save_checkpoint


@dataclasses.dataclass(kw_only=True)
class Written:
    """How a write ended. ``error`` is what ``save_checkpoint`` raised, None when the file is there."""

    path: Path | None = None
    error: BaseException | None = None
    seconds: float = 0.0


class BackgroundWriter:
    """Writes one checkpoint at a time on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._written = Written()

    @property
    def is_busy(self) -> bool:
        """A write was started whose end ``collect`` has not given yet."""
        return self._thread is not None

    @property
    def is_done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def start(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Copy ``state`` and begin to write the copy. ``collect`` the one before first.

        Cost: host memory of the size of the state, until it is written.

        Device: waits for the copy on a CPU; on a GPU it is queued behind the steps before it.
        """
        if self._thread is not None:
            raise RuntimeError("a checkpoint is being written already: collect() it first")
        copies: dict[tuple[Any, ...], Tensor] = {}
        held = {key: _copy(value, copies) for key, value in state.items()}
        events = mark_arrivals({device for device, *_ in copies})
        self._written = Written()
        # A daemon: a disk that hangs must not keep the program from ending; the old checkpoint is whole until then.
        self._thread = threading.Thread(
            target=self._write, args=(folder, held, events), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def collect(self) -> Written:
        """Wait for the end of the write, and say how it ended."""
        if self._thread is None:
            raise RuntimeError("no checkpoint is being written: start() one first")
        self._thread.join()
        self._thread = None
        return self._written

    def _write(self, folder: Path, state: dict[str, Any], events: Sequence[torch.cuda.Event]) -> None:
        began_s = time.perf_counter()
        try:
            for event in events:
                event.synchronize()
            self._written.path = save_checkpoint(folder, state)
        except BaseException as error:  # the boundary of the thread: ``collect`` hands it on
            self._written.error = error
        self._written.seconds = time.perf_counter() - began_s


def copy_to_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same values in memory that training does not touch; tensors that are one stay one.

    Shape: that of ``state``. Tensors of a GPU come as page-locked ones whose content arrives with the device's queue.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    return {key: _copy(value, copies) for key, value in state.items()}


def mark_arrivals(devices: Iterable[torch.device]) -> list[torch.cuda.Event]:
    """One event per GPU, behind the copies that were queued there: on its own stream, whichever device is current."""
    events = []
    for device in devices:
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
    return events


def _copy(value: Any, copies: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if not value.numel() or place not in copies:
            copies[place] = _copy_tensor(value)
        return copies[place]
    if isinstance(value, Mapping):
        return {key: _copy(item, copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [_copy(item, copies) for item in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _copy_tensor(value: Tensor) -> Tensor:
    if not value.is_cuda:
        return value.clone()
    host = torch.empty_like(value, device="cpu", pin_memory=True)
    return host.copy_(value, non_blocking=True)
