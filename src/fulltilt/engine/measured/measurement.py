"""Measure a run's throughput, phases, memory and FLOPs, and check that every lever (performance switch) is in force."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fulltilt.engine.build.run import Run
from fulltilt.engine.loop.bad_batch import suggest_stability
from fulltilt.engine.measured.endless_steps import EndlessSteps
from fulltilt.engine.measured.rehearsal import Part, Rehearsal
from fulltilt.engine.step.phase_sample import join_timers
from fulltilt.engine.step.train_step import StepOutcome, TrainStep
from fulltilt.errors import NonFiniteLossError, TrainingError, UsageError
from fulltilt.hardware import RealNvml
from fulltilt.levers import Lever, find_reports, load_catalogue
from fulltilt.levers.activation_checkpointing import without_checkpointing
from fulltilt.levers.compile import without_compiling
from fulltilt.measure import (
    Block,
    CudaClock,
    HostClock,
    MemoryMeter,
    MemoryPeaks,
    PhaseTimer,
    StepsResult,
    UtilizationSampler,
    count_flops,
    join_peaks,
    measure_steps,
)
from fulltilt.measure.nested import count_samples, slice_samples
from fulltilt.measure.utilization import UtilizationMean, find_device_index
from fulltilt.records import Measurement

SHORT_EPOCH_STEPS = 8
FLOPS_SAMPLES = 8
STEP_FIGURES = (
    *("phases_ms", "samples_per_s", "samples_per_s_ci95", "block_samples_per_s", "n_steps", "n_warmup_steps"),
    *("first_step_s", "cpu_pressure_pct", "steal_pct"),
)
"""Figures of a ``StepsResult`` that a ``Measurement`` has under the same name."""


def run_measured(
    run: Run,
    *,
    n_steps: int,
    max_measure_s: float | None = None,
    max_warmup_s: float = 30.0,
    on_progress: Callable[[int], None] | None = None,
    on_part: Callable[[Part], None] | None = None,
    batches: Iterator[Any] | None = None,
) -> Measurement:
    """Time training steps of ``run``, then measure the memory of its largest samples, an evaluation and a checkpoint.

    An epoch of at most 8 steps, or 32 with data workers, is timed as a whole, so that what happens once an epoch
    (workers that start anew, a short last batch) is in the figure with its true share.

    Of several ranks all call it and get the same: samples of all of them over the time from when all begin a block to
    when all have ended it, and the memory of the rank that took the most. The first one decides how long that takes.

    Args:
        n_steps: Timed optimizer steps at least; no block is added after ``max_measure_s``.
        on_progress: Told the optimizer steps taken so far, after every block; of several ranks on the first.
        on_part: Told each part that is rehearsed, as it begins (``rehearsal.py``).
        batches: Taken instead of the run's own epochs; they must not end.

    Raises:
        NonFiniteLossError: the first or the last loss is not a number or infinite.
        TrainingError: a value of the plan is not in force in the run.
        DeviceMemoryError: memory ran out in a part that was rehearsed.
    """
    device, world = run.device, run.world
    rehearsal = Rehearsal(run, saves=batches is None)  # a probe of the step is asked for its batch, not for the disk
    timer = PhaseTimer(CudaClock(device) if device.type == "cuda" else HostClock())
    seen: dict[str, Any] = {}

    def check_first(outcome: StepOutcome) -> None:
        seen["first_loss"] = read_loss(world.sum(outcome.loss.clone()), 1, run)
        seen["observed"] = check_observed(run)

    def follow(block: Block) -> None:
        if block.stage == "warmup":  # compiling and warming up are no part of the mean
            utilization.stop()
            utilization.start()
        if on_progress is not None:
            on_progress(steps.n_done)

    steps = EndlessSteps(run, join_timers(timer, run.world.link), check_first, batches)
    memory, nvml = MemoryMeter(device), RealNvml()
    utilization = UtilizationSampler(nvml, find_device_index(device, nvml) if device.type == "cuda" else None)
    memory.start()
    utilization.start()
    try:
        limits = {"n_steps": n_steps, "max_measure_s": max_measure_s, "max_warmup_s": max_warmup_s}
        result = _take_steps(run, steps, has_epochs=batches is None, timer=timer, on_block=follow, **limits)
    finally:
        peaks: dict[Part, MemoryPeaks] = {"steps": memory.stop()}
        mean = utilization.stop()
    assert steps.last_loss is not None
    seen["last_loss"] = read_loss(world.sum(steps.last_loss.clone()), steps.n_done, run)
    flops = measure_flops(run, steps.take_batch())
    peaks |= rehearsal.play(steps, memory, on_part)
    seen["notes"] = (*rehearsal.notes, *find_reports(run.plan, run.setup))
    ranks = world.collect(peaks)
    return world.hand_out(None if result is None else _join(result, ranks, mean, flops, seen))


def _take_steps(run: Run, steps: EndlessSteps, *, has_epochs: bool, **options: Any) -> StepsResult | None:
    """Measure on the first rank; the others take the same steps, block by block, and return None."""
    if not run.world.is_first:
        while n_steps := run.world.hand_out(None):
            synchronize_run(run)
            for _ in range(n_steps):
                steps()
            synchronize_run(run)
        return None
    is_short = has_epochs and run.steps_per_epoch is not None and 0 < run.steps_per_epoch <= SHORT_EPOCH_STEPS
    result = measure_steps(
        steps,
        min_block_steps=run.steps_per_epoch if is_short else 1,  # type: ignore[arg-type]
        # Workers start, or refill, at each epoch's begin: only whole epochs hold that with its true share.
        epoch_steps=run.steps_per_epoch if run.loader.num_workers and has_epochs else None,
        synchronize=functools.partial(synchronize_run, run),
        begin_block=run.world.hand_out,
        **options,
    )
    run.world.hand_out(0)
    return result


def synchronize_run(run: Run) -> None:
    """Wait at an edge of a block until the device is done, and those of all ranks are."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    run.world.meet()


