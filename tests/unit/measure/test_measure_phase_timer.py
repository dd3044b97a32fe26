"""The phase timer on a fake clock: every figure is exact."""

import pytest

from fulltilt.measure import FakeClock, NullTimer, PhaseTimer, StepSample, check_closure, summarize_phases
from fulltilt.records import PHASES


@pytest.fixture
def clock(request):
    return FakeClock(is_device=getattr(request, "param", False))


@pytest.fixture
def timer(clock):
    return PhaseTimer(clock)


on_device = pytest.mark.parametrize("clock", [True], indirect=True, ids=["device"])


def run_cpu_step(clock, timer, *, data=2.0, forward=3.0, backward=4.0, optimizer=1.0, n_micro=1, n_samples=8):
    timer.start_step()
    for _ in range(n_micro):
        clock.advance(data)
        timer.lap("data_wait")
        timer.lap("h2d")
        clock.advance(forward)
        timer.lap("forward")
        clock.advance(backward)
        timer.lap("backward")
    clock.advance(optimizer)
    timer.lap("optimizer")
    timer.end_step(n_samples)


def test_phases_of_one_step_and_no_copy_on_the_cpu(clock, timer):
    run_cpu_step(clock, timer)
    (step,) = timer.take_steps()
    expected = {"data_wait": 2.0, "h2d": None, "forward": 3.0, "backward": 4.0, "optimizer": 1.0, "other": 0.0}
    assert step == StepSample(phases_ms=expected, step_wall_ms=10.0, n_samples=8)
    assert tuple(step.phases_ms) == PHASES


def test_what_a_cpu_loop_bills_as_a_copy_to_the_device_is_other(clock, timer):
    timer.start_step()
    clock.advance(3)
    timer.lap("h2d")
    clock.advance(1)
    timer.end_step(1)
    (step,) = timer.take_steps()
    assert (step.phases_ms["h2d"], step.phases_ms["other"], step.step_wall_ms) == (None, 4.0, 4.0)


def test_laps_of_one_phase_add_up_over_an_accumulation_window(clock, timer):
    run_cpu_step(clock, timer, n_micro=4)
    (step,) = timer.take_steps()
    assert (step.phases_ms["forward"], step.phases_ms["optimizer"], step.step_wall_ms) == (12.0, 1.0, 37.0)


def test_time_between_two_steps_is_other_and_the_wall_clock_is_covered(clock, timer):
    for _ in range(3):
        run_cpu_step(clock, timer)
        clock.advance(5)  # logging, say
    steps = timer.take_steps()
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
def test_a_phase_never_billed_is_none_and_one_billed_for_nothing_is_zero(clock, timer):
    timer.start_step()
    timer.lap("h2d")
    timer.end_step(1)
    (step,) = timer.take_steps()
    assert (step.phases_ms["h2d"], step.phases_ms["forward"], step.step_device_ms) == (0.0, None, 0.0)


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
    clock.synchronize()
    first, second = timer.take_steps()
    assert first.phases_ms["forward"] == 30
    assert (second.phases_ms["data_wait"], second.phases_ms["other"], second.phases_ms["forward"]) == (15, 0, 10)
    assert second.step_device_ms == 25


def test_a_body_that_raises_before_its_first_lap_bills_nothing_to_the_next_step(clock, timer):
    run_cpu_step(clock, timer)
    timer.start_step()
    clock.advance(100)  # raises here
    run_cpu_step(clock, timer)
    assert [s.step_wall_ms for s in timer.take_steps()] == [10.0, 10.0]


def test_a_dropped_step_and_a_pause_leave_no_trace(clock, timer):
    run_cpu_step(clock, timer)
    timer.start_step()
    clock.advance(50)
    timer.lap("forward")
    timer.pause()
    clock.advance(50)
    run_cpu_step(clock, timer)
    timer.pause()
    clock.advance(500)
    run_cpu_step(clock, timer)
    assert [s.step_wall_ms for s in timer.take_steps()] == [10.0, 10.0, 10.0]
    assert timer.n_lost == 0


def test_in_step_tells_whether_a_step_is_under_way(timer):
    assert not timer.in_step
    timer.start_step()
    assert timer.in_step
    timer.end_step(1)
    assert not timer.in_step


