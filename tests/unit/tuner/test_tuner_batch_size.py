"""The largest batch that fits: the search on a made-up memory, real tries under a real limit, and clear ends."""

import dataclasses
import re

import pytest

from fulltilt import find_batch_size
from fulltilt.errors import DeviceMemoryError, TrainingError, UsageError
from fulltilt.levers import default_plan
from fulltilt.records import Trial
from fulltilt.tuner.batch_size import search
from fulltilt.tuner.question.options import TuneOptions

WIDE = "tests.unit.tuner.wide_workload:workload"


@dataclasses.dataclass
class Memory:
    """Holds ``room`` samples; a larger batch ends as ``status``."""

    room: int
    status: str = "out_of_memory"
    tried: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, size):
        self.tried.append(size)
        ok = size <= self.room
        plan = default_plan({"batch_size": size})
        reason = None if ok else "no room"
        return Trial(id=f"b{size}", plan=plan, status="ok" if ok else self.status, reason=reason)  # type: ignore[arg-type]


def options(limit_bytes=None):
    return TuneOptions(
        batch_sizes=None, num_workers=None, n_steps=3, device="cpu", memory_limit_bytes=limit_bytes, strategy="quick",
        budget_s=None, free_batch=False, lr_rule="none", deadline_s=60, deadline_asked_s=None, max_measure_s=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("room", "start", "most", "found"),
    [(100, 8, 10_000, range(94, 101)), (1, 32, 100, [1]), (7, 32, 100, [7]), (10**6, 8, 300, [300]), (5, 1, 6, [5])],
)
@pytest.mark.parametrize("status", ["out_of_memory", "timeout"])
def test_the_search_ends_within_a_sixteenth_of_what_fits(room, start, most, found, status):
    memory = Memory(room, status)
    assert search(memory, start=start, most=most, limit=options()) in found
    assert len(memory.tried) == len(set(memory.tried)) <= 13


def test_no_batch_that_fits_is_an_error_with_a_remedy_and_so_is_any_other_failure():
    with pytest.raises(DeviceMemoryError, match=r"a batch of 1 does not fit in the memory limit of 1.00 GiB on cpu"):
        search(Memory(0), start=4, most=8, limit=options(2**30))
    with pytest.raises(TrainingError, match=r"a batch of 1 took too long.*longer deadline"):
        search(Memory(0, "timeout"), start=4, most=8, limit=options())
    with pytest.raises(TrainingError, match="a batch of 8 failed, and not for its size: no room"):
        search(Memory(5, "error"), start=4, most=64, limit=options())


@pytest.mark.parametrize(
    ("given", "said"), [({"mode": "eval"}, "mode 'eval'"), ({"start": 0}, "start 0"), ({"limit": 2.5}, "limit 2.5")]
)
def test_wrong_arguments_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        find_batch_size(WIDE, **given)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_real_limit_bounds_the_batch_and_answers_take_less_than_steps(mode):
    """A sample's activations take 4 MiB and more: under 640 MiB, with torch itself in it, some tens fit."""
    told = {}
    found = find_batch_size(
        WIDE,
        start=2,
        memory_limit="640MiB",
        mode=mode,
        device="cpu",
        on_attempt=lambda size, what: told.update({size: what}),
    )
    assert told[found] == "fits"
    smallest = min(size for size, what in told.items() if what != "fits")
    assert re.search(r"the limit is 640 MiB|memory|allocate", told[smallest])
    assert "log:" not in told[smallest]
    assert found < smallest <= found + max(1, found // 16)
    low, high = (2, 60) if mode == "train" else (20, 200)
    assert low <= found <= high


@pytest.mark.slow
def test_a_small_data_set_bounds_the_batch_and_too_little_memory_is_told():
    assert find_batch_size(WIDE, start=2, limit=5, device="cpu") == 5
    with pytest.raises(
        DeviceMemoryError, match=r"a batch of 1 does not fit in the memory limit of .*larger memory_limit"
    ):
        find_batch_size(f"{WIDE.partition(':')[0]}:huge", start=2, memory_limit="640MiB", device="cpu")
