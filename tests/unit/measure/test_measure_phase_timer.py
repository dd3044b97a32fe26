"""The phase timer on a fake clock: every figure is exact."""

import dataclasses

import pytest
from tests.fake_clock import FakeClock

from fulltilt.measure import NullTimer, PhaseTimer, StepSample, check_closure, summarize_phases
from fulltilt.records import PHASES


@pytest.fixture
def clock(request):
    return FakeClock(is_device=getattr(request, "param", False))


@pytest.fixture
def timer(clock):
    return PhaseTimer(clock)


on_device = pytest.mark.parametrize("clock", [True], indirect=True)


def run_cpu_step(clock, timer, *, n_micro=1, n_samples=8):
    timer.start_step()
    micro_ms = {"data_wait": 2, "h2d": 0, "forward": 3, "backward": 4}
    for phase, ms in [*micro_ms.items()] * n_micro + [("optimizer", 1)]:
        clock.advance(ms)
        timer.lap(phase)
    timer.end_step(n_samples)


@pytest.mark.parametrize("n_micro", [1, 4])
def test_laps_of_one_phase_add_up_over_a_step_and_a_cpu_copies_nothing_to_a_device(clock, timer, n_micro):
    run_cpu_step(clock, timer, n_micro=n_micro)
    (step,) = timer.take_steps()
    micro = {"data_wait": 2.0 * n_micro, "h2d": None, "forward": 3.0 * n_micro, "backward": 4.0 * n_micro}
    expected = {**micro, "optimizer": 1.0, "other": 0.0}
    assert step == StepSample(phases_ms=expected, step_wall_ms=9.0 * n_micro + 1, n_samples=8)
    assert tuple(step.phases_ms) == PHASES


def test_what_a_cpu_loop_bills_as_a_copy_to_the_device_is_other(clock, timer):
    timer.start_step()
    clock.advance(3)
    timer.lap("h2d")
    clock.advance(1)
    timer.end_step(1)
    (step,) = timer.take_steps()
    assert (step.phases_ms["h2d"], step.phases_ms["other"], step.step_wall_ms) == (None, 4.0, 4.0)


def test_time_between_two_steps_is_other_and_the_wall_clock_is_covered_by_steps_taken_once(clock, timer):
    for n in range(1, 4):
        run_cpu_step(clock, timer, n_samples=n)
        clock.advance(5)  # logging, say
    steps = timer.take_steps()
    assert timer.take_steps() == []
    assert [s.n_samples for s in steps] == [1, 2, 3]
    assert [s.phases_ms["other"] for s in steps] == [0.0, 5.0, 5.0]
    assert [s.phases_ms["data_wait"] for s in steps] == [2.0, 2.0, 2.0]
    assert sum(s.step_wall_ms for s in steps) == 3 * 10 + 2 * 5


def test_a_loop_that_never_calls_start_again_bills_the_first_lap_from_the_end_of_the_step_before(clock, timer):
    for _ in range(3):
        clock.advance(1)
        timer.lap("data_wait")
        timer.end_step(1)
    assert [s.phases_ms["data_wait"] for s in timer.take_steps()] == [1.0, 1.0], "the first had no begin"


@on_device
def test_starvation_is_the_gap_that_the_queue_did_not_hide(clock, timer):
    timer.start_step()
    clock.enqueue(30)
    timer.lap("forward")
    timer.end_step(1)
    timer.start_step()
    clock.advance(45)  # the host waits 45 ms for data; the device works for 30 of them
    timer.lap("data_wait")
    clock.enqueue(10)
    timer.lap("forward")
    timer.end_step(1)
    timer.start_step()
    timer.lap("h2d")
    timer.end_step(1)
    clock.synchronize()
    first, second, third = timer.take_steps()
    assert first.phases_ms["forward"] == 30
    assert (second.phases_ms["data_wait"], second.phases_ms["other"], second.phases_ms["forward"]) == (15, 0, 10)
    assert second.step_device_ms == 25
    billed_for_nothing, never_billed = third.phases_ms["h2d"], third.phases_ms["forward"]
    assert (billed_for_nothing, never_billed, third.step_device_ms) == (0.0, None, 0.0)


def test_a_step_that_raises_a_dropped_one_and_a_pause_leave_no_trace(clock, timer):
    run_cpu_step(clock, timer)
    timer.start_step()
    clock.advance(100)  # raises before its first lap
    run_cpu_step(clock, timer)
    timer.start_step()
    clock.advance(50)
    timer.lap("forward")
    assert timer.in_step
    timer.pause()
    clock.advance(50)
    run_cpu_step(clock, timer)
    assert not timer.in_step
    timer.pause()
    clock.advance(500)
    run_cpu_step(clock, timer)
    assert [s.step_wall_ms for s in timer.take_steps()] == [10.0] * 4
    assert timer.n_lost == 0


