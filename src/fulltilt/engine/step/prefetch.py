"""Copies batches to the device ahead of the step, on a stream of their own, so that copies run beside compute.

A second stream needs three precautions:

- The step must not read a batch before it has arrived: its stream waits for the copy's event, the host does not.
- The allocator must not hand out a batch's memory while kernels of the step are still to read it: each tensor is
  recorded on the step's stream.
- The page-locked source must not be freed while the copy still reads it: it is held until the copy's event has
  happened, which is asked and never waited for.

Source: CUDA programming guide, stream and event management; torch's notes on ``Tensor.record_stream``.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fulltilt.measure.nested import list_tensors


class CudaLane:
    """Copies batches on a stream of a GPU beside the one that the step runs on, by ``TrainStep.place``."""

    def __init__(self, device: torch.device, place: Callable[[Any], Any]):
        self._device, self._place = device, place
        self._stream = torch.cuda.Stream(device)

    def copy(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Return the batch on the device, and the event behind its copy."""
        with torch.cuda.stream(self._stream):
            placed = self._place(batch)
            event = torch.cuda.Event()
            event.record(self._stream)
        return placed, event

    def hand_over(self, batch: Any, event: torch.cuda.Event) -> None:
        """Let the step's stream wait for ``event``, and record that the step uses the batch's memory."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in list_tensors(batch):
            if tensor.is_cuda:
                tensor.record_stream(current)


class Prefetcher(Iterator[Any]):
    """Yields the batches of an iterator on the device, the next one on its way while one is used.

    Args:
        batches: In host memory, page-locked for copies that do not block.
        lane: Where copies run; in tests one that can be held back.
        look: Shown each batch before it is copied.
    """

    def __init__(self, batches: Iterator[Any], lane: CudaLane, look: Callable[[Any], None] | None = None):
        self._batches, self._lane, self._look = batches, lane, look
        self._next: tuple[Any, torch.cuda.Event] | None = None
        self._sources: deque[tuple[Any, torch.cuda.Event]] = deque()
        self._is_started = False

    def __next__(self) -> Any:
        """Return the next batch, once the copy of the one behind it is enqueued.

        Device: enqueues a copy and a wait between two streams; the host waits for the loader only.
        """
        if not self._is_started:
            self._is_started = True
            self._next = self._fetch()
        current = self._next
        if current is None:
            raise StopIteration
        self._lane.hand_over(*current)
        self._next = self._fetch()
        return current[0]

    def _fetch(self) -> tuple[Any, torch.cuda.Event] | None:
        while self._sources and self._sources[0][1].query():
            self._sources.popleft()
        for batch in self._batches:
            if self._look is not None:
                self._look(batch)
            placed, event = self._lane.copy(batch)
            self._sources.append((batch, event))
            return placed, event
        return None
