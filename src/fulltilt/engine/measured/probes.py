"""Run parts of a training by themselves: the step on batches that lie on the device, the loader, the peak of memory.

What the whole takes is decided by whole runs only; these say which whole runs are worth it (``tuner.model_first``).
"""

import dataclasses
import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fulltilt.engine.build.run import Run
from fulltilt.engine.measured.endless_steps import EndlessBatches
from fulltilt.engine.measured.measurement import STEP_FIGURES, check_observed, run_measured
from fulltilt.engine.measured.rehearsal import Part, find_largest_samples, read_batch
from fulltilt.engine.step.cached_step import build_step
from fulltilt.engine.step.train_step import TrainStep, fetch_batches
from fulltilt.hardware import count_usable_cores
from fulltilt.levers import Lever
from fulltilt.measure import estimate_memory, measure_steps
from fulltilt.measure.nested import count_samples
from fulltilt.records import Measurement

N_RESIDENT = 2  # batches that a device probe goes round: more would be memory that a training run does not hold
MAX_FILL_S = 2.0  # wait at most so long for the workers' queue to be full
NO_STEP = "only the loader ran"


def use_share_of_cores(n_ranks: int) -> None:
    """Use as many threads as one of so many ranks gets, where nobody says otherwise."""
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
    """Measure the training step on batches that lie on the device already: nothing is waited for.

    Raises:
        DataError: the dataset yields no batch. NonFiniteLossError, TrainingError: as ``run_measured``.
    """
    place = TrainStep(run).place
    resident = [place(batch) for batch in itertools.islice(fetch_batches(run.start_epoch(0)), N_RESIDENT)]
    run.close()
    if not resident:
        raise run.build_empty_error(1)
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
    """Measure how fast batches are loaded, collated and copied to the device, epochs and their begins included.

    ``receive_ms`` is what one ``next()`` costs the training process when the workers' queue is full; without workers
    there is no queue.

    Raises:
        DataError: the dataset yields no batch. TrainingError: a lever of the loader is not in force.
    """
    stream, place = EndlessBatches(run), TrainStep(run).place
    is_gpu = run.device.type == "cuda"
    result = measure_steps(
        lambda: count_samples(place(stream.take_batch())),
        n_steps=n_steps,
        epoch_steps=_count_batches(run) if run.loader.num_workers else None,
        max_measure_s=max_measure_s,
        synchronize=functools.partial(torch.cuda.synchronize, run.device) if is_gpu else lambda: None,
        on_block=None if on_progress is None else lambda block: on_progress(stream.n_taken),
    )
    receive_ms, reason = _measure_receive_ms(run, stream, place, batch_s=run.batch_size / result.samples_per_s)
    measurement = Measurement(
        **{name: getattr(result, name) for name in STEP_FIGURES if name != "phases_ms"},
        phases_ms=None,
        receive_ms=receive_ms,
        null_reasons={**result.null_reasons, **({"receive_ms": reason} if reason else {})},
        notes=result.notes,
        observed=check_observed(run, _is_of_loader),
    )
    return _explain_nulls(measurement, NO_STEP)


def run_memory_probe(run: Run) -> Measurement:
    """Estimate the peak memory of a step and an evaluation on fake tensors, as the one figure of a measurement.

    Raises:
        FakeRunError: the step needs the data itself. DataError: the dataset yields no batch.

    Device: nothing is computed or allocated on it.
    """
    is_evaluated = run.config.run.evaluate_every is not None
    val_batch_size = run.config.data.val_batch_size if is_evaluated and run.workload.validation is not None else None
    batch = _read_few(run)
    peak = estimate_memory(
        run, run.batch_size, batch=batch, build_step=build_step, evaluation_batch_size=val_batch_size
    )
    measurement = Measurement(
        phases_ms=None,
        samples_per_s=None,
        samples_per_s_ci95=None,
        block_samples_per_s=(),
        n_steps=0,
        n_warmup_steps=0,
        memory_allocated_peak_gib=peak.total_gib,
    )
    return _explain_nulls(measurement, "estimated on fake tensors, nothing ran")


def _explain_nulls(measurement: Measurement, reason: str) -> Measurement:
    """Give ``reason`` to every figure that is null and has none yet."""
    names = [field.name for field in dataclasses.fields(measurement) if not field.name.endswith("_loss")]
    missing = [name for name in names if getattr(measurement, name) is None]
    return dataclasses.replace(measurement, null_reasons=dict.fromkeys(missing, reason) | measurement.null_reasons)


def _read_few(run: Run) -> Any:
    """Read a batch of few samples for its shapes: the largest where they differ. Streams yield a whole one."""
    loader = run.loader
    if run.n_samples is not None and loader.collate_fn is not None:
        n_samples = min(N_RESIDENT, run.n_samples)
        largest = find_largest_samples(loader, n_samples)
        return read_batch(loader, list(range(n_samples)) if largest is None else largest.indices)
    batch = EndlessBatches(run).take_batch()
    run.close()
    return batch


def _measure_receive_ms(
    run: Run, stream: EndlessBatches, place: Callable[[Any], Any], *, batch_s: float
) -> tuple[float | None, str | None]:
    """Measure the median of taking what lies ready in the workers' queue; None with the reason where nothing does."""
    loader = run.loader
    if not loader.num_workers:
        return None, "without workers the training process loads by itself"
    n_ready = min(loader.num_workers * (loader.prefetch_factor or 2), _count_batches(run) or math.inf)
    stream.start_epoch()
    place(stream.take_batch())  # the first one waits for the workers to start
    wait_s = min(MAX_FILL_S, 1.5 * n_ready * batch_s + 0.05)
    time.sleep(wait_s)
    n_filled = int(min(n_ready - 1, wait_s / batch_s))
    if n_filled < 2:
        return None, f"{n_filled} batches were ready after {wait_s:.1f} s; a full queue is needed to take from"
    times_s = []
    for _ in range(n_filled - 1):
        begin_s = time.perf_counter()
        place(stream.take_batch())
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s) * 1e3, None


def _is_of_loader(lever: Lever) -> bool:
    """Tell what a loader alone shows; these two of its levers need a step."""
    return lever.stage == "loader" and lever.name not in ("batch_size", "pin_memory")


def _count_batches(run: Run) -> int | None:
    """Count the batches of an epoch; None when the data streams."""
    return None if run.n_samples is None else len(run.loader)
