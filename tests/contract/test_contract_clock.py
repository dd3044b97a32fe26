"""What every clock keeps, real or fake, and what the phase timer on top of it makes of it."""

import itertools
import time

import pytest
from tests.fake_clock import FakeClock

from fulltilt.measure import CudaClock, HostClock, PhaseTimer


class HostBench:
    """The host does the work itself, by sleeping."""

    def __init__(self):
        self.clock = HostClock()

    def work(self, ms):
        """Do ``ms`` of host work → how long it took by another clock."""
        begin = time.perf_counter()
        time.sleep(ms / 1e3)
        return (time.perf_counter() - begin) * 1e3

    queue = work

    def settle(self):
        pass


class FakeBench:
    def __init__(self, *, is_device, ready_delay_ms=0.0):
        self.clock = FakeClock(is_device=is_device, ready_delay_ms=ready_delay_ms)

    def work(self, ms):
        self.clock.advance(ms)
        return ms

    def queue(self, ms):
        self.clock.enqueue(ms)
        return ms

    def settle(self):
        self.clock.synchronize()


class CudaBench:
    """Queued work is a spin kernel of a known number of cycles, timed once beforehand between synchronisations."""

    def __init__(self):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        self.torch = torch
        self.clock = CudaClock("cuda", n_events=4)  # so small that it has to grow
        torch.cuda._sleep(1_000_000)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(50_000_000)
        torch.cuda.synchronize()
        self.cycles_per_ms = 50_000_000 / ((time.perf_counter() - begin) * 1e3)

    work = HostBench.work

    def queue(self, ms):
        self.torch.cuda._sleep(int(ms * self.cycles_per_ms))
        return ms

    def settle(self):
        self.torch.cuda.synchronize()


BENCHES = {
    "host": HostBench,
    "fake host": lambda: FakeBench(is_device=False),
    "fake device": lambda: FakeBench(is_device=True),
    "fake late device": lambda: FakeBench(is_device=True, ready_delay_ms=7.0),
    "cuda": CudaBench,
}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["host", "fake host", "fake device", "fake late device", GPU])
def bench(request):
    return BENCHES[request.param]()


@pytest.fixture
def timer(bench):
    bench.settle()
    return PhaseTimer(bench.clock)


def lies_near(measured_ms, planted_ms, slack_ms):
    """Planted time is a lower bound that clocks agree on; ``slack_ms`` is what was measured around it."""
    return planted_ms * 0.9 - 0.2 <= measured_ms <= planted_ms * 1.1 + slack_ms


def test_marks_are_in_order_and_add_up(bench):
    marks = [bench.clock.mark()]
    for _ in range(3):
        bench.queue(1.0)
        marks.append(bench.clock.mark())
    bench.settle()
    assert all(bench.clock.is_ready(m) for m in marks)
    parts = [bench.clock.elapsed_ms(a, b) for a, b in itertools.pairwise(marks)]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(bench.clock.elapsed_ms(marks[0], marks[-1]), abs=0.01)
    bench.clock.release(marks)
    a = bench.clock.mark()
    bench.queue(1.0)
    b = bench.clock.mark()
    bench.settle()
    assert bench.clock.elapsed_ms(a, b) > 0, "marks that were given back can be set again"


def test_host_time_only_moves_forward(bench):
    before = bench.clock.host_ns()
    planted_ms = bench.work(2.0)
    assert (bench.clock.host_ns() - before) / 1e6 >= planted_ms * 0.99


def read_slack_ms(bench, begin, planted_ms):
    bench.settle()
    return max(0.0, (bench.clock.host_ns() - begin) / 1e6 - planted_ms) + 0.5


def test_planted_phases_are_read_right_and_queued_work_is_not_billed_to_the_next_one(bench, timer):
    begin = bench.clock.host_ns()
    timer.start_step()
    planted = {}
    for phase, ms in (("data_wait", 12.0), ("forward", 6.0), ("backward", 9.0), ("optimizer", 0.0)):
        planted[phase] = bench.work(ms) if phase == "data_wait" else bench.queue(ms) if ms else 0.0
        timer.lap(phase)
    timer.end_step(4)
    slack_ms = read_slack_ms(bench, begin, sum(planted.values()))
    (step,) = timer.take_steps()
    for phase, ms in planted.items():
        assert lies_near(step.phases_ms[phase], ms, slack_ms), phase


@pytest.mark.parametrize("bench", ["fake device", "fake late device", GPU], indirect=True)
def test_a_wait_that_the_queue_hides_is_no_starvation(bench, timer):
    begin = bench.clock.host_ns()
    timer.start_step()
    bench.queue(30.0)
    timer.lap("optimizer")
    timer.end_step(1)
    timer.start_step()
    waited_ms = bench.work(5.0)  # the host waits for data while the device still works
    timer.lap("data_wait")
    timer.end_step(1)
    slack_ms = read_slack_ms(bench, begin, 30.0)
    _, second = timer.take_steps()
    assert second.phases_ms["data_wait"] <= min(slack_ms, waited_ms * 0.9)


def run_planted_step(bench, timer, ms, *, fails=False):
    """One step with ``ms`` of work in forward → the most its forward can have taken, by the host's clock."""
    begin = bench.clock.host_ns()
    timer.start_step()
    planted_ms = bench.queue(ms)
    timer.lap("forward")
    if fails:
        raise RuntimeError("planted")
    timer.end_step(1)
    return max(planted_ms * 1.1, (bench.clock.host_ns() - begin) / 1e6) + 0.5


@pytest.mark.parametrize("between", ["a pause", "a step that raises"])
def test_what_is_no_finished_step_is_billed_to_nobody(bench, timer, between):
    limits_ms = [run_planted_step(bench, timer, 1.0)]
    if between == "a pause":
        timer.pause()
        bench.queue(60.0)
        bench.settle()
        timer.resume()
    else:
        with pytest.raises(RuntimeError, match="planted"):
            run_planted_step(bench, timer, 60.0, fails=True)
    limits_ms.append(run_planted_step(bench, timer, 1.0))
    bench.settle()
    steps = timer.take_steps()
    assert len(steps) == 2
    for step, limit_ms in zip(steps, limits_ms, strict=True):
        assert step.phases_ms["forward"] <= limit_ms
        assert step.step_wall_ms <= limit_ms


def test_unfinished_work_is_left_for_later(bench, timer):
    taken = []
    for n in range(1, 5):
        timer.start_step()
        bench.queue(10.0)
        timer.lap("forward")
        timer.end_step(n)
        taken += timer.take_steps()
    if bench.clock.is_device:
        assert len(taken) < 4, "the device cannot have finished yet"
    bench.settle()
    taken += timer.take_steps()
    assert [step.n_samples for step in taken] == [1, 2, 3, 4]
