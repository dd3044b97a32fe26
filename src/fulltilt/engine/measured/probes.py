"""Parts of a training run by themselves: the step on batches that lie on the device, the loader, the peak of memory.

What the whole takes is decided by whole runs only; these say which whole runs are worth it (``tuner.model_first``).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fulltilt.engine.build.run import Run
from fulltilt.engine.measured.measurement import check_observed, run_measured
from fulltilt.engine.measured.rehearsal import Part, find_largest_samples, read_batch
from fulltilt.engine.step.cached_step import build_step
from fulltilt.engine.step.train_step import TrainStep, fetch_batches
from fulltilt.errors import DataError
from fulltilt.hardware import count_usable_cores, read_cpu_times, read_pressure
from fulltilt.levers import Lever
from fulltilt.measure import estimate_memory, measure_steps
from fulltilt.measure.nested import count_samples
from fulltilt.measure.steps import StepsResult
from fulltilt.records import Measurement

N_RESIDENT = 2  # batches that a device probe goes round: more would be memory that a training run does not hold
MAX_FILL_S = 2.0  # wait at most so long for the workers' queue to be full
NO_STEP = "only the loader ran"


def use_share_of_cores(n_ranks: int) -> None:
    """As many threads as one of so many ranks gets where nobody says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, count_usable_cores() // n_ranks))


def run_device_probe(
    run: Run,
    *,
    n_steps: int,
    max_measure_s: float | None = None,
    on_progress: Callable[[int], None] | None = None,
    on_part: Callable[[Part], None] | None = None,
) -> Measurement:
    """The training step on batches that lie on the device already: what the device takes when nothing is waited for.

    Raises:
        DataError: the dataset yields no batch. NonFiniteLossError, TrainingError: as ``run_measured``.
    """
    place = TrainStep(run).place
    resident = [place(batch) for batch in itertools.islice(fetch_batches(run.start_epoch(0)), N_RESIDENT)]
    run.close()
    if not resident:
        raise DataError(f"the training set of {run.workload.name} yielded no batch in epoch 0")
    whole = [batch for batch in resident if count_samples(batch) == run.batch_size] or resident
    return run_measured(
        run,
        n_steps=n_steps,
        max_measure_s=max_measure_s,
        on_progress=on_progress,
        on_part=on_part,
        batches=itertools.cycle(whole),
    )


def run_loader_probe(
    run: Run, *, n_steps: int, max_measure_s: float | None = None, on_progress: Callable[[int], None] | None = None
) -> Measurement:
    """Batches loaded, collated and copied to the device as fast as they come, epochs and their begins included.

    ``receive_ms`` is what one ``next()`` costs the training process when the workers' queue is full; without workers
    there is no queue.

    Raises:
        DataError: the dataset yields no batch. TrainingError: a lever of the loader is not in force.
    """
    stream = _Stream(run)
    result = measure_steps(
        stream.take,
        n_steps=n_steps,
        epoch_steps=_count_batches(run) if run.loader.num_workers else None,
        max_measure_s=max_measure_s,
        synchronize=functools.partial(torch.cuda.synchronize, run.device) if run.device.type == "cuda" else _nothing,
        read_pressure=read_pressure,
        read_cpu_times=read_cpu_times,
        on_block=None if on_progress is None else lambda block: on_progress(stream.n_taken),
    )
    receive_ms, reason = _measure_receive_ms(run, stream, batch_s=run.batch_size / result.samples_per_s)
    return _build_measurement(result, receive_ms, reason, check_observed(run, _is_of_loader))


def _read_evaluation_batch_size(run: Run) -> int | None:
    """None: that of training, or the run does not evaluate."""
    is_evaluated = run.config is not None and run.config.run.evaluate_every is not None
    return run.config.data.val_batch_size if is_evaluated and run.workload.validation is not None else None


def run_memory_probe(run: Run) -> Measurement:
    """Peak memory of a step and an evaluation on fake tensors, as the one figure of a measurement.

    Raises:
        FakeRunError: the step needs the data itself. DataError: the dataset yields no batch.

    Device: nothing is computed or allocated on it.
    """
    peak = estimate_memory(
        run,
        run.batch_size,
        batch=_read_few(run),
        build_step=build_step,
        evaluation_batch_size=_read_evaluation_batch_size(run),
    )
    names = ("phases_ms", "samples_per_s", "samples_per_s_ci95", "gpu_utilization_pct", "memory_rss_peak_gib")
    more = ("memory_reserved_peak_gib", "first_step_s", "flops_per_sample", "flops_coverage_pct", "cpu_pressure_pct")
    missing = (*names, *more, "memory_peak_part", "steal_pct", "receive_ms")
    return Measurement(
        phases_ms=None,
        samples_per_s=None,
        samples_per_s_ci95=None,
        block_samples_per_s=(),
        n_steps=0,
        n_warmup_steps=0,
        memory_allocated_peak_gib=peak.total_gib,
        null_reasons=dict.fromkeys(missing, "estimated on fake tensors, nothing ran"),
    )


