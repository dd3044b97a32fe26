"""Would a training step fit a memory limit? Estimated before anything of that size is allocated, with what would fit.

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """What a step is estimated to need beside what it may use.

    Attributes:
        n_samples: Of the micro-batch that one process computes at a time.
        smaller: Micro-batch and micro-steps of the same effective batch whose estimate is within the limit.
        smaller_bytes: That estimate.
        is_checkpointed: The run drops activations and computes them again already.
        is_cached: A window is one batch by gradient caching.
        compares_samples: Micro-batches would change what the loss sees.
    """

    device: str
    limit_bytes: int
    peak: FakePeak
    n_samples: int
    smaller: tuple[int, int] | None
    smaller_bytes: int
    is_checkpointed: bool
    is_cached: bool
    compares_samples: bool

    @property
    def fits(self) -> bool:
        return self.peak.total_bytes <= self.limit_bytes

    def describe(self) -> str:
        """One line; what does not fit comes with a remedy."""
        need = format_bytes(self.peak.total_bytes)
        text = f"estimated for {self.device} from the shapes of its tensors, not measured: {need} at the peak"
        text += f" ({self.n_samples} samples at a time, {format_bytes(self.peak.activations_bytes)} of it activations)"
        if self.fits:
            share_pct = 100 * self.peak.total_bytes / self.limit_bytes
            text += f", {share_pct:.0f} % of the limit of {format_bytes(self.limit_bytes)}"
            return f"{text}; scratch of operators and what the process holds besides tensors come on top"
        return f"{text}, above the limit of {format_bytes(self.limit_bytes)}: {self._find_remedy()}"

    def _find_remedy(self) -> str:
        remedies = []
        if self.smaller:
            batch_size, accumulate = self.smaller
            how = ", one batch by gradient caching" if self.is_cached else ""
            remedies.append(
                f"data.batch_size={batch_size} speed.accumulate={accumulate} (the same effective batch{how}) is "
                f"estimated at {format_bytes(self.smaller_bytes)}"
            )
        elif self.compares_samples:
            remedies.append(
                "the loss compares the samples of a micro-batch, so accumulation would change it; gradient caching "
                "would not: task contrastive(exact_batch=true)"
            )
        if not self.is_checkpointed:
            remedies.append("speed.activation_checkpointing=true, where the model has blocks, keeps fewer activations")
        return "; or ".join(remedies) or "no smaller micro-batch is estimated to fit: use a smaller model"


def forecast_memory(run: Run, limit_bytes: int, *, n_ranks: int = 1) -> MemoryForecast:
    """Estimate a training step of the run, and of smaller micro-batches where it is above the limit.

    Over several ranks it is the first one's, whose part of a batch is the largest; the limit is each rank's own.

    Raises:
        FakeRunError: the step cannot be taken without data.
        DataError: the batch holds no tensor.
    """
    batch = next(run.start_epoch(0))
    peak = _estimate(run, batch, run.batch_size, run.setup.accumulate, n_ranks)
    couples = run.workload.couples_samples
    compares = run.workload.compares_samples and not couples
    smaller, smaller_bytes = None, 0
    if peak.total_bytes > limit_bytes and not compares:
        smaller, smaller_bytes = _find_smaller(run, batch, limit_bytes, n_ranks)
    return MemoryForecast(
        device=str(run.device),
        limit_bytes=limit_bytes,
        peak=peak,
        n_samples=peak.batch_size,
        smaller=smaller,
        smaller_bytes=smaller_bytes,
        is_checkpointed=run.plan["activation_checkpointing"] not in (None, False, "off"),
        is_cached=couples,
        compares_samples=compares,
    )


def _find_smaller(run: Run, batch: Any, limit_bytes: int, n_ranks: int) -> tuple[tuple[int, int] | None, int]:
    """The first halving of the micro-batch that is estimated to fit, and its estimate."""
    batch_size, accumulate = run.batch_size, run.setup.accumulate
    while batch_size % 2 == 0 and batch_size // 2 >= n_ranks:
        batch_size, accumulate = batch_size // 2, accumulate * 2
        n_bytes = _estimate(run, batch, batch_size, accumulate, n_ranks).total_bytes
        if n_bytes <= limit_bytes:
            return (batch_size, accumulate), n_bytes
    return None, 0


def _estimate(run: Run, batch: Any, batch_size: int, accumulate: int, n_ranks: int) -> FakePeak:
    changed = dataclasses.replace(run, setup=dataclasses.replace(run.setup, accumulate=accumulate))
    return estimate_memory(changed, -(-batch_size // n_ranks), batch=batch, build_step=build_step)
