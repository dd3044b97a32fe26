"""Memory that tensors free, kept by the C library: seen in processes of their own, which is where it can be set."""

import pytest
import torch
from tests.unit.levers.page_faults import FEW, start

from fulltilt.levers import Facts, Setup, find_obstacles, load_catalogue
from fulltilt.levers.retain_freed_memory import find_obstacle

pytestmark = pytest.mark.skipif(find_obstacle() is not None, reason=f"no glibc that can keep memory: {find_obstacle()}")


@pytest.fixture(scope="module")
def train():
    with start() as train:
        yield train


@pytest.mark.slow
def test_more_than_2_gib_is_kept_too(train):
    """A threshold of 2 GiB, the largest that mallopt takes, gave them all back."""
    (kept,) = train(True, n=600_000_000)
    assert kept["faults"] < FEW


@pytest.mark.slow
def test_the_same_is_learned(train):
    (kept,), (usual,) = train(True), train(False)
    assert kept["losses"] == usual["losses"]
    assert len(set(kept["losses"])) == 6


def test_a_run_without_it_says_that_one_before_it_kept_memory(train):
    """What lies free between blocks in use is still taken first; the end of the heap is given back."""
    kept, usual = train(True, False)
    assert kept["observed"]
    assert kept["faults"] < FEW
    assert not usual["observed"]
    assert "goes without it" in usual["notes"][0]


@pytest.mark.parametrize(
    ("retain", "room_bytes"),
    [
        pytest.param(True, 110 * 2**20, id="on, no room for the probe"),
        pytest.param(True, 500 * 2**20, id="on, room for the probe", marks=pytest.mark.slow),
        pytest.param(False, 110 * 2**20, id="off, no room for the probe", marks=pytest.mark.slow),
        pytest.param(False, 500 * 2**20, id="off, room for the probe", marks=pytest.mark.slow),
    ],
)
def test_asking_under_a_memory_limit_changes_nothing(train, retain, room_bytes):
    """A block that glibc cannot have would move the thread to an arena without the lever: pages would be anew."""
    free, (limited,) = train(True, False)[0 if retain else 1], train(retain, room_bytes=room_bytes)
    assert limited["observed"] is retain
    assert limited["notes"] == []
    assert limited["losses"] == free["losses"]
    assert (limited["faults"] < FEW) is retain


@pytest.mark.parametrize("value", [True, False])
def test_on_a_gpu_the_processs_own_memory_is_left_alone(monkeypatch, value):
    """A default of False took from a process what its environment had set, with a remedy that is refused there."""
    lever, setup = load_catalogue()["retain_freed_memory"], Setup(device=torch.device("cuda"))
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("the C library was asked"))
    lever.apply(setup, value)
    assert lever.observe(setup) is False
    assert setup.notes == []


def test_an_environment_that_keeps_memory_already_is_said_and_overruled():
    with start(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="2000000000") as train:
        (usual,) = train(False)
    assert not usual["observed"]
    assert "its environment (MALLOC_" in usual["notes"][0]


def test_a_c_library_or_an_allocator_with_rules_of_its_own_is_an_obstacle(monkeypatch):
    cpu = Facts(device_type="cpu")
    assert find_obstacles({"retain_freed_memory": True}, cpu) == []
    find_obstacle.cache_clear()
    monkeypatch.setattr("os.confstr", lambda name: "glibc 2.31")
    try:
        assert "glibc 2.33 or newer, and the C library here is glibc 2.31" in find_obstacle()
        assert "retain_freed_memory=True" in find_obstacles({"retain_freed_memory": True}, cpu)[0]
        find_obstacle.cache_clear()
        monkeypatch.undo()
        monkeypatch.setattr("pathlib.Path.read_text", lambda path: "7f00 r-xp 0 /usr/lib/libjemalloc.so.2\n")
        assert "libjemalloc is loaded" in find_obstacle()
    finally:
        find_obstacle.cache_clear()
