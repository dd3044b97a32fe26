"""Checkpoints beside training: the state is copied to host memory, and a thread writes the copy.

Training waits for the copy only. Its memory is kept from one checkpoint to the next, because new memory costs a page
fault wherever it is first written. One write at a time: the next one waits for the one before. A crash leaves what a
crash of a write in the foreground leaves, since both write through ``checkpoint.save_checkpoint``.
"""

import dataclasses
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulltilt.engine.checkpoints.checkpoint import save_checkpoint
from fulltilt.levers.thread_affinity import leave_core

Keys = tuple[Any, ...]
"""Keys and positions that lead to a tensor of a state."""
Layout = tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]]


@dataclasses.dataclass(kw_only=True)
class Written:
    """How a write ended."""

    path: Path | None = None
    error: BaseException | None = None  # what ``save_checkpoint`` raised; None when the file is there
    seconds: float = 0.0  # of the write itself
    stall_s: float = 0.0  # until training could go on beside it; all of a write in the foreground
    waited_s: float = 0.0  # that training stood still later, for its end


class HostCopies:
    """Copies states to host memory, each into the memory of the one before where layouts are equal."""

    def __init__(self) -> None:
        self._kept: dict[Keys, tuple[Layout, Tensor]] = {}

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the values into memory that training does not touch; tensors that are one stay one.

        The copy before has to be done with: it is written over.

        Shape: that of ``state``. Tensors of a GPU come as page-locked ones whose content arrives with its queue.

        Raises:
            RuntimeError or MemoryError: host memory holds no copy; nothing is kept then.
        """
        before, self._kept = self._kept, {}
        kept: dict[Keys, tuple[Layout, Tensor]] = {}
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copy_tensor(value: Tensor, keys: Keys) -> Tensor:
            layout = (value.device, value.dtype, value.shape, value.stride())
            place = (value.data_ptr(), *layout)
            if value.numel() and place in copies:
                return copies[place]
            kept_layout, host = before.pop(keys, (None, None))
            if host is None or kept_layout != layout:
                host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            kept[keys] = (layout, host)
            copies[place] = host.copy_(value, non_blocking=value.is_cuda)
            return host

        def copy_nested(value: Any, keys: Keys) -> Any:
            if isinstance(value, Tensor):
                return copy_tensor(value.detach(), keys)
            if isinstance(value, Mapping):
                return {key: copy_nested(item, (*keys, key)) for key, item in value.items()}
            if isinstance(value, list | tuple):
                parts = [copy_nested(item, (*keys, i)) for i, item in enumerate(value)]
                return parts if isinstance(value, list) else tuple(parts)
            return value

        copied = copy_nested(state, ())
        self._kept = kept
        return copied

    @property
    def devices(self) -> set[torch.device]:
        """Where the newest copy came from."""
        return {layout[0] for layout, _ in self._kept.values()}


class BackgroundWriter:
    """Writes one checkpoint at a time on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._written = Written()
        self._copies = HostCopies()

    @property
    def is_busy(self) -> bool:
        """Whether a write was started whose end ``collect`` has not given yet."""
        return self._thread is not None

    @property
    def is_done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def start(self, folder: Path, state: Mapping[str, Any], *, began_s: float | None = None) -> None:
        """Copy ``state``, for which training stopped at ``began_s`` or now, and begin to write the copy.

        Cost: host memory of the size of the state, kept for the next one.

        Device: waits for the copy on a CPU; on a GPU it is queued behind the steps before it.
        """
        if self._thread is not None:
            raise RuntimeError("a checkpoint is being written already: collect() it first")
        began_s = time.perf_counter() if began_s is None else began_s
        held = self._copies.copy(state)
        events = mark_arrivals(self._copies.devices)
        self._written = Written()
        # A daemon: a disk that hangs must not keep the program from ending; the old checkpoint is whole until then.
        write = threading.Thread(target=self._write, args=(folder, held, events), name="checkpoint-writer", daemon=True)
        self._thread = write
        write.start()
        self._written.stall_s = time.perf_counter() - began_s

    def collect(self) -> Written:
        """Wait for the end of the write, and return how it ended."""
        if self._thread is None:
            raise RuntimeError("no checkpoint is being written: start() one first")
        if self._thread.is_alive():
            began_s = time.perf_counter()
            self._thread.join()
            self._written.waited_s = time.perf_counter() - began_s
        self._thread = None
        return self._written

    def _write(self, folder: Path, state: dict[str, Any], events: Iterable[torch.cuda.Event]) -> None:
        began_s = time.perf_counter()
        leave_core()  # of the thread that trains, where that is pinned
        try:
            for event in events:
                event.synchronize()
            self._written.path = save_checkpoint(folder, state)
        except BaseException as error:  # the boundary of the thread: ``collect`` hands it on
            self._written.error = error
        self._written.seconds = time.perf_counter() - began_s


def mark_arrivals(devices: Iterable[torch.device]) -> list[torch.cuda.Event]:
    """Record one event per GPU behind the copies that are queued there, on its own current stream."""
    events = []
    for device in devices:
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
    return events
