"""Threads that stay on cores of their own, and what a pinned thread starts that must not stay there."""

import os
import threading
from pathlib import Path

import pytest
import torch
from tests.unit.levers.lever_cases import CATALOGUE, Network, build, observe, take_steps
from torch.utils.data import Dataset

from fulltilt.errors import PlanObstacleError
from fulltilt.hardware import count_usable_cores
from fulltilt.levers import Facts, default_plan, find_obstacles
from fulltilt.levers.thread_affinity import _run_in_team, leave_core, share_cores

CORES = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs a core for each of two threads")


class Images(Dataset):
    """Its targets are how many cores the process may use that loads them; all are of class 0 otherwise."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(2, 6, 6), torch.tensor(len(os.sched_getaffinity(0)))


def read_masks() -> dict[int, set[int]]:
    masks: dict[int, set[int]] = {}
    _run_in_team(lambda number: masks.update({number: os.sched_getaffinity(0)}))
    return masks


def compute_loss(logits_BK: torch.Tensor, cores_B: torch.Tensor) -> torch.Tensor:
    return logits_BK.square().mean()


def build_pinned(value: bool = True, threads: int = 2, **plan):
    return build(Network, Images, loss=compute_loss, threads=threads, thread_affinity=value, **plan)


def test_each_thread_has_a_core_of_its_own_until_the_run_ends():
    with build_pinned() as run:
        take_steps(run)
        masks = read_masks()
        assert sorted(masks) == [0, 1]
        assert all(len(mask) == 1 for mask in masks.values())
        assert masks[0] != masks[1]
        assert observe(run, "thread_affinity") is True
        assert count_usable_cores() >= 2, "the process still has all of them"
    assert list(read_masks().values()) == [CORES, CORES]
    assert observe(run, "thread_affinity") is False


def test_without_it_no_thread_is_touched_and_a_later_run_takes_it_back():
    run = build_pinned()
    assert observe(run, "thread_affinity") is True
    with build_pinned(False) as other:  # the first was never left, as after an interrupt in a notebook
        take_steps(other)
        assert list(read_masks().values()) == [CORES, CORES]
        assert observe(other, "thread_affinity") is False


def test_threads_that_a_smaller_team_ended_are_pinned_again_in_the_next_epoch():
    with build_pinned() as run:
        torch.set_num_threads(1)
        torch.zeros(2**20).add_(1)
        torch.set_num_threads(2)
        take_steps(run, epoch=1)
        assert observe(run, "thread_affinity") is True


def test_data_workers_have_every_core():
    with build_pinned(num_workers=1) as run:
        (_, cores), *_ = run.start_epoch(0)
        assert len(os.sched_getaffinity(0)) == 1
        assert set(cores.tolist()) == {len(CORES)}


@pytest.mark.slow
def test_spawned_data_workers_too(tmp_path):
    with build_pinned(num_workers=1) as run:
        run.loader.multiprocessing_context = "spawn"
        (_, cores), *_ = run.start_epoch(0)
        assert set(cores.tolist()) == {len(CORES)}


def test_a_thread_beside_the_training_can_leave_its_core():
    seen = []

    def look():
        seen.append(os.sched_getaffinity(0))
        leave_core()
        seen.append(os.sched_getaffinity(0))

    with build_pinned():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(seen[0]) == 1
    assert seen[1] == CORES


PAIRED = {4: 0, 5: 1, 6: 2, 7: 3}  # eight logical cores on four, as most machines number them
NEXT = {1: 0, 3: 2, 5: 4, 7: 6}  # as many virtual ones do


@pytest.mark.parametrize(
    ("siblings", "n_ranks", "shares"),
    [
        ({}, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (PAIRED, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (NEXT, 1, [[0, 2, 4, 6, 1, 3, 5, 7]]),
        (PAIRED, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (NEXT, 2, [[0, 2, 1, 3], [4, 6, 5, 7]]),
        (PAIRED, 3, [[0, 4], [1, 2, 5], [3, 6, 7]]),
        (PAIRED, 16, None),
    ],
)
def test_ranks_share_the_cores_and_a_physical_one_is_taken_twice_last(siblings, n_ranks, shares):
    found = [share_cores(range(8), rank, n_ranks, siblings) for rank in range(n_ranks)]
    if shares is None:
        assert all(found), "more ranks than cores: each has some"
    else:
        assert [sorted(share) for share in found] == [sorted(share) for share in shares]
        assert sorted(core for share in found for core in share) == list(range(8)), "no core twice"
        if n_ranks < 3:
            assert found == shares


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_pins_to_its_own_share(monkeypatch, rank):
    asked = []
    monkeypatch.setattr("fulltilt.levers.thread_affinity.list_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("fulltilt.levers.thread_affinity._read_first_siblings", lambda cores: {})
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: asked.append(tuple(cores)))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with build_pinned():
        assert sorted(asked) == [(2 * rank,), (2 * rank + 1,)]


def test_a_refusal_of_the_system_is_told(monkeypatch):
    def refuse(pid, cores):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr("os.sched_setaffinity", refuse)
        with pytest.raises(PlanObstacleError, match=r"refuses a thread its core.*use thread_affinity false"):
            build_pinned()
    with build_pinned(False):
        assert list(read_masks().values()) == [CORES, CORES]


def test_one_thread_or_more_than_cores_cannot_be_pinned():
    cpu, plan = Facts(device_type="cpu", n_cores_usable=4), default_plan({"thread_affinity": True})
    assert find_obstacles(plan, cpu) == []
    assert "one thread" in find_obstacles(plan.replace(threads=1), cpu)[0]
    assert (
        "8 threads have no core each, there are 4; use thread_affinity false, or threads 4"
        in (find_obstacles(plan.replace(threads=8), cpu)[0])
    )
    assert "on the device" in find_obstacles(plan, Facts(device_type="cuda", n_cores_usable=4))[0]
    assert CATALOGUE["thread_affinity"].candidates(cpu) == (False, True)
    assert CATALOGUE["thread_affinity"].candidates(Facts(device_type="cpu", n_cores_usable=1)) == (False,)


def test_physical_cores_are_read_where_the_system_shows_them(monkeypatch, tmp_path):
    from fulltilt.levers import thread_affinity

    for core, text in ((0, "0-1\n"), (1, "0-1\n"), (4, "4,12\n")):
        Path(tmp_path / f"cpu{core}").write_text(text)
    monkeypatch.setattr(thread_affinity, "SIBLINGS", str(tmp_path / "cpu{}"))
    assert thread_affinity._read_first_siblings([0, 1, 4, 9]) == {0: 0, 1: 0, 4: 4}
