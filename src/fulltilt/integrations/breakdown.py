"""``StepBreakdown`` measures where the steps of another library's loop spend their time, by its callbacks.

    breakdown.open(device)
    for each step:  breakdown.lap("data_wait") … breakdown.lap("optimizer"); breakdown.end_step()
    breakdown.close()

Time between two hooks that is none of the phases is the loop's own work, ``other``: logging, checkpoints, other
callbacks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.measure import PhaseTimer, StepSample, summarize_phases
from fulltilt.measure.clock import Clock, CudaClock, HostClock
from fulltilt.measure.phase_timer import OTHER_LIMIT_PCT
from fulltilt.records import PHASES, VERSION, dumps
from fulltilt.records.run_folder import write_atomic
from fulltilt.stats import find_steady_start

if TYPE_CHECKING:
    import torch

N_BETWEEN_READS = 64  # steps; fewer than a timer keeps
N_JUDGED = 256  # first steps, among which warm-up ends
BAR_WIDTH = 30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """What a step of a loop spends its time on."""

    version: int = VERSION
    loop: str  # the library and its version
    device: str
    n_steps: int  # optimizer steps behind the figures
    n_warmup_steps: int  # steps before those, left out
    n_lost: int  # steps that the device was too far behind to time
    # Mean wall time of a step, without evaluation and, where hooks tell of them, checkpoints.
    step_ms: float | None = None
    # On the CPU they add up to step_ms; None for a phase never entered.
    phases_ms: dict[str, float | None] | None = None
    breakdown_pct: dict[str, float | None] | None = None  # the same in % of the step
    null_reasons: dict[str, str]  # why a figure is null
    notes: tuple[str, ...] = ()


class StepBreakdown:
    """Times the phases of a loop that calls it.

    Args:
        loop: The library and its version, for the report.
        null_reasons: Why phases are null that the library's hooks cannot tell.
        clock: The host's on the CPU, the stream's on a GPU, when None.

    **Cost** on the CPU: 5 µs a step and 0.15 µs a lap. On a GPU it records events and synchronises once, in ``close``.
    """

    def __init__(self, loop: str, *, null_reasons: dict[str, str] | None = None, clock: Clock | None = None):
        self._loop = loop
        self._reasons = dict(null_reasons or {})
        self._clock = clock
        self._timer: PhaseTimer | None = None
        self._device = ""
        self._first: list[StepSample] = []
        self._sums: Counter[str] = Counter()  # over settled steps: ms by phase, and of whole steps
        self._n_settled = self._n_unread = 0

    def open(self, device: torch.device) -> None:
        """Begin a run and its first step."""
        clock = self._clock or (CudaClock(device) if device.type == "cuda" else HostClock())
        self._timer, self._device = PhaseTimer(clock), str(device)
        self._first, self._sums, self._n_settled, self._n_unread = [], Counter(), 0, 0
        self._timer.start_step()

    def lap(self, phase: str) -> None:
        """Bill the time since the last lap to ``phase``; outside a step nothing is billed."""
        if self._timer is not None and self._timer.in_step:
            self._timer.lap(phase)

    def end_step(self) -> None:
        """End the step and begin the next one."""
        if self._timer is None or not self._timer.in_step:
            return
        self._timer.end_step(0)  # samples are the loop's business
        self._timer.start_step()
        self._n_unread += 1
        if self._n_unread >= N_BETWEEN_READS:
            self._n_unread = 0
            self._add(self._timer.take_steps())

    def pause(self) -> None:
        """Stop timing before what is no training; the time since the last step is dropped."""
        if self._timer is not None:
            self._timer.pause()

    def resume(self) -> None:
        """Begin the next step; time since the last one is dropped."""
        if self._timer is not None:
            self._timer.pause()
            self._timer.start_step()

    def close(self) -> Breakdown | None:
        """End the run and return its breakdown; None when it was not open.

        **Device**: waits for it once, after the last step.
        """
        if self._timer is None:
            return None
        timer, self._timer = self._timer, None
        if isinstance(timer.clock, CudaClock):
            import torch

            torch.cuda.synchronize(self._device)
        self._add(timer.take_steps())
        return self._summarize(timer.n_lost)

    def _add(self, samples: list[StepSample]) -> None:
        n_room = N_JUDGED - len(self._first)
        self._first += samples[:n_room]
        self._sum(samples[n_room:])

    def _sum(self, samples: list[StepSample]) -> None:
        self._n_settled += len(samples)
        for sample in samples:
            known = {phase: ms for phase, ms in sample.phases_ms.items() if ms is not None}
            self._sums.update({"step": sample.step_wall_ms, **known})  # type: ignore[arg-type]

    def _summarize(self, n_lost: int) -> Breakdown:
        notes: list[str] = []
        n = len(self._first)
        start = find_steady_start([sample.step_wall_ms for sample in self._first])
        if start >= n:
            start = min(1, max(0, n - 1))
            notes += [f"the first {n} steps never settled: only the very first is left out"] if n else []
        self._sum(self._first[start:])
        fields = {"loop": self._loop, "device": self._device, "n_warmup_steps": start, "n_lost": n_lost}
        n_settled = self._n_settled
        if not n_settled:
            reasons = dict.fromkeys(("step_ms", "phases_ms", "breakdown_pct"), "no step was timed")
            return Breakdown(**fields, n_steps=0, null_reasons=reasons)
        means = {name: total / n_settled for name, total in self._sums.items()}
        step_ms = means["step"]
        mean_phases_ms = {phase: means.get(phase) for phase in PHASES}
        summary = summarize_phases([StepSample(phases_ms=mean_phases_ms, step_wall_ms=step_ms, n_samples=0)])
        phases = {name: getattr(summary, name) for name in PHASES}
        not_entered = {"h2d": "nothing is copied to a device"} if self._device == "cpu" else {}
        known = self._reasons | not_entered
        reasons = {name: known.get(name, "the loop never entered it") for name in PHASES if phases[name] is None}
        shares = {name: None if ms is None else 100 * ms / step_ms for name, ms in phases.items()}
        excess_pct = sum(share or 0.0 for share in shares.values()) - 100
        if excess_pct > OTHER_LIMIT_PCT:
            text = f"the phases exceed the step by {excess_pct:.1f} %; above {OTHER_LIMIT_PCT:g} % they are void"
            phases = shares = None
            reasons = dict.fromkeys(("phases_ms", "breakdown_pct"), text)
        elif (other := shares["other"] or 0.0) > OTHER_LIMIT_PCT:
            notes.append(f"{other:.0f} % of the step is no phase's: the loop's own work between them")
        return Breakdown(
            **fields,
            n_steps=n_settled,
            step_ms=step_ms,
            phases_ms=phases,
            breakdown_pct=shares,
            null_reasons=reasons,
            notes=tuple(notes),
        )


def publish_breakdown(breakdown: Breakdown, out: str | Path | None) -> None:
    """Print a breakdown on standard error, and write it to ``out`` as JSON.

    Raises:
        StorageError: ``out`` cannot be written; the breakdown was printed before.
    """
    for line in format_breakdown(breakdown):
        print(line, file=sys.stderr)
    if out is not None:
        path = write_atomic(Path(out), dumps(breakdown, indent=1) + "\n")
        print(f"  written to {path}", file=sys.stderr)


def format_breakdown(breakdown: Breakdown) -> list[str]:
    """Return a title, a line for each phase with its time, share and bar, and the notes."""
    steps = f"{breakdown.n_steps:,} steps, {breakdown.n_warmup_steps} of warm-up left out"
    lines = [f"fulltilt: where a step of {breakdown.loop} goes ({breakdown.device}, {steps})"]
    for phase, ms in (breakdown.phases_ms or {}).items():
        share = (breakdown.breakdown_pct or {}).get(phase)
        if ms is None or share is None:
            lines.append(f"  {phase:<10} {'–':>10}            {breakdown.null_reasons.get(phase, '')}".rstrip())
        else:
            bar = "█" * round(BAR_WIDTH * share / 100)
            lines.append(f"  {phase:<10} {ms:>10.3f} ms {share:>5.1f} %  {bar}".rstrip())
    if breakdown.step_ms is not None:
        lines.append(f"  {'step':<10} {breakdown.step_ms:>10.3f} ms")
    if breakdown.phases_ms is None:
        lines.append(f"  no phases: {breakdown.null_reasons['phases_ms']}")
    return [*lines, *(f"  note: {note}" for note in breakdown.notes)]
