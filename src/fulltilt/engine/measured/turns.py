"""Take training steps in short timed blocks, for a comparison in which settings take turns (``stats.alternation``)."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from fulltilt.engine.build.run import Run
from fulltilt.engine.measured.endless_steps import EndlessSteps
from fulltilt.engine.measured.measurement import check_observed, synchronize_run
from fulltilt.engine.step.train_step import StepOutcome
from fulltilt.measure import NullTimer
from fulltilt.measure.nested import count_samples, slice_samples
from fulltilt.stats import Block

N_WARM_STEPS, WARM_S = 10, 0.1  # both; then steps are level, and what compiles has compiled
MAX_WARM_S = 2.0  # steps of a second are level after one
N_SETTLING = 2  # steps after a turn of another process that are not timed: the first takes 1.65 times as long;
SLOW_STEP_S = 0.1  # one where steps take as long: what the caches lost weighs little then
BLOCK_S, MIN_BLOCK_STEPS, MAX_BLOCK_S = 0.08, 10, 0.4
STALLED = 5.0  # times a quick step
N_QUICK = 200  # latest steps of which a tenth is quicker than the quick one


class Turns:
    """Takes blocks of steps of one run.

    The begin of an epoch (workers that start, a queue that fills) is timed by itself, and every block gets its share of
    it: a block is shorter than an epoch, and would hold a begin by chance.
    """

    def __init__(self, run: Run, *, clock: Callable[[], float] = time.perf_counter):
        self._run, self._clock = run, clock
        self._steps = EndlessSteps(run, NullTimer(), self._check_first)
        self._begins_s: list[float] = []
        self._latest_s: deque[float] = deque(maxlen=N_QUICK)
        self._step_s = math.inf

    def warm_up(self) -> None:
        """Take steps until they are level.

        Raises:
            TrainingError: a value of the plan is not in force in the run.
        """
        self._take_step()  # by itself: compiling takes longer than all that follow
        self._compile_short_batch()
        begin_s, times_s = self._clock(), list[float]()
        while (spent_s := self._clock() - begin_s) < MAX_WARM_S and (len(times_s) < N_WARM_STEPS or spent_s < WARM_S):
            start_s = self._clock()
            self._take_step()
            times_s.append(self._clock() - start_s)
        self._latest_s.extend(times_s)
        self._step_s = statistics.median(times_s[len(times_s) // 2 :])

    def _compile_short_batch(self) -> None:
        """Take a step on a batch as short as the last of an epoch: code is compiled for one size, in a block else."""
        run, loader = self._run, self._run.loader
        n_last = 0 if run.n_samples is None or loader.drop_last else run.n_samples % run.batch_size
        if n_last and run.plan["compile"]:
            batch = self._steps.take_batch()
            self._steps.step_on(iter([slice_samples(batch, count_samples(batch), slice(n_last))]))
            synchronize_run(run)

    def take_block(self) -> Block:
        """Take a block of steps and time it. Device: synchronises at both ends."""
        n_steps = max(math.ceil(BLOCK_S / self._step_s), MIN_BLOCK_STEPS)
        n_steps = max(1, min(n_steps, int(MAX_BLOCK_S / self._step_s)))
        for _ in range(N_SETTLING if self._step_s < SLOW_STEP_S else 1):
            self._take_step()  # begins of epochs count here, too: blocks may keep step with the epochs
        n_samples, times_s = 0, list[float]()
        while len(times_s) < n_steps:
            start_s, epoch = self._clock(), self._steps.n_epochs
            n_new = self._steps()
            if self._is_begin_apart and self._steps.n_epochs != epoch:
                synchronize_run(self._run)
                self._begins_s.append(self._clock() - start_s)
                continue
            n_samples += n_new
            times_s.append(self._clock() - start_s)
        start_s = self._clock()
        synchronize_run(self._run)
        seconds = sum(times_s) + self._clock() - start_s
        self._latest_s.extend(times_s)
        stalled_s = self._sum_stalls(times_s)
        self._step_s = max(seconds - stalled_s, 0.0) / n_steps or statistics.median(times_s)
        return Block(n_samples=n_samples, seconds=seconds + self._compute_share_s(n_steps), stalled_s=stalled_s)

    def _sum_stalls(self, times_s: Sequence[float]) -> float:
        """Add up the steps that took far longer than quick ones do; on a busy machine most of them may.

        Device: on a GPU a step is only launched, and with data workers steps come in bursts: nothing is told there.
        """
        if self._run.device.type != "cpu" or self._run.loader.num_workers:
            return 0.0
        quick_s = sorted(self._latest_s)[len(self._latest_s) // 10]
        return sum(step_s for step_s in times_s if step_s > STALLED * quick_s)

    @property
    def _is_begin_apart(self) -> bool:
        return self._run.steps_per_epoch is not None and self._run.steps_per_epoch > 1

    def _compute_share_s(self, n_steps: int) -> float:
        """Compute what begins of epochs cost so many steps, beyond the steps themselves."""
        if not self._begins_s:
            return 0.0
        assert self._run.steps_per_epoch is not None
        extra_s = max(0.0, statistics.median(self._begins_s) - self._step_s)
        return n_steps * extra_s / self._run.steps_per_epoch

    def _take_step(self) -> None:
        epoch, start_s = self._steps.n_epochs, self._clock()
        self._steps()
        synchronize_run(self._run)
        if self._is_begin_apart and self._steps.n_epochs != epoch > 0:  # the very first begin builds what stays
            self._begins_s.append(self._clock() - start_s)

    def _check_first(self, outcome: StepOutcome) -> None:
        check_observed(self._run)