def test_steps_are_taken_once_and_in_order(clock, timer):
    for n in range(1, 4):
        run_cpu_step(clock, timer, n_samples=n)
    assert [s.n_samples for s in timer.take_steps()] == [1, 2, 3]
    assert timer.take_steps() == []


def test_memory_stays_bounded_when_the_device_is_far_behind():
    clock = FakeClock(is_device=True)
    timer = PhaseTimer(clock, n_pending=8)
    for n in range(100):
        timer.start_step()
        clock.enqueue(1000)
        timer.lap("forward")
        timer.end_step(n)
    clock.synchronize()
    steps = timer.take_steps()
    assert len(steps) + timer.n_lost == 100
    assert len(steps) <= 8
    assert [s.n_samples for s in steps] == list(range(100 - len(steps), 100)), "the newest survive"
    assert all(s.phases_ms["forward"] == 1000 for s in steps)


def test_memory_stays_bounded_when_nobody_takes():
    clock = FakeClock()
    timer = PhaseTimer(clock, n_pending=4, n_finished=10)
    for n in range(50):
        run_cpu_step(clock, timer, n_samples=n)
    steps = timer.take_steps()
    assert len(steps) + timer.n_lost == 50
    assert len(steps) <= 10 + 4
    assert steps[-1].n_samples == 49


def test_an_unknown_phase_answers_with_the_nearest(timer):
    timer.start_step()
    with pytest.raises(ValueError, match="did you mean forward"):
        timer.lap("foward")


def test_the_null_timer_has_every_method_of_the_real_one_and_no_steps():
    public = {name for name in vars(PhaseTimer) if not name.startswith("_")}
    assert public | {"n_lost", "clock"} == {name for name in vars(NullTimer) if not name.startswith("_")}
    timer = NullTimer()
    run_cpu_step(FakeClock(), timer)
    assert timer.take_steps() == []


def make_step(wall, **phases):
    return StepSample(
        phases_ms={p: phases.get(p) for p in PHASES} | {"other": wall - sum(phases.values())},
        step_wall_ms=wall,
        n_samples=1,
    )


def test_summary_phases_add_up_to_the_wall_clock_even_with_a_wait_once_an_epoch():
    steps = [make_step(10.0, data_wait=0.5, forward=9.0)] * 9 + [make_step(110.0, data_wait=100.0, forward=9.0)]
    found = summarize_phases(steps)
    assert found.step == pytest.approx(20.0)
    assert found.data_wait == pytest.approx(10.45)
    assert found.data_wait + found.forward + found.other == pytest.approx(found.step)
    assert (found.h2d, found.backward, found.optimizer) == (None, None, None)


def test_a_phase_missing_in_some_steps_counts_as_zero_there():
    assert summarize_phases([make_step(10.0, forward=8.0), make_step(10.0)]).forward == 4.0


def test_a_step_time_from_block_edges_takes_the_rest_as_other():
    found = summarize_phases([make_step(10.0, forward=10.0)], step_ms=10.4)
    assert (found.step, found.other) == (10.4, pytest.approx(0.4))
    assert summarize_phases([make_step(10.0, forward=10.0)], step_ms=9.9).other == 0.0


def test_nothing_to_summarize():
    with pytest.raises(ValueError, match="no finished steps"):
        summarize_phases([])
    found = summarize_phases([], step_ms=3.0)
    assert (found.step, found.forward, found.other) == (3.0, None, None)


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


def test_marks_come_back_to_the_pool():
    clock = Counted()
    timer = PhaseTimer(clock)
    for n in range(500):
        run_cpu_step(clock, timer)
        if n % 10 == 3:
            timer.start_step()
            timer.lap("forward")
            timer.pause()
        timer.take_steps()
    # One mark is held for the step to come; each dropped step keeps its begin, which may end a pending one.
    assert len(clock.out) <= 1 + 2 * 50


@pytest.mark.parametrize("delay_ms", [0.0, 5.0])
def test_steps_timed_one_by_one_give_all_their_marks_back(delay_ms):
    clock = Counted(ready_delay_ms=delay_ms)
    timer = PhaseTimer(clock)
    for _ in range(4):
        timer.pause()
        timer.start_step()
        clock.enqueue(1.0)
        timer.lap("forward")
        timer.end_step(1)
        timer.pause()
    clock.synchronize()
    assert [step.phases_ms["forward"] for step in timer.take_steps()] == pytest.approx([1.0] * 4)
    timer.start_step()
    timer.pause()
    assert clock.out == {}
