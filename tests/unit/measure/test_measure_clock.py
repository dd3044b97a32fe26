import pytest

from fulltilt import measure
from fulltilt.measure import FakeClock


def test_marks_of_a_fake_device_are_reached_when_its_queue_is_and_readable_after_the_delay():
    clock = FakeClock(is_device=True, ready_delay_ms=5)
    begin = clock.mark()
    clock.enqueue(2)
    end = clock.mark()
    clock.advance(6)
    assert (clock.is_ready(begin), clock.is_ready(end)) == (True, False)
    with pytest.raises(RuntimeError, match="before the device reached it"):
        clock.elapsed_ms(begin, end)
    clock.synchronize()
    assert clock.elapsed_ms(begin, end) == 2
    assert clock.host_ns() == 7_000_000
    clock.advance(10)
    clock.enqueue(1)
    late = clock.mark()
    clock.synchronize()
    assert clock.elapsed_ms(end, late) == 16, "an idle device starts late work late: 15 idle, 1 of work"


def test_without_a_device_queued_work_blocks_the_host():
    clock = FakeClock()
    clock.enqueue(4)
    assert clock.host_ns() == 4_000_000


def test_every_name_the_room_exports_loads():
    assert [name for name in measure.__all__ if getattr(measure, name, None) is None] == []
