"""Measure the throughput of a training step: warm up until step times are steady, then time whole blocks.

A figure comes from the wall clock between two edges of a block, where the device is synchronised. Phases explain the
figure and never make it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from fulltilt import hardware
from fulltilt.hardware import CpuTimes, Pressure
from fulltilt.measure.blocks import Block, BlockRunner, find_contended
from fulltilt.measure.phase_timer import NullTimer, PhaseTimer, check_closure, summarize_phases
from fulltilt.records import PhasesMs
from fulltilt.stats import compute_rate_interval, find_steady_start

MIN_BLOCK_S = 0.02
"""Shorter blocks are lengthened: the edge itself (a synchronisation, a scheduler tick) would weigh too much."""

MIN_BLOCKS = 5
BLOCK_STEPS = 8
MAX_LENGTHENING = 64
MAX_REPEATS = 2
WARMUP_BLOCK_S = 0.05
LATE_WARMUP_PCT = 10.0
N_RECENT_BLOCKS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepsResult:
    """What ``measure_steps`` saw. Fields named as in ``records.Measurement`` mean the same."""

    blocks: tuple[Block, ...]  # those that count, without those that were run again
    samples_per_s: float
    samples_per_s_ci95: tuple[float, float]
    phases_ms: PhasesMs
    n_steps: int
    n_warmup_steps: int
    first_step_s: float
    seconds: float  # wall time of all, warm-up included
    is_steady: bool  # whether the warm-up ended by evidence and not at its limit
    cpu_pressure_pct: float | None
    steal_pct: float | None
    notes: tuple[str, ...]
    null_reasons: dict[str, str]

    @property
    def block_samples_per_s(self) -> tuple[float, ...]:
        return tuple(block.samples_per_s for block in self.blocks)


def measure_steps(
    run_step: Callable[[], int],
    *,
    n_steps: int = 40,
    min_block_steps: int = 1,
    epoch_steps: int | None = None,
    max_warmup_s: float = 30.0,
    max_measure_s: float | None = 60.0,
    timer: PhaseTimer | NullTimer | None = None,
    synchronize: Callable[[], Any] = lambda: None,
    read_pressure: Callable[[], Pressure] = hardware.read_pressure,
    read_cpu_times: Callable[[], CpuTimes] = hardware.read_cpu_times,
    on_block: Callable[[Block], None] | None = None,
    begin_block: Callable[[int], Any] = lambda n_steps: None,
) -> StepsResult:
    """Measure training steps.

    The first step is timed by itself. Warm-up blocks follow until their step times settle
    (``stats.find_steady_start``), for at most ``max_warmup_s`` after the first step. Then blocks are timed until
    ``n_steps`` steps and 5 blocks are done or ``max_measure_s`` have passed (None: no limit), but never fewer than two,
    without which there is no interval. Timed blocks that prove to be still warm-up are replaced. A block in which other
    work took the cores is run again, at most twice.

    Args:
        run_step: Takes one optimizer step, fetches its data, and returns the samples it consumed. It calls
            ``timer.lap``; start and end of the step are set here unless it sets them itself.
        n_steps: Timed steps, rounded up to whole blocks of 8. Short steps get larger blocks, of 20 ms; where blocks
            would not fit into ``max_measure_s`` they are smaller.
        min_block_steps: A block has a multiple of these steps. Give the steps of an epoch to have whole epochs timed.
        epoch_steps: Steps of an epoch whose begin has a cost of its own, as that of data workers that start. Where two
            epochs fit into ``max_measure_s`` the blocks are whole epochs; else a note says what the figure lacks. In
            shorter blocks few would hold a begin, and those few would be run again as contended.
        synchronize: Waits for the device; called at block edges only.
        on_block: Told about each block when it is done, for progress.
        begin_block: Told the steps of each block before it, for other processes that take the same steps.

    Raises:
        ValueError: a step consumed no samples.
    """
    timer = NullTimer() if timer is None else timer
    runner = BlockRunner(run_step, timer, synchronize, read_pressure, read_cpu_times, on_block, begin_block)
    max_measure_s = math.inf if max_measure_s is None else max_measure_s
    begin_ns = timer.clock.host_ns()
    warm, is_steady = _run_warmup(runner, min_block_steps, max_warmup_s)
    last_s = [block.seconds / block.n_steps for block in warm[1:][-3:]]
    notes: list[str] = []
    if not is_steady:
        times_ms = ", ".join(f"{seconds * 1e3:.3g}" for seconds in last_s)
        limit = f"no steady state within {max_warmup_s:g} s of warm-up"
        notes.append(f"{limit}; the last blocks took {times_ms} ms per step")
    step_s = sorted(last_s)[len(last_s) // 2]
    size = _plan_block_size(step_s, min_block_steps, max_measure_s)
    if size < BLOCK_STEPS:
        notes.append(f"blocks of {size} steps instead of {BLOCK_STEPS}: a step took {step_s:.3g} s in the warm-up")
    if epoch_steps is not None and 2 * epoch_steps * step_s <= max_measure_s:
        size = _round_up(size, epoch_steps)
    elif epoch_steps is not None:
        notes.append(f"an epoch of {epoch_steps} steps is too long to time: what its begin costs may be left out")
    blocks, late, timed_out = _run_blocks(runner, size, n_steps, max_measure_s, notes)
    if late:
        notes.append(f"timed blocks at the start that were still warm-up and do not count: {len(late)}")
    blocks = _repeat_contended(runner, blocks, size, 0 if timed_out else MAX_REPEATS, notes)
    return _summarize(blocks, runner, [*warm, *late], (timer.clock.host_ns() - begin_ns) / 1e9, is_steady, notes)


def _run_warmup(runner: BlockRunner, min_block_steps: int, max_warmup_s: float) -> tuple[list[Block], bool]:
    """Run the first step, then blocks until the last ones are steady; the second step decides how long they are."""
    clock = runner.timer.clock
    blocks = [runner.run_block(1, "warmup")]
    deadline_ns = clock.host_ns() + max_warmup_s * 1e9  # the first step may compile for minutes
    blocks.append(runner.run_block(1, "warmup"))
    wanted = min(BLOCK_STEPS, math.ceil(WARMUP_BLOCK_S / blocks[1].seconds))
    while True:
        recent = [b.seconds / b.n_steps for b in blocks[-N_RECENT_BLOCKS:]]
        is_steady = find_steady_start(recent) < len(recent)
        if is_steady or clock.host_ns() >= deadline_ns:
            return blocks, is_steady
        blocks.append(runner.run_block(_round_up(wanted, min_block_steps), "warmup"))


def _run_blocks(
    runner: BlockRunner, size: int, n_steps: int, max_measure_s: float, notes: list[str]
) -> tuple[list[Block], list[Block], bool]:
    """Time blocks: those that count, those before that proved to be warm-up, and whether the time limit ended them."""
    clock = runner.timer.clock
    late: list[Block] = []
    blocks: list[Block] = []
    deadline_ns = clock.host_ns() + max_measure_s * 1e9
    while True:
        while len(blocks) < MIN_BLOCKS or sum(b.n_steps for b in blocks) < n_steps:
            if len(blocks) >= 2 and clock.host_ns() >= deadline_ns:
                done = f"{sum(b.n_steps for b in blocks)} steps in {len(blocks)} blocks"
                notes.append(f"ended after {done}: the limit of {max_measure_s:g} s was reached")
                return blocks, late, True
            blocks.append(runner.run_block(size, "measure"))
        start = find_steady_start([b.seconds / b.n_steps for b in blocks], tolerance_pct=LATE_WARMUP_PCT)
        if start == len(blocks) > 2:
            notes.append(f"step times still changed by more than {LATE_WARMUP_PCT:g} % while they were timed")
        if start in (0, len(blocks)) or len(late) >= 2 * MIN_BLOCKS:
            return blocks, late, False
        late, blocks = late + blocks[:start], blocks[start:]


def _repeat_contended(
    runner: BlockRunner, blocks: list[Block], size: int, max_repeats: int, notes: list[str]
) -> list[Block]:
    """Replace blocks in which others took the cores; leaving out slow blocks instead would bias the figure."""
    wanted = len(blocks)
    while len(blocks) < wanted + max_repeats and len(find_contended(blocks)) > len(blocks) - wanted:
        blocks = [*blocks, runner.run_block(size, "measure")]
    contended = find_contended(blocks)
    dropped = set(contended[: len(blocks) - wanted])
    if dropped:
        notes.append(f"contended blocks that were run again: {len(dropped)}")
    if len(contended) > len(dropped):
        notes.append(f"{len(contended) - len(dropped)} of {wanted} blocks ran while other work took the cores")
    return [block for index, block in enumerate(blocks) if index not in dropped]


def _summarize(
    blocks: Sequence[Block],
    runner: BlockRunner,
    warm: Sequence[Block],
    seconds: float,
    is_steady: bool,
    notes: list[str],
) -> StepsResult:
    n_steps, timed_s = sum(b.n_steps for b in blocks), sum(b.seconds for b in blocks)
    steps = [step for block in blocks for step in block.steps]
    step_ms = timed_s / n_steps * 1e3
    null_reasons: dict[str, str] = {}
    if all(b.cpu_pressure_pct is None for b in blocks):
        null_reasons["cpu_pressure_pct"] = runner.read_pressure().reason or "CPU pressure was not read"
    if all(b.steal_pct is None for b in blocks):
        null_reasons["steal_pct"] = runner.read_cpu_times().reason or "steal time was not read"
    void = check_closure(steps, step_ms=step_ms)
    if void:
        null_reasons["phases_ms"] = void
    if steps and len(steps) < n_steps:
        notes.append(f"phases are from {len(steps)} of {n_steps} steps: the timer gave the others up")
    return StepsResult(
        blocks=tuple(blocks),
        samples_per_s=sum(b.n_samples for b in blocks) / timed_s,
        samples_per_s_ci95=compute_rate_interval([b.n_samples for b in blocks], [b.seconds for b in blocks]),
        phases_ms=summarize_phases([] if void else steps, step_ms=step_ms),
        n_steps=n_steps,
        n_warmup_steps=sum(b.n_steps for b in warm),
        first_step_s=warm[0].seconds,
        seconds=seconds,
        is_steady=is_steady,
        cpu_pressure_pct=_compute_mean_over_time(blocks, [b.cpu_pressure_pct for b in blocks]),
        steal_pct=_compute_mean_over_time(blocks, [b.steal_pct for b in blocks]),
        notes=tuple(notes),
        null_reasons=null_reasons,
    )


def _compute_mean_over_time(blocks: Sequence[Block], figures: Sequence[float | None]) -> float | None:
    known = [(b.seconds, f) for b, f in zip(blocks, figures, strict=True) if f is not None]
    return sum(s * f for s, f in known) / sum(s for s, _ in known) if known else None


def _plan_block_size(step_s: float, min_block_steps: int, max_measure_s: float) -> int:
    size = max(BLOCK_STEPS, min(math.ceil(MIN_BLOCK_S / step_s), MAX_LENGTHENING * BLOCK_STEPS))
    fitting = max_measure_s / (MIN_BLOCKS * step_s)
    if size > fitting:
        return max(1, int(fitting) // min_block_steps) * min_block_steps
    return _round_up(size, min_block_steps)


def _round_up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple
