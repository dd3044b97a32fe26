import pytest

from fulltilt import measure
from fulltilt.measure import FakeClock


def test_a_device_mark_waits_for_the_queue():
    clock = FakeClock(is_device=True)
    clock.enqueue(10)
    mark = clock.mark()
    assert not clock.is_ready(mark)
    clock.advance(9)
    assert not clock.is_ready(mark)
    clock.advance(1)
    assert clock.is_ready(mark)


def test_an_unfinished_mark_cannot_be_read():
    clock = FakeClock(is_device=True)
    begin = clock.mark()
    clock.enqueue(3)
    end = clock.mark()
    with pytest.raises(RuntimeError, match="before the device reached it"):
        clock.elapsed_ms(begin, end)
    clock.synchronize()
    assert clock.elapsed_ms(begin, end) == 3


def test_an_idle_device_starts_late_work_late():
    clock = FakeClock(is_device=True)
    clock.enqueue(2)
    first = clock.mark()
    clock.advance(10)
    clock.enqueue(1)
    second = clock.mark()
    clock.synchronize()
    assert clock.elapsed_ms(first, second) == 9  # 8 idle, 1 of work


def test_the_delay_makes_marks_readable_later_without_moving_them():
    clock = FakeClock(is_device=True, ready_delay_ms=5)
    a = clock.mark()
    clock.enqueue(2)
    b = clock.mark()
    clock.advance(6)
    assert (clock.is_ready(a), clock.is_ready(b)) == (True, False)
    clock.synchronize()
    assert clock.elapsed_ms(a, b) == 2
    assert clock.host_ns() == 7_000_000


def test_without_a_device_queued_work_blocks_the_host():
    clock = FakeClock()
    clock.enqueue(4)
    assert clock.host_ns() == 4_000_000


def test_every_name_the_room_exports_loads():
    assert [name for name in measure.__all__ if getattr(measure, name, None) is None] == []
    with pytest.raises(AttributeError, match="measure_nothing"):
        _ = measure.measure_nothing
