"""measure_steps on a fake clock, where every expected figure is exact; one run on the real clock at the end."""

import dataclasses
import itertools
import time

import pytest
from tests.fake_clock import FakeClock

from fulltilt.measure import NullTimer, PhaseTimer, measure_steps
from fulltilt.records import dumps


@dataclasses.dataclass
class Reading:
    some_total_us: float | None = 0
    steal_jiffies: int | None = 0
    total_jiffies: int | None = 0
    reason: str | None = None


ABSENT = Reading(None, None, None, reason="no PSI here")


class FakeTraining:
    """Steps whose durations are given: ``step_ms`` is a figure or a function of the step's number."""

    def __init__(self, step_ms=10.0, *, wait_ms=0.0, n_samples=32, is_device=False, other_ms=0.0):
        self.clock = FakeClock(is_device=is_device)
        self.timer = PhaseTimer(self.clock)
        self.step_ms = step_ms if callable(step_ms) else lambda n: step_ms
        self.wait_ms, self.other_ms, self.n_samples = wait_ms, other_ms, n_samples
        self.n_done = 0

    def run_step(self):
        self.clock.advance(self.wait_ms)
        self.timer.lap("data_wait")
        self.clock.enqueue(self.step_ms(self.n_done))
        self.timer.lap("forward")
        self.clock.advance(self.other_ms)
        self.n_done += 1
        return self.n_samples

    def run_closed_step(self):
        self.timer.start_step()
        self.timer.end_step(self.run_step())
        return self.n_samples

    def measure(self, run_step=None, **options):
        readers = {"read_pressure": lambda: ABSENT, "read_cpu_times": lambda: ABSENT}
        options = {"timer": self.timer, "synchronize": self.clock.synchronize} | readers | options
        return measure_steps(run_step or self.run_step, **options)


def notes(result, *words):
    """Whether one of the notes says each of ``words``."""
    return all(any(said in note for note in result.notes) for said in words)


def test_throughput_phases_and_counts():
    result = FakeTraining(9.0, wait_ms=1.0).measure(n_steps=40)
    assert result.samples_per_s == pytest.approx(3200)
    assert result.samples_per_s_ci95 == (pytest.approx(3200), pytest.approx(3200))
    assert result.block_samples_per_s == pytest.approx([3200] * 5)
    assert (result.phases_ms.data_wait, result.phases_ms.forward, result.phases_ms.step) == pytest.approx((1, 9, 10))
    assert result.phases_ms.h2d is None
    assert (result.n_steps, [b.n_steps for b in result.blocks]) == (40, [8] * 5)
    assert (result.is_steady, result.notes) == (True, ())
    assert (result.cpu_pressure_pct, result.steal_pct) == (None, None)
    assert result.null_reasons == {"cpu_pressure_pct": "no PSI here", "steal_pct": "no PSI here"}
    assert '"samples_per_s"' in dumps(result)


def test_the_first_step_and_a_warmup_ramp_do_not_count():
    training = FakeTraining(lambda n: 5000.0 if n == 0 else max(10.0, 40.0 - n))
    result = training.measure(n_steps=24)
    assert result.first_step_s == pytest.approx(5.0)
    assert result.phases_ms.step == pytest.approx(10.0)
    assert result.n_warmup_steps >= 30
    assert result.n_warmup_steps + result.n_steps == training.n_done
    result = FakeTraining(lambda n: 100_000.0 if n == 0 else 10.0).measure(max_warmup_s=1.0)
    assert result.is_steady, "a first step that compiles does not use up the warm-up"
    assert [b.n_steps for b in result.blocks] == [8] * 5


@pytest.mark.parametrize(
    ("step_ms", "options", "said"),
    [
        (lambda n: 10.0 + n, {"max_warmup_s": 2.0, "max_measure_s": 1.0}, "no steady state within 2 s"),
        (lambda n: 10.0 * 1.04**n, {"max_warmup_s": 0.2}, "still changed by more than 10 %"),
        (10.0, {"epoch_steps": 1000, "max_measure_s": 8.0}, "epoch of 1000 steps is too long"),
    ],
)
def test_what_was_not_measured_as_it_should_be_is_noted(step_ms, options, said):
    result = FakeTraining(step_ms).measure(**options)
    assert notes(result, said)
    assert result.is_steady is ("epoch_steps" in options)


def test_warmup_behind_a_plateau_is_found_among_the_timed_blocks():
    training = FakeTraining(lambda n: 40.0 if n < 20 else 10.0)
    result = training.measure()
    assert result.phases_ms.step == pytest.approx(10.0)
    assert len(result.blocks) == 5
    assert notes(result, "still warm-up")
    assert result.n_warmup_steps + result.n_steps == training.n_done


