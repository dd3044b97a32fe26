"""Take training steps in short timed blocks, for a comparison in which settings take turns (``stats.alternation``)."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from fulltilt.engine.build.run import Run
from fulltilt.engine.measured.endless_steps import EndlessSteps
from fulltilt.engine.measured.measurement import check_observed, read_loss, synchronize_run
from fulltilt.engine.step.train_step import StepOutcome
from fulltilt.measure import NullTimer
from fulltilt.measure.nested import count_samples, slice_samples
from fulltilt.stats import Block

N_WARM_STEPS, WARM_S = 10, 0.1  # both; then steps are level, and what compiles has compiled
MAX_WARM_S = 2.0  # steps of a second are level after one
N_SETTLING = 2  # steps after a turn of another process that are not timed: the first takes 1.65 times as long;
SLOW_STEP_S = 0.1  # one where steps take as long: what the caches lost weighs little then
BLOCK_S, MIN_BLOCK_STEPS, MAX_BLOCK_S = 0.03, 4, 0.4  # the error of a round is the same from 0.03 to 0.13 s
STEPS_A_WORKER = 2  # at least: batches come in bursts of one a worker
STALLED = 5.0  # times a quick step
N_QUICK = 200  # latest steps of which a tenth is quicker than the quick one


class BlockRunner:
    """Takes blocks of steps of one run.

    The begin of an epoch (workers that start, a queue that fills) is timed by itself, and every block gets its share of
    it: a block is shorter than an epoch, and would hold a begin by chance.
    """

    def __init__(self, run: Run, *, clock: Callable[[], float] = time.perf_counter):
        self._run, self._clock = run, clock
        self._steps = EndlessSteps(run, NullTimer(), self._check_first)
        self._n_in_epoch = 0
        self._n_full = 0  # samples of a full step: the last of an epoch may have fewer
        self._begins_s: list[float] = []  # of begins of epochs, each with its step
        self._full_s: list[float] = []  # of the block's full steps that begin no epoch
        self._latest_s: deque[float] = deque(maxlen=N_QUICK)  # the same, of several blocks
        self._step_s = self._sample_s = math.inf  # means of steps that begin no epoch

    def warm_up(self) -> None:
        """Take steps until they are level.

        Raises:
            TrainingError: a value of the plan is not in force in the run.
        """
        self._step()  # by itself: compiling takes longer than all that follow
        self._begins_s.clear()  # the very first begin builds what stays
        self._compile_short_batch()
        begin_s, times_s = self._clock(), list[float]()
        while (spent_s := self._clock() - begin_s) < MAX_WARM_S and (len(times_s) < N_WARM_STEPS or spent_s < WARM_S):
            start_s = self._clock()
            self._step()
            synchronize_run(self._run)
            times_s.append(self._clock() - start_s)
        self._sum_stalls()  # to know the quick ones
        self._step_s = statistics.median(times_s[len(times_s) // 2 :])
        self._sample_s = self._step_s / self._n_full

    def _compile_short_batch(self) -> None:
        """Take a step on a batch as short as the last of an epoch: code is compiled for one size, in a block else."""
        run, loader = self._run, self._run.loader
        n_last = 0 if run.n_samples is None or loader.drop_last else run.n_samples % run.batch_size
        if n_last and run.plan["compile"]:
            batch = self._steps.take_batch()
            self._steps.step_on(iter([slice_samples(batch, count_samples(batch), slice(n_last))]))
            synchronize_run(run)

    def take_block(self) -> Block:
        """Take a block of steps and time it. Device: synchronises at both ends.

        Raises:
            NonFiniteLossError: the last loss is a NaN or an infinity.
        """
        least = max(MIN_BLOCK_STEPS, STEPS_A_WORKER * self._run.loader.num_workers)
        n_steps = max(math.ceil(BLOCK_S / self._step_s), least)
        n_steps = max(1, min(n_steps, int(MAX_BLOCK_S / self._step_s)))
        for _ in range(N_SETTLING if self._step_s < SLOW_STEP_S else 1):
            self._step()  # begins of epochs count here, too: blocks may keep step with the epochs
        synchronize_run(self._run)
        self._full_s.clear()
        begin_s, n_before, n_samples, n_done = self._clock(), len(self._begins_s), 0, 0
        while n_done < n_steps:
            n_samples, n_done = n_samples + self._step(), n_done + 1
            if self._clock() - begin_s - sum(self._begins_s[n_before:]) > MAX_BLOCK_S:
                break  # steps may stall for seconds each: a block of twenty took two minutes
        synchronize_run(self._run)
        begins_s = self._begins_s[n_before:]
        seconds, stalled_s = self._clock() - begin_s - sum(begins_s), self._sum_stalls()
        if n_plain := n_done - len(begins_s):
            self._step_s = max(seconds - stalled_s, 0.0) / n_plain or seconds / n_plain
            self._sample_s = seconds / (n_samples - len(begins_s) * self._n_full)
        assert self._steps.last_loss is not None
        read_loss(self._steps.last_loss, self._steps.n_done, self._run)
        return Block(n_samples=n_samples, seconds=self._bill(n_samples), stalled_s=stalled_s)

    def _bill(self, n_samples: int) -> float:
        """Compute the seconds of so many samples with their share of begins, not with those in the block.

        By samples, not by steps: a begin has a full batch, so what is left of a short epoch is short ones.
        """
        seconds = n_samples * self._sample_s
        if not self._begins_s:
            return seconds
        assert self._run.steps_per_epoch is not None
        n_epoch = self._run.steps_per_epoch * self._n_full
        n_epoch = n_epoch if self._run.loader.drop_last else min(n_epoch, self._run.n_samples or n_epoch)
        return seconds + n_samples / n_epoch * (statistics.median(self._begins_s) - self._n_full * self._sample_s)

    def _step(self) -> int:
        """Take a step, timed apart where it begins an epoch; return its samples."""
        per_epoch = self._run.steps_per_epoch or 0
        if per_epoch > 1 and self._n_in_epoch == per_epoch:
            synchronize_run(self._run)  # what is queued belongs to the epoch before
        start_s, epoch = self._clock(), self._steps.n_epochs
        n_samples = self._steps()
        is_begin = self._steps.n_epochs != epoch
        self._n_in_epoch = 1 if is_begin else self._n_in_epoch + 1
        self._n_full = max(self._n_full, n_samples)
        if is_begin and per_epoch > 1:
            synchronize_run(self._run)
            self._begins_s.append(self._clock() - start_s)
        elif n_samples == self._n_full:
            self._full_s.append(self._clock() - start_s)
        return n_samples

    def _sum_stalls(self) -> float:
        """Add up the steps that took far longer than quick ones do; on a busy machine most of them may.

        Device: on a GPU a step is only launched, and with data workers steps come in bursts: nothing is told there.
        """
        if not self._full_s or self._run.device.type != "cpu" or self._run.loader.num_workers:
            return 0.0
        self._latest_s.extend(self._full_s)
        quick_s = sorted(self._latest_s)[len(self._latest_s) // 10]
        return sum(step_s for step_s in self._full_s if step_s > STALLED * quick_s)

    def _check_first(self, outcome: StepOutcome) -> None:
        check_observed(self._run)
