"""Batches copied ahead: in order, one ahead, and nothing freed that a copy may still read."""

import weakref

import pytest
import torch
from step_cases import take_epochs
from torch import nn

from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.step.prefetch import CudaLane, Prefetcher
from fulltilt.levers import Facts, default_plan, find_obstacles, load_catalogue
from fulltilt.tasks import Workload

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class HeldEvent:
    def __init__(self):
        self.is_done = False

    def query(self):
        return self.is_done


class FakeLane:
    """Copies whose end the test decides; reading a batch before it was handed over is an error of the caller."""

    def __init__(self):
        self.events, self.handed_over = [], []

    def copy(self, batch):
        event = HeldEvent()
        self.events.append(event)
        return (batch.clone() if isinstance(batch, torch.Tensor) else [part.clone() for part in batch]), event

    def hand_over(self, batch, event):
        self.handed_over.append((batch, event))


def make_batches(n, taken):
    for i in range(n):
        taken.append(i)
        yield torch.full((2,), i)


def test_every_batch_comes_once_in_order_and_one_is_ahead():
    lane, taken, seen = FakeLane(), [], []
    for i, batch in enumerate(Prefetcher(make_batches(4, taken), lane, seen.append)):
        assert batch.tolist() == [i, i]
        assert taken == list(range(min(4, i + 2)))
        assert lane.handed_over[-1][0] is batch, "the step waits for the copy of this batch"
        assert lane.handed_over[-1][1] is lane.events[i]
    assert len(seen) == 4
    with pytest.raises(StopIteration):
        next(Prefetcher(iter(()), lane))


def test_a_host_batch_lives_until_its_copy_is_done_and_no_longer():
    lane, alive = FakeLane(), []

    def make():
        for i in range(5):
            batch = torch.full((2,), i)
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    batches = Prefetcher(make(), lane)
    next(batches)
    next(batches)
    assert [ref() is not None for ref in alive[:2]] == [True, True], "no copy is done"
    lane.events[0].is_done = True
    next(batches)
    assert [ref() is not None for ref in alive[:3]] == [False, True, True]
    lane.events[2].is_done = True
    next(batches)
    assert alive[1]() is not None, "its copy is still under way, whatever came behind it"
    lane.events[1].is_done = True
    next(batches)
    assert [ref() is not None for ref in alive[:3]] == [False, False, False]


@pytest.mark.parametrize(
    ("plan", "device", "words"),
    [
        ({}, "cpu", "no device to copy batches to"),
        ({"pin_memory": False}, "cuda", "set pin_memory to true"),
        ({"pin_memory": True, "placement": "device"}, "cuda", "made on the device"),
    ],
)
def test_where_nothing_can_be_copied_ahead_it_is_refused(plan, device, words):
    facts = Facts(device_type=device, placements=("stream", "device"))
    assert words in " ".join(find_obstacles(default_plan({"device_prefetch": True} | plan), facts))


def make_workload():
    images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Workload(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)),
        dataset=lambda: MemoryImages("own", images, torch.arange(64) % 4, classes="abcd", transform=None),
        loss=nn.CrossEntropyLoss(),
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_a_run_takes_its_batches_through_the_lane_and_has_the_same_losses(device):
    """On a CPU with the copies of a fake."""
    losses, catalogue, has_gpu = [], load_catalogue(), device == "cuda"
    for value in (False, True):
        plan = default_plan({"batch_size": 16, "pin_memory": has_gpu, "device_prefetch": value and has_gpu})
        with build_run(None, plan, device=device, workload=make_workload(), seed=1) as run:
            if value and not has_gpu:
                run.lane = FakeLane()
            losses.append([float(outcome.loss) for outcome in take_epochs(run)])
            observed = [catalogue[name].observe(run.setup) for name in ("device_prefetch", "pin_memory")]
            assert observed == [value, has_gpu]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


@pytest.mark.gpu
@needs_gpu
def test_batches_on_a_gpu_arrive_whole_while_the_step_is_slow():
    device = torch.device("cuda")
    lane = CudaLane(device, lambda batch: batch.to(device, non_blocking=True))
    sources = (torch.full((1 << 22,), i, dtype=torch.float32).pin_memory() for i in range(40))
    sums = []
    for batch in Prefetcher(sources, lane):
        for _ in range(20):
            batch = batch * 1.0
        sums.append(batch.double().mean())
    assert [float(value) for value in sums] == list(map(float, range(40)))