@pytest.mark.parametrize(
    ("step_ms", "options", "sizes", "said"),
    [
        (1000, {"n_steps": 1000, "max_measure_s": 20}, [4] * 5, ["blocks of 4 steps instead", "ended after 20 steps"]),
        (1000, {"max_measure_s": 0.5}, [1, 1], []),
        (10_000, {"max_measure_s": None}, [8] * 5, []),
        (0.1, {"n_steps": 40}, [200] * 5, []),
        (30, {"min_block_steps": 5, "n_steps": 20}, [10] * 5, []),
        (1000, {"min_block_steps": 12, "max_measure_s": 1.0}, [12, 12], []),
    ],
    ids=["fewer", "never below two", "no limit", "short steps", "whole epochs", "epochs are not split"],
)
def test_blocks_are_as_long_and_as_many_as_steps_epochs_and_time_allow(step_ms, options, sizes, said):
    # where blocks are epochs of 5, what happens once an epoch is in each
    is_epoch = options.get("min_block_steps") == 5
    result = FakeTraining(lambda n: 130 if n % 5 == 0 else 5) if is_epoch else FakeTraining(step_ms)
    result = result.measure(**options)
    assert [b.n_steps for b in result.blocks] == sizes
    assert result.phases_ms.step == pytest.approx(step_ms)
    assert (result.samples_per_s, result.samples_per_s_ci95[0]) == pytest.approx((32e3 / step_ms,) * 2)
    assert notes(result, *said)


@pytest.mark.parametrize("offset", [0, 5, 40, 85])
def test_the_begin_of_an_epoch_is_in_the_figure_wherever_the_measurement_starts(offset):
    """The begin of an epoch takes 350 ms in which tasks wait for a core: workers start. It is no contention."""
    training = FakeTraining(lambda n: 353.0 if (n + offset) % 90 == 0 else 3.0)
    host = FakeHost(training)

    def run_step():
        begin_s = training.clock.host_ns() / 1e9
        n = training.run_step()
        host.us += 1e6 * (training.clock.host_ns() / 1e9 - begin_s - 0.003)
        return n

    result = training.measure(run_step, n_steps=10, max_measure_s=8.0, epoch_steps=90, read_pressure=host.read)
    assert result.samples_per_s == pytest.approx(32 * 90 / (90 * 0.003 + 0.350), rel=1e-6)
    assert {b.n_steps for b in result.blocks} == {90}
    assert result.notes == ()


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (FakeTraining(10.0, is_device=True), (10.0, 10.0, 0.0)),
        # 8 steps: 8 waits of 10 ms, the last step's 4 ms at the end
        (FakeTraining(4.0, wait_ms=10.0, is_device=True), (10.5, 4.0, (10 + 7 * 6) / 8)),
    ],
    ids=["the queue is drained", "a device that starves waits for data"],
)
def test_asynchronous_steps_are_timed_to_the_end_of_their_queue(training, expected):
    result = training.measure()
    phases = result.phases_ms
    assert (phases.step, phases.forward, phases.data_wait) == pytest.approx(expected)
    assert "phases_ms" not in result.null_reasons


def test_phases_that_are_missing_or_leave_time_unclaimed_are_void_and_keep_the_throughput():
    without_timer = FakeTraining(10.0)
    without_timer.timer = NullTimer()
    without_timer.timer.clock = without_timer.clock
    for training, why in ((FakeTraining(9.0, other_ms=1.0), "10.0 %"), (without_timer, "no step was timed")):
        result = training.measure()
        assert why in result.null_reasons["phases_ms"]
        assert (result.phases_ms.forward, result.phases_ms.step) == (None, pytest.approx(10.0))
        assert result.samples_per_s == pytest.approx(3200)


class FakeHost:
    """Pressure and steal whose rise per second of the clock is a function of the time."""

    def __init__(self, training, *, pressure=lambda s: 0.0, steal=lambda s: 0.0):
        self.training, self.pressure, self.steal = training, pressure, steal
        self.us = self.jiffies = 0.0
        self.last_s = 0.0

    def read(self):
        now_s = self.training.clock.host_ns() / 1e9
        passed_s = now_s - self.last_s
        self.us += self.pressure(self.last_s) * passed_s * 1e6
        self.jiffies += self.steal(self.last_s) * passed_s * 200
        self.last_s = now_s
        return Reading(some_total_us=self.us, steal_jiffies=round(self.jiffies), total_jiffies=round(now_s * 200))


