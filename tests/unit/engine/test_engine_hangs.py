"""Which rank hangs: what each look at the marks of two ranks shows, and who has then stood still for two seconds."""

import pytest

from fulltilt.engine.ranks.hangs import Sight, Standstill, advance, is_starting
from fulltilt.engine.ranks.process import PHASES, Mark

STEP = len(PHASES) + 1  # marks of a rank that has ended its first step


def see(count, *, is_alone=0, is_waiting=0, is_stopped=False):
    return Sight(Mark(count, 0, 0, is_alone, is_waiting), is_stopped)


@pytest.mark.parametrize(
    ("looks", "hung"),
    [
        pytest.param([(see(STEP + 1), see(STEP))] * 4, [1], id="the one behind"),
        pytest.param([(see(STEP), see(STEP))] * 4, [], id="all stand at the same mark, nobody waits"),
        pytest.param([(see(STEP + 1 + n), see(STEP + n)) for n in range(4)], [], id="behind, but moving"),
        pytest.param([(see(STEP + 1), see(STEP))] * 3 + [(see(STEP + 1), see(STEP + 1))], [], id="caught up at last"),
        pytest.param([(see(STEP + 1, is_alone=1), see(STEP))] * 4, [], id="one works alone, the other waits knowingly"),
        pytest.param([(see(STEP, is_waiting=1), see(STEP))] * 4, [1], id="one waits, the other does not"),
        pytest.param(
            [(see(STEP, is_waiting=1), see(STEP, is_waiting=1))] * 4, [], id="both wait: the exchange goes on"
        ),
        pytest.param(
            [(see(STEP, is_waiting=1), see(STEP, is_waiting=1, is_stopped=True))] * 4, [1], id="stopped as it waits"
        ),
        pytest.param([(see(STEP, is_alone=1), see(STEP, is_stopped=True))] * 4, [1], id="stopped beside one alone"),
        pytest.param([(see(5), see(2))] * 4, [1], id="behind in the first step"),
        pytest.param([(see(5), see(3)), *[(see(5), see(4))] * 2], [], id="slow in the first step"),
        pytest.param([(see(STEP + 9), see(4)), *[(see(STEP + 9), see(5))] * 4], [1], id="the last one to start"),
    ],
)
def test_a_rank_hangs_that_stands_still_while_another_one_needs_it(looks, hung):
    standstills = [Standstill(0, 0.0)] * 2
    for now_s, sights in enumerate(looks):
        standstills = advance(standstills, sights, float(now_s))
    assert [rank for rank, standstill in enumerate(standstills) if now_s - standstill.since_s > 2] == hung


def test_until_the_last_rank_has_taken_its_first_step_the_others_need_only_that_one():
    """Of three ranks the one in the middle waits for the last one, and would be named with the limit of the start."""
    sights = [see(STEP + 9), see(STEP), see(3)]
    after = advance([Standstill(sight.mark.count, 0.0) for sight in sights], sights, 9.0)
    assert [standstill.since_s for standstill in after] == [9.0, 9.0, 0.0]


@pytest.mark.parametrize(
    ("counts", "expected"), [((0, 0), True), ((STEP, 3), True), ((STEP, STEP - 1), True), ((STEP, STEP), False)]
)
def test_the_start_lasts_until_every_rank_has_taken_a_step(counts, expected):
    assert is_starting([see(count) for count in counts]) is expected
