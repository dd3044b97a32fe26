"""Measure time, phases, memory, utilisation, FLOPs and roofs of a device. Names load on first use."""

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

# ruff: noqa: F401

if TYPE_CHECKING:
    from fulltilt.measure.blocks import Block
    from fulltilt.measure.clock import Clock, CudaClock, FakeClock, HostClock
    from fulltilt.measure.fake_memory import FakePeak, estimate_memory
    from fulltilt.measure.flops import Flops, count_flops
    from fulltilt.measure.limit import apply_memory_limit, find_memory_limit_bytes
    from fulltilt.measure.memory import MemoryMeter, MemoryPeaks, join_peaks
    from fulltilt.measure.phase_timer import NullTimer, PhaseTimer, StepSample, check_closure, summarize_phases
    from fulltilt.measure.roofs import measure_roofs
    from fulltilt.measure.steps import StepsResult, measure_steps
    from fulltilt.measure.utilization import UtilizationSampler

_HOMES = {
    "blocks": ("Block",),
    "clock": ("Clock", "CudaClock", "FakeClock", "HostClock"),
    "fake_memory": ("FakePeak", "estimate_memory"),
    "flops": ("Flops", "count_flops"),
    "limit": ("apply_memory_limit", "find_memory_limit_bytes"),
    "memory": ("MemoryMeter", "MemoryPeaks", "join_peaks"),
    "phase_timer": ("NullTimer", "PhaseTimer", "StepSample", "check_closure", "summarize_phases"),
    "roofs": ("measure_roofs",),
    "steps": ("StepsResult", "measure_steps"),
    "utilization": ("UtilizationSampler",),
}

__getattr__, __dir__ = load_on_use(__name__, _HOMES)
__all__ = __dir__()