def test_pressure_and_steal_are_read_over_the_timed_blocks():
    training = FakeTraining(100.0)
    host = FakeHost(training, pressure=lambda s: 0.25, steal=lambda s: 0.04)
    result = training.measure(read_pressure=host.read, read_cpu_times=host.read)
    assert (result.cpu_pressure_pct, result.steal_pct) == (pytest.approx(25.0), pytest.approx(4.0, abs=0.5))
    assert (result.null_reasons, result.notes) == ({}, ()), "pressure in all blocks alike is the plan's own"


@pytest.mark.parametrize("kind", ["pressure", "steal"])
def test_a_contended_block_is_run_again(kind):
    training = FakeTraining(lambda n: 150.0 if 19 <= n < 27 else 100.0)  # the third timed block
    host = FakeHost(training, **{kind: lambda s: 0.6 if 1.9 <= s < 3.1 else 0.0})
    result = training.measure(read_pressure=host.read, read_cpu_times=host.read)
    assert result.phases_ms.step == pytest.approx(100.0)
    assert len(result.blocks) == 5
    assert notes(result, "contended blocks that were run again")


def test_repeats_are_bounded_and_what_stays_contended_is_noted():
    training = FakeTraining(100.0)
    host = FakeHost(training, steal=lambda s: 0.3)
    result = training.measure(read_cpu_times=host.read, n_steps=40)
    assert len(result.blocks) == 5
    assert sum(b.n_steps for b in result.blocks) == 40
    assert notes(result, "ran while other work took the cores")
    assert training.n_done == result.n_warmup_steps + 40 + 2 * 8


def test_one_tick_of_steal_in_a_short_block_is_no_contention():
    training = FakeTraining(1.0)
    jiffies = itertools.count()
    readings = iter(lambda: Reading(steal_jiffies=next(jiffies) // 2, total_jiffies=next(jiffies) * 2), None)
    assert training.measure(read_cpu_times=lambda: next(readings)).notes == ()


def test_blocks_are_told_and_what_happens_between_or_before_them_is_in_no_step():
    training, told = FakeTraining(10.0), []
    training.run_closed_step()

    def on_block(block):
        told.append(block)
        training.clock.advance(500.0)

    result = training.measure(training.run_closed_step, on_block=on_block)
    assert [len(b.steps) for b in told] == [b.n_steps for b in told], "a step that sets its own ends counts once"
    assert [b.stage for b in told].count("measure") == len(result.blocks)
    assert sum(b.n_steps for b in told if b.stage == "warmup") == result.n_warmup_steps
    assert [step.step_wall_ms for block in result.blocks for step in block.steps] == pytest.approx([10.0] * 40)
    assert (result.samples_per_s, result.phases_ms.forward) == pytest.approx((3200, 10.0))
    assert "phases_ms" not in result.null_reasons


def test_a_step_without_samples_is_refused_and_a_clock_that_stands_still_does_not_hang():
    with pytest.raises(ValueError, match="consumed 0 samples"):
        FakeTraining(n_samples=0).measure()
    assert "phases_ms" in FakeTraining(0.0).measure(n_steps=8).null_reasons


def test_on_the_real_clock_figures_lie_between_what_was_measured_inside_and_around_them():
    """Each bound is a reading of the same clock next to the mark it bounds, so a busy machine shifts both."""
    timer, blocks, readings = PhaseTimer(), [], [(time.perf_counter(),) * 4]

    def run_step():
        begin = time.perf_counter()
        time.sleep(0.002)
        before_wait_lap = time.perf_counter()
        timer.lap("data_wait")
        after_wait_lap = time.perf_counter()
        time.sleep(0.004)
        readings.append((begin, before_wait_lap, after_wait_lap, time.perf_counter()))
        timer.lap("forward")
        return 16

    def on_block(block):
        blocks.append((block, len(readings), time.perf_counter()))

    result = measure_steps(run_step, timer=timer, n_steps=40, on_block=on_block)
    for (_, _, previous_told), (block, n_read, told) in itertools.pairwise(blocks):
        own = readings[n_read - block.n_steps : n_read]
        assert own[-1][3] - own[0][0] <= block.seconds <= told - previous_told
        ends = [reading[3] for reading in readings[n_read - block.n_steps - 1 :]]
        for step, (begin, before_lap, after_lap, end), previous in zip(block.steps, own, ends, strict=False):
            least_wait_ms = (before_lap - begin) * 1e3
            assert least_wait_ms <= step.phases_ms["data_wait"] <= (after_lap - previous) * 1e3
            assert (end - after_lap) * 1e3 <= step.phases_ms["forward"] <= step.step_wall_ms - least_wait_ms
    timed_s = sum(b.seconds for b in result.blocks)
    assert result.samples_per_s == pytest.approx(16 * result.n_steps / timed_s)
    assert result.samples_per_s_ci95[0] < result.samples_per_s < result.samples_per_s_ci95[1]