def _read_few(run: Run) -> Any:
    """A batch of few samples, for its shapes and types: the largest where they differ; streams yield theirs whole."""
    loader = run.loader
    if run.n_samples is not None and loader.collate_fn is not None:
        n_samples = min(N_RESIDENT, run.n_samples)
        largest = find_largest_samples(loader, n_samples)
        return read_batch(loader, list(range(n_samples)) if largest is None else largest.indices)
    batch = next(fetch_batches(run.start_epoch(0)), None)
    run.close()
    if batch is None:
        raise DataError(f"the training set of {run.workload.name} yielded no batch in epoch 0")
    return batch


class _Stream:
    """Batches over as many epochs as asked for, each placed on the device."""

    def __init__(self, run: Run):
        self._run, self._place = run, TrainStep(run).place
        self._batches: Iterator[Any] = iter(())
        self._epoch = 0
        self.n_taken = 0

    def take(self) -> int:
        """The next batch → its samples."""
        batch = next(self._batches, None)
        if batch is None:
            self.start()
            batch = next(self._batches, None)
            if batch is None:
                name = self._run.workload.name
                raise DataError(f"the training set of {name} yielded no batch in epoch {self._epoch}")
        self.n_taken += 1
        return count_samples(self._place(batch))

    def start(self) -> None:
        """Leave the epoch in progress and begin the next one."""
        self._batches = iter(())
        self._batches = fetch_batches(self._run.start_epoch(self._epoch))
        self._epoch += 1


def _measure_receive_ms(run: Run, stream: _Stream, *, batch_s: float) -> tuple[float | None, str | None]:
    """Median of taking what lies ready in the workers' queue; with the reason where there is none."""
    loader = run.loader
    if not loader.num_workers:
        return None, "without workers the training process loads by itself"
    n_ready = min(loader.num_workers * (loader.prefetch_factor or 2), _count_batches(run) or math.inf)
    stream.start()
    stream.take()  # the first one waits for the workers to start
    wait_s = min(MAX_FILL_S, 1.5 * n_ready * batch_s + 0.05)
    time.sleep(wait_s)
    n_filled = int(min(n_ready - 1, wait_s / batch_s))
    if n_filled < 2:
        return None, f"{n_filled} batches were ready after {wait_s:.1f} s; a full queue is needed to take from"
    times_s = []
    for _ in range(n_filled - 1):
        begin_s = time.perf_counter()
        stream.take()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s) * 1e3, None


def _is_of_loader(lever: Lever) -> bool:
    """What a loader alone shows; these two of its levers need a step."""
    return lever.stage == "loader" and lever.name not in ("batch_size", "pin_memory")


def _build_measurement(
    result: StepsResult, receive_ms: float | None, reason: str | None, observed: dict[str, Any]
) -> Measurement:
    peaks = ("memory_allocated_peak_gib", "memory_reserved_peak_gib", "memory_rss_peak_gib", "memory_peak_part")
    memory = dict.fromkeys((*peaks, "gpu_utilization_pct"), NO_STEP)
    others = dict.fromkeys(("phases_ms", "flops_per_sample", "flops_coverage_pct"), NO_STEP)
    return Measurement(
        phases_ms=None,
        samples_per_s=result.samples_per_s,
        samples_per_s_ci95=result.samples_per_s_ci95,
        block_samples_per_s=result.block_samples_per_s,
        receive_ms=receive_ms,
        n_steps=result.n_steps,
        n_warmup_steps=result.n_warmup_steps,
        first_step_s=result.first_step_s,
        cpu_pressure_pct=result.cpu_pressure_pct,
        steal_pct=result.steal_pct,
        null_reasons={**result.null_reasons, **memory, **others, **({"receive_ms": reason} if reason else {})},
        notes=result.notes,
        observed=observed,
    )


def _count_batches(run: Run) -> int | None:
    """Of an epoch; None when the data streams."""
    return None if run.n_samples is None else len(run.loader)


def _nothing() -> None:
    pass
