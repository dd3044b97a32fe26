"""Measure the peak memory of a span of training: the allocator's on a GPU, the process tree's on the host.

On the host the peak is ``standalone_bytes`` of this process and its data workers (see ``hardware.process_memory``).
PSS would depend on who else runs: a trial shares pages with the process it was forked from. ``ru_maxrss`` is of no use
either: a forked child starts with its parent's peak.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Mapping

import torch

from fulltilt.hardware import (
    read_process_tree,
    read_process_tree_memory,
    read_rss_bytes,
    read_status_bytes,
    reset_peak_rss,
)
from fulltilt.levers.thread_affinity import leave_core

_GIB = 2**30
_GROWTH = 1.005  # a rise of the resident set below 0.5 % does not call for a full reading
_GROWTH_DUTY = 0.1  # share of one core that sampling may take while memory grows
_IDLE_DUTY = 0.01  # and while it does not: once for looking often, once for looking closely


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeaks:
    """Peaks between ``start`` and ``stop``. A figure that the device does not have is ``None``, with the reason."""

    allocated_peak_gib: float | None  # live tensors
    reserved_peak_gib: float | None  # what the caching allocator took from the device
    rss_peak_gib: float | None  # host memory of the process tree, as it would need it on its own
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def device_peak_gib(self) -> float:
        """The peak that counts on this device: what the allocator reserved on a GPU, the process tree's on a CPU."""
        return (self.reserved_peak_gib if self.reserved_peak_gib is not None else self.rss_peak_gib) or 0.0


def join_peaks(spans: Mapping[str, MemoryPeaks]) -> tuple[MemoryPeaks, str]:
    """Join the peaks of several spans, and name the fullest one by the device's memory.

    A span that is fuller by less than half a per cent counts as full as the one before.
    """
    fullest_gib = max(peaks.device_peak_gib for peaks in spans.values())
    fullest = next(name for name, peaks in spans.items() if peaks.device_peak_gib * _GROWTH >= fullest_gib)
    figures = ("allocated_peak_gib", "reserved_peak_gib", "rss_peak_gib")
    found = {name: [getattr(peaks, name) for peaks in spans.values()] for name in figures}
    joined = {name: None if None in values else max(values) for name, values in found.items()}
    return dataclasses.replace(spans[fullest], **joined), fullest


class MemoryMeter:
    """Measures peaks from ``start()`` to ``stop()``; afterwards it may start again.

    The peak of this process is exact where the kernel keeps it. Data workers are sampled every ``interval_s``, with a
    full reading when they grew. Sampling takes below 2 % of one core in steady state and below 11 % while memory grows,
    so a peak that a worker holds for less than 0.1 s may be missed.

    **Device**: reads counters of the allocator on the host, does not synchronise.

    Args:
        device: The device trained on.
        interval_s: Pause between two samples, longer when one takes long.
    """

    def __init__(self, device: torch.device | str, interval_s: float = 0.02):
        self._device = torch.device(device)
        self._interval_s = interval_s
        self._halt = threading.Event()
        self._peak_bytes = 0
        self._kernel_keeps_peak = False
        self.own_peak_gib: float | None = None  # of this process by itself, once stopped; None where nobody keeps it

    def start(self) -> None:
        """Begin a new span."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._kernel_keeps_peak = reset_peak_rss()
        self._peak_bytes = 0
        self._halt.clear()
        self._thread = threading.Thread(target=self._sample, name="memory-meter", daemon=True)
        self._thread.start()

    def stop(self) -> MemoryPeaks:
        """End sampling and return the peaks of the span."""
        self._halt.set()
        self._thread.join()
        own_peak_bytes = (read_status_bytes("VmHWM") or 0) if self._kernel_keeps_peak else 0
        self.own_peak_gib = own_peak_bytes / _GIB or None
        rss_peak_gib = max(self._peak_bytes, own_peak_bytes) / _GIB
        if self._device.type == "cuda":
            return MemoryPeaks(
                allocated_peak_gib=torch.cuda.max_memory_allocated(self._device) / _GIB,
                reserved_peak_gib=torch.cuda.max_memory_reserved(self._device) / _GIB,
                rss_peak_gib=rss_peak_gib,
            )
        reasons = dict.fromkeys(
            ("memory_allocated_peak_gib", "memory_reserved_peak_gib"), "torch keeps no allocator statistics on a CPU"
        )
        return MemoryPeaks(
            allocated_peak_gib=None, reserved_peak_gib=None, rss_peak_gib=rss_peak_gib, null_reasons=reasons
        )

    def _sample(self) -> None:
        """Look at the resident sets often, and closely when they grew.

        Costs are CPU time of this thread: on a busy machine wall time would stretch the pauses for nothing.
        """
        leave_core()  # of the thread that trains, where that is pinned
        pid, tree, largest_bytes, may_look_s, must_look_s, pause_s = os.getpid(), (), 0, 0.0, 0.0, 0.0
        while True:
            done = self._halt.wait(pause_s)
            began_s = time.thread_time()
            seen, tree = tree, read_process_tree(pid, search_session=False)
            rss_bytes = sum(read_rss_bytes(member) or 0 for member in tree)
            glance_s = time.thread_time() - began_s
            now_s = time.monotonic()
            grown = tree != seen or rss_bytes > largest_bytes * _GROWTH
            if done or now_s >= must_look_s or (grown and now_s >= may_look_s):
                self._peak_bytes = max(self._peak_bytes, read_process_tree_memory(pid).standalone_bytes)
                largest_bytes = rss_bytes
                look_s = time.thread_time() - began_s - glance_s
                may_look_s = time.monotonic() + look_s / _GROWTH_DUTY
                # Copies of shared pages raise the figure while the resident sets stay the same.
                must_look_s = time.monotonic() + look_s / _IDLE_DUTY
            if done:
                return
            pause_s = max(self._interval_s, glance_s / _IDLE_DUTY)
