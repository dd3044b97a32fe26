"""Estimates whether a training step fits a memory limit, before anything of that size is allocated.

The estimate counts the tensors of a step (``measure.fake_memory`` says what it cannot see), so what fits by a little
may still run out; what does not fit by it does not fit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fulltilt.engine.build.run import Run
from fulltilt.engine.step.cached_step import build_step
from fulltilt.measure import FakePeak, estimate_memory
from fulltilt.records import format_bytes


def forecast_memory(run: Run, limit_bytes: int, *, n_ranks: int = 1) -> tuple[bool, str]:
    """Estimate a training step of the run; return whether it fits, and one line with a remedy where it does not.

    Over several ranks it is the first one's, whose part of a batch is the largest; the limit is each rank's own.

    Raises:
        FakeRunError: the step cannot be taken without data.
        DataError: the batch holds no tensor.
    """
    batch = next(run.start_epoch(0))
    peak = _estimate(run, batch, run.batch_size, run.setup.accumulate, n_ranks)
    need = format_bytes(peak.total_bytes)
    text = f"estimated for {run.device} from the shapes of its tensors, not measured: {need} at the peak"
    text += f" ({peak.batch_size} samples at a time, {format_bytes(peak.activations_bytes)} of it activations)"
    if peak.total_bytes > limit_bytes:
        remedy = _find_remedy(run, batch, limit_bytes, n_ranks)
        return False, f"{text}, above the limit of {format_bytes(limit_bytes)}: {remedy}"
    share_pct = 100 * peak.total_bytes / limit_bytes
    text += f", {share_pct:.0f} % of the limit of {format_bytes(limit_bytes)}"
    return True, f"{text}; scratch of operators and what the process holds besides tensors come on top"


def _find_remedy(run: Run, batch: Any, limit_bytes: int, n_ranks: int) -> str:
    remedies = []
    if run.workload.compares_samples and not run.workload.couples_samples:
        remedies.append(
            "the loss compares the samples of a micro-batch, so accumulation would change it; gradient caching would "
            "not: task contrastive(exact_batch=true)"
        )
    elif smaller := _find_smaller(run, batch, limit_bytes, n_ranks):
        batch_size, accumulate, n_bytes = smaller
        how = ", one batch by gradient caching" if run.workload.couples_samples else ""
        remedies.append(
            f"data.batch_size={batch_size} speed.accumulate={accumulate} (the same effective batch{how}) is estimated "
            f"at {format_bytes(n_bytes)}"
        )
    if run.plan["activation_checkpointing"] in (None, False, "off"):
        remedies.append("speed.activation_checkpointing=true, where the model has blocks, keeps fewer activations")
    return "; or ".join(remedies) or "no smaller micro-batch is estimated to fit: use a smaller model"


def _find_smaller(run: Run, batch: Any, limit_bytes: int, n_ranks: int) -> tuple[int, int, int] | None:
    """Find the first halving of the micro-batch that fits: its size, micro-steps of the same effective batch, bytes."""
    batch_size, accumulate = run.batch_size, run.setup.accumulate
    while batch_size % 2 == 0 and batch_size // 2 >= n_ranks:
        batch_size, accumulate = batch_size // 2, accumulate * 2
        n_bytes = _estimate(run, batch, batch_size, accumulate, n_ranks).total_bytes
        if n_bytes <= limit_bytes:
            return batch_size, accumulate, n_bytes
    return None


def _estimate(run: Run, batch: Any, batch_size: int, accumulate: int, n_ranks: int) -> FakePeak:
    changed = dataclasses.replace(run, setup=dataclasses.replace(run.setup, accumulate=accumulate))
    return estimate_memory(changed, -(-batch_size // n_ranks), batch=batch, build_step=build_step)