@pytest.mark.parametrize("is_device", [True, False])
def test_memory_stays_bounded_when_the_device_is_far_behind_or_nobody_takes(is_device):
    clock = FakeClock(is_device=is_device)
    timer = PhaseTimer(clock, n_pending=8, n_finished=10)
    for n in range(100):
        timer.start_step()
        clock.enqueue(1000)
        timer.lap("forward")
        timer.end_step(n)
    clock.synchronize()
    steps = timer.take_steps()
    assert len(steps) + timer.n_lost == 100
    assert len(steps) <= (8 if is_device else 18)
    assert [s.n_samples for s in steps] == list(range(100 - len(steps), 100)), "the newest survive"
    assert all(s.phases_ms["forward"] == 1000 for s in steps)


def test_the_null_timer_has_every_method_of_the_real_one_and_no_steps():
    public = {name for name in vars(PhaseTimer) if not name.startswith("_")}
    assert public | {"n_lost", "clock", "in_step"} == {name for name in vars(NullTimer) if not name.startswith("_")}
    timer = NullTimer()
    run_cpu_step(FakeClock(), timer)
    assert timer.take_steps() == []


def make_step(wall, **phases):
    phases_ms = {p: phases.get(p) for p in PHASES} | {"other": wall - sum(phases.values())}
    return StepSample(phases_ms=phases_ms, step_wall_ms=wall, n_samples=1)


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (
            [make_step(10.0, data_wait=0.5, forward=9.0)] * 9 + [make_step(110.0, data_wait=100.0, forward=9.0)],
            {},
            {"step": 20.0, "data_wait": 10.45, "forward": 9.0, "other": 0.55},
        ),
        ([make_step(10.0, forward=8.0), make_step(10.0)], {}, {"step": 10.0, "forward": 4.0, "other": 6.0}),
        ([make_step(10.0, forward=10.0)], {"step_ms": 10.4}, {"step": 10.4, "forward": 10.0, "other": 0.4}),
        ([make_step(10.0, forward=10.0)], {"step_ms": 9.9}, {"step": 9.9, "forward": 10.0, "other": 0.0}),
        ([], {"step_ms": 3.0}, {"step": 3.0}),
    ],
    ids=["a wait once an epoch", "a phase in some steps", "time between blocks", "less than the phases", "no step"],
)
def test_summary_phases_add_up_to_the_wall_clock_and_absent_ones_are_none(steps, options, expected):
    found = dataclasses.asdict(summarize_phases(steps, **options))
    assert {name: value for name, value in found.items() if value is not None} == pytest.approx(expected)


def test_an_unknown_phase_answers_with_the_nearest_and_no_steps_have_no_summary(timer):
    timer.start_step()
    with pytest.raises(ValueError, match="did you mean forward"):
        timer.lap("foward")
    with pytest.raises(ValueError, match="no finished steps"):
        summarize_phases([])


@pytest.mark.parametrize(
    ("steps", "options", "said"),
    [
        ([make_step(100.0, forward=96.0)], {}, None),
        ([make_step(100.0, forward=94.0)], {}, "6.0 %"),
        ([make_step(100.0, forward=100.0)], {"step_ms": 101.0}, None),
        ([make_step(100.0, forward=100.0)], {"step_ms": 120.0}, "no phase claims"),
        ([make_step(100.0, forward=100.0)], {"step_ms": 80.0}, "exceed"),
        ([], {}, "no step"),
        ([make_step(5.0)], {}, "100.0 %"),
        ([make_step(0.0)], {}, "0.0 ms"),
    ],
)
def test_closure_names_the_share_nobody_claims(steps, options, said):
    found = check_closure(steps, **options)
    assert found is None if said is None else said in found


class Mark(int):
    pass


class Counted(FakeClock):
    """Knows which marks are out, as a pool of events sees them."""

    def __init__(self, **options):
        super().__init__(is_device=True, **options)
        self.out = {}

    def mark(self):
        handle = Mark(super().mark())
        self.out[id(handle)] = handle
        return handle

    def release(self, handles):
        for handle in handles:
            del self.out[id(handle)]  # a KeyError: given back twice


@pytest.mark.parametrize("delay_ms", [0.0, 5.0])
def test_marks_come_back_to_the_pool(delay_ms):
    clock = Counted(ready_delay_ms=delay_ms)
    timer = PhaseTimer(clock)
    for n in range(200):
        run_cpu_step(clock, timer)
        if n % 10 == 3:
            timer.start_step()
            timer.lap("forward")
            timer.pause()
        if n % 10 == 5:  # one timed by itself
            timer.pause()
            timer.start_step()
            clock.enqueue(1.0)
            timer.lap("forward")
            timer.end_step(1)
            timer.pause()
        timer.take_steps()
    clock.synchronize()
    timer.pause()
    timer.take_steps()
    assert clock.out == {}