def check_observed(run: Run, is_seen: Callable[[Lever], bool] = lambda lever: True) -> dict[str, Any]:
    """Read the value of every lever in force after a step, and raise where it is not the plan's.

    A plan's ``None`` leaves the value to PyTorch, so whatever is found fits it.

    Args:
        is_seen: Which levers can be found where there was no step.

    Raises:
        TrainingError: a value found is not the plan's.
    """
    levers = [lever for lever in load_catalogue().values() if lever.name in run.plan and is_seen(lever)]
    observed = {lever.name: lever.observe(run.setup) for lever in levers}
    wrong = [
        f"{name}: plan says {run.plan[name]}, in force {value}"
        for name, value in observed.items()
        if run.plan[name] is not None and value != run.plan[name]
    ]
    if wrong:
        raise TrainingError(
            f"{', '.join(wrong)}; leave these settings alone in the workload's own code, or name in the configuration "
            "what is in force"
        )
    return observed


def measure_flops(run: Run, batch: Any) -> tuple[float | None, float | None, str | None]:
    """Return FLOPs per sample of forward and backward, the percentage of operators counted, and why they are missing.

    Counted on the model itself with at most 8 samples, recomputation of activations left out. It leaves gradients at
    zero and running statistics changed.
    """
    small = slice_samples(batch, count_samples(batch), slice(FLOPS_SAMPLES))
    step = TrainStep(run, forward=run.setup.model)
    transform, step.transform = step.transform, None  # its products of matrices are no work of the model
    try:
        small = step.place(small)
        if transform is not None:
            small = transform.uncompiled()(small, run.generator)
        with without_checkpointing(run.setup.model), without_compiling(run.setup):
            flops = count_flops(lambda: step.compute_loss(small).backward())
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, UsageError) as error:
        # Optional figure: a model that does not take a smaller batch, or an operator that cannot be traced.
        return None, None, f"the step could not be counted with {count_samples(small)} samples: {error}"
    finally:
        run.setup.optimizer.zero_grad(set_to_none=True)
    if not flops.total:
        return None, flops.coverage_pct, "no operator with known FLOPs ran"
    return flops.total / count_samples(small), flops.coverage_pct, None


def read_loss(loss: Tensor, step: int, run: Run) -> float:
    """Read the loss of the last of ``step`` steps; one that is no number may have begun in an earlier one."""
    value = float(loss)
    if not math.isfinite(value):
        raise NonFiniteLossError(f"the loss is {value} by step {step}; {suggest_stability(run.plan['precision'])}")
    return value


def _join(
    result: StepsResult,
    ranks: Sequence[Mapping[Part, MemoryPeaks]],
    mean: UtilizationMean,
    flops: tuple[float | None, float | None, str | None],
    seen: dict[str, Any],
) -> Measurement:
    """Join what was measured; memory is, part by part, that of the rank that took the most."""
    of_ranks = {part: {str(i): rank[part] for i, rank in enumerate(ranks) if part in rank} for part in ranks[0]}
    by_part = {part: join_peaks(spans)[0] for part, spans in of_ranks.items()}
    peaks, fullest = join_peaks(by_part)
    reasons = {**result.null_reasons, **peaks.null_reasons, "receive_ms": "only probes of the loader measure it"}
    if result.phases_ms.h2d is None and "phases_ms" not in reasons:
        reasons["phases_ms.h2d"] = "on a CPU nothing is copied to a device"
    if mean.mean_pct is None:
        reasons["gpu_utilization_pct"] = mean.reason or "not read"
    flops_per_sample, coverage_pct, flops_reason = flops
    if flops_reason:
        reasons["flops_per_sample"] = flops_reason
    if coverage_pct is None:
        reasons["flops_coverage_pct"] = flops_reason or "no operator that computes was seen"
    return Measurement(
        **{name: getattr(result, name) for name in STEP_FIGURES},
        gpu_utilization_pct=mean.mean_pct,
        memory_allocated_peak_gib=peaks.allocated_peak_gib,
        memory_reserved_peak_gib=peaks.reserved_peak_gib,
        memory_rss_peak_gib=peaks.rss_peak_gib,
        memory_peak_part=fullest,
        flops_per_sample=flops_per_sample,
        flops_coverage_pct=coverage_pct,
        first_loss=seen["first_loss"],
        last_loss=seen["last_loss"],
        null_reasons=reasons,
        notes=(*result.notes, *seen["notes"]),
        observed=seen["observed"],
    )
