"""One case of ``memory_prediction``: its fake peaks, and its real peaks at batches that double until one is predicted.

A search does not probe like this. Its real points are the probes of the device that it makes for speed, few of them
far below the largest batch that fits; here they are kept small, so that the prediction has far to go.

The real peak on a CPU is what torch's allocator handed out and had not got back, from the building of the model on:
``torch.profiler`` hears of every allocation and release from the allocator itself, scratch inside operators included,
and knows nothing of fake tensors, dispatch or storages. The resident set would add libraries, malloc's arenas and
pages touched earlier, 0.3 GiB and more that vary from run to run and would drown errors of the size looked for. On a
GPU it is ``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks._memory_cases import Case, build_cases
from fulltilt.engine import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.levers import default_plan
from fulltilt.measure import NullTimer
from fulltilt.measure.fake_memory import estimate_memory
from fulltilt.tuner.search.model.memory import SETTLED_PCT, TELLING_SHARE, MemoryCurve

_GIB = 2**30


def probe(name: str, device: str) -> dict[str, Any]:
    """Estimate, measure small batches by doubling, and measure what was to be predicted.

    Returns:
        ``fake`` and ``real`` peaks in GiB by batch size, the batches ``probed``, the seconds of each estimate.
    """
    torch.set_num_threads(1)  # peaks do not depend on it, and a busy machine is finished sooner
    case = next(case for case in build_cases() if case.name == name)
    fake, persistent_gib, fake_s = _estimate_all(case, device)
    real: dict[int, float] = {}

    def measure(batch_size: int) -> float:
        if batch_size not in real:
            peak_bytes = measure_allocated_peak_bytes(lambda: _run_really(case, batch_size, device), device)
            real[batch_size] = peak_bytes / _GIB
        return real[batch_size]

    curve = measure_until_settled(MemoryCurve(fake=fake, persistent_gib=persistent_gib), case.probes, measure)
    for batch_size in (*case.probes[:2], case.target):
        measure(batch_size)
    return {
        "fake": fake,
        "real": dict(sorted(real.items())),
        "persistent_gib": persistent_gib,
        "probed": list(curve.real),
        "fake_s": fake_s,
    }


def measure_until_settled(
    curve: MemoryCurve, candidates: Sequence[int], measure: Callable[[int], float]
) -> MemoryCurve:
    """Add real points to a curve of fake ones by doubling, until it is settled or the candidates end."""
    while (batch_size := choose_next(curve, candidates)) is not None:
        curve = dataclasses.replace(curve, real={**curve.real, batch_size: measure(batch_size)})
    return curve


def choose_next(curve: MemoryCurve, candidates: Sequence[int]) -> int | None:
    """Return the next batch size to measure; None where the last one brought nothing new, or none is left above it."""
    left = sorted(set(candidates) - set(curve.real))
    if not left or is_settled(curve):
        return None
    if not curve.real:
        return _find_telling(curve.fake, left)
    last = max(curve.real)
    above = [c for c in left if c > last]
    return next((c for c in above if c >= 2 * last), max(above, default=None))


def is_settled(curve: MemoryCurve) -> bool:
    """Tell whether the last peak came out as predicted without it, while what grows with the batch was plain to see."""
    *before, last = list(curve.real) or [0]
    if not before:
        return False
    growth = (curve.real[last] - curve.real[before[-1]]) / (last - before[-1]) * last
    if growth <= TELLING_SHARE * curve.real[last]:
        return False
    predicted = dataclasses.replace(curve, real={b: curve.real[b] for b in before}).predict_gib(last)
    return abs(predicted.gib / curve.real[last] - 1) <= SETTLED_PCT / 100


def _find_telling(fake: Mapping[int, float], candidates: Sequence[int]) -> int:
    """Return the smallest batch whose fake peak shows growth, else the largest.

    The slope at a candidate is that to the one below it, at the smallest that to the one above.
    """
    for batch, other in zip(candidates, [*candidates[1:2], *candidates], strict=False):
        slope = (fake[batch] - fake[other]) / (batch - other)
        if slope * batch > TELLING_SHARE * fake[batch]:
            return batch
    return candidates[-1]


def measure_allocated_peak_bytes(work: Callable[[], None], device: str) -> int:
    """Return the most bytes of torch's allocator in use at a time during ``work``; a CPU counts from its start."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    found = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(found, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _estimate_all(case: Case, device: str) -> tuple[dict[int, float], float, list[float]]:
    run, peaks, seconds = _build(case, device), {}, []
    persistent_gib = 0.0
    for batch_size in [*case.probes, case.target // 2, case.target]:
        started = time.perf_counter()
        peak = estimate_memory(run, batch_size, batch=_build_batch(run, 2), build_step=TrainStep)
        seconds.append(time.perf_counter() - started)
        peaks[batch_size], persistent_gib = peak.total_gib, peak.persistent_bytes / _GIB
    return peaks, persistent_gib, seconds


def _build(case: Case, device: str) -> Run:
    return build_run(None, default_plan({"batch_size": 2, **case.levers}), device=device, workload=case.workload)


def _run_really(case: Case, batch_size: int, device: str) -> None:
    """Build the run, take two training steps and one evaluation step."""
    run = dataclasses.replace(_build(case, device), batch_size=batch_size)
    step = TrainStep(run)

    def yield_batches(n: int) -> Iterator[Any]:
        for _ in range(n):
            yield _build_batch(run, batch_size)

    for _ in range(2):
        step(yield_batches(run.setup.accumulate), NullTimer())
    run.setup.model.eval()
    with torch.no_grad():
        step.compute_loss(next(yield_batches(1)))


def _build_batch(run: Run, n: int) -> Any:
    """Build ``n`` samples at once: joined one by one they would fill the profiler with events of no interest."""
    return tuple(tensor.new_zeros((n, *tensor.shape[1:])) for tensor in next(iter(run.loader)))
