"""Find out whether a batch fits in memory, by a few real steps or answers."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fulltilt.engine.build.run import Run
from fulltilt.engine.measured.endless_steps import EndlessBatches, EndlessSteps
from fulltilt.engine.measured.measurement import check_observed, synchronize_run
from fulltilt.engine.measured.rehearsal import Part, Rehearsal, find_largest_samples, read_batch
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.measure import MemoryMeter, MemoryPeaks, NullTimer, join_peaks
from fulltilt.records import Measurement

NO_FIGURE = "a few steps, only to see whether they fit"


def run_fit_probe(
    run: Run,
    *,
    n_steps: int,
    max_measure_s: float | None = None,
    on_progress: Callable[[int], None] | None = None,
    on_part: Callable[[Part], None] | None = None,
) -> Measurement:
    """Take steps, some on the largest samples, an evaluation and a checkpoint, as a run would.

    Raises:
        DeviceMemoryError: memory ran out in a part that was rehearsed; and whatever a step raises.
    """
    rehearsal, meter = Rehearsal(run), MemoryMeter(run.device)
    meter.start()
    steps = EndlessSteps(run, NullTimer())
    begin_s = time.perf_counter()
    n_samples = 0
    for number in range(1, n_steps + 1):
        n_samples += steps()
        synchronize_run(run)
        if on_progress is not None:
            on_progress(number)
    seconds = time.perf_counter() - begin_s
    check_observed(run)
    peaks: dict[str, MemoryPeaks] = {"steps": meter.stop()}
    peaks |= rehearsal.play(steps, meter, on_part)
    return _build(n_samples / seconds, peaks, rehearsal.notes)


def run_inference_probe(
    run: Run,
    *,
    n_steps: int,
    max_measure_s: float | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Measurement:
    """Answer a batch of the largest samples a few times: the model in evaluation mode, without gradients."""
    run.setup.model.eval()
    step, batch, meter = TrainStep(run), _read_largest(run), MemoryMeter(run.device)
    meter.start()
    begin_s = time.perf_counter()
    with torch.no_grad():
        for number in range(1, n_steps + 1):
            step.compute_outputs(batch)
            synchronize_run(run)
            if on_progress is not None:
                on_progress(number)
    rate = n_steps * run.batch_size / (time.perf_counter() - begin_s)
    return _build(rate, {"steps": meter.stop()})


def _read_largest(run: Run) -> Any:
    if run.n_samples is None:
        return EndlessBatches(run).take_batch()
    largest = find_largest_samples(run.loader, run.batch_size)
    return read_batch(run.loader, list(range(run.batch_size)) if largest is None else largest.indices)


def _build(samples_per_s: float, by_part: dict[str, MemoryPeaks], notes: Sequence[str] = ()) -> Measurement:
    peaks, fullest = join_peaks(by_part)
    missing = ("samples_per_s_ci95", "phases_ms", "first_step_s", "flops_per_sample", "gpu_utilization_pct")
    return Measurement(
        samples_per_s=samples_per_s,
        n_steps=0,
        n_warmup_steps=0,
        memory_allocated_peak_gib=peaks.allocated_peak_gib,
        memory_reserved_peak_gib=peaks.reserved_peak_gib,
        memory_rss_peak_gib=peaks.rss_peak_gib,
        memory_peak_part=fullest,
        null_reasons={**dict.fromkeys(missing, NO_FIGURE), **peaks.null_reasons},
        notes=tuple(notes),
    )
