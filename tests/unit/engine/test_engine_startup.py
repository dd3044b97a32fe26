"""What a run says at its start, and whether the host's memory will do."""

import os

import pytest
import torch
from training_cases import Points, PointStream, build_config, build_cpu_run, run_train

from fulltilt.engine.build import startup
from fulltilt.engine.build.budget import HostBudget, estimate_host_budget
from fulltilt.engine.build.startup import describe_start
from fulltilt.engine.check import checklist as check
from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.records import RunStarted

GIB = 2**30


def build(dataset=Points, **changes):
    return build_cpu_run(build_config(**changes), dataset=dataset)


def test_the_start_says_device_numerics_batch_and_data(tmp_path):
    config = build_config(data__batch_size=8, speed__accumulate=4, speed__precision="bf16", data__num_workers=1)
    _, recorder = run_train(tmp_path, config, max_steps=1)
    (started,) = recorder.of(RunStarted)
    assert (started.n_ranks, started.pid) == (1, os.getpid())
    device, numerics, batch, data = started.report
    assert device.startswith("CPU: ")
    assert f"torch uses {torch.get_num_threads()} threads" in device
    assert "precision bf16 by autocast" in numerics
    assert batch == "batch: 8 × accumulate 4, 32 samples an update; 90 samples, 3 optimizer steps an epoch"
    assert data.startswith("data: 1 worker, 2 batches ahead each")


@pytest.mark.parametrize(("share", "limited"), [(1.0, ""), (0.25, ", limited to 6.00 GiB")])
def test_a_gpu_is_told_with_what_is_free_on_it_and_what_the_limit_leaves(monkeypatch, share, limited):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX 3060")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(startup, "is_wsl", lambda: False)
    assert startup.describe_gpu(torch.device("cuda:0")) == (
        f"GPU: NVIDIA RTX 3060, 20.00 GiB of 24.00 GiB free{limited}, CUDA 13.0, cuDNN 91002 (benchmark on)"
    )


def test_numerics_are_those_set_up_not_those_asked_for_and_a_stream_has_no_length():
    with build(speed__precision="fp16", optim__warmup=0) as run:
        assert "loss scaling" in describe_start(run, None)[1]
        run.setup.scaler = None
        assert "loss scaling" not in describe_start(run, None)[1]
    with build(PointStream) as run:
        assert describe_start(run, None)[2].endswith("a stream of samples")


@pytest.mark.parametrize(("n_ranks", "part", "val_part"), [(1, 16, 31), (3, 6, 11)])
def test_batches_on_their_way_are_counted_by_their_bytes(n_ranks, part, val_part):
    """A sample is 6 floats and a label of 8 bytes. Of 16 samples each of 3 ranks gets at most 6, of 31 at most 11."""
    with build(data__num_workers=2, data__prefetch_factor=3, data__val_batch_size=31) as run:
        run.world, before = World(n_ranks=n_ranks), torch.get_rng_state()
        budget = estimate_host_budget(run)
        run.world = ALONE
    assert torch.equal(torch.get_rng_state(), before), "looking at a sample leaves the random numbers alone"
    assert (budget.n_workers, budget.batch_bytes) == (2 * n_ranks, part * (6 * 4 + 8))
    assert budget.batches_bytes == 2 * n_ranks * 3 * (part + val_part) * (6 * 4 + 8)
    assert budget.checkpoint_bytes == 0
    assert f"{2 * n_ranks} workers × 3 batches of" in budget.describe()


def test_the_copy_for_a_checkpoint_is_counted():
    with build(run__async_checkpoint=True, data__num_workers=0) as run:
        state = sum(v.numel() * v.element_size() for v in run.setup.model.state_dict().values())
        weights = sum(p.numel() * 4 for p in run.setup.model.parameters())
        assert estimate_host_budget(run).checkpoint_bytes == state + 2 * weights


def test_without_a_sample_to_look_at_the_budget_is_not_known():
    class Broken(Points):
        def __getitem__(self, index):
            raise OSError("gone")

    with build(Broken, data__num_workers=1) as run:
        assert estimate_host_budget(run) is None
        item = check.check_host_memory(run)
    assert (item.verdict, "not known" in item.text) == ("note", True)


BUDGET = {"n_workers": 4, "prefetch_factor": 2, "batch_bytes": GIB, "batches_bytes": 8 * GIB}
BUDGET |= {"checkpoint_bytes": 0, "free_bytes": 9 * GIB, "shm_free_bytes": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "host memory is short: 8.00 GiB for 4 workers × 2 batches of 1.00 GiB; 9.00 GiB are free; use fewer"),
        ({"free_bytes": 64 * GIB}, None),
        ({"free_bytes": 64 * GIB, "shm_free_bytes": 64 * 2**20}, "need 8.00 GiB of /dev/shm, which has 64 MiB free"),
        ({"n_workers": 0, "batches_bytes": 0, "checkpoint_bytes": 9 * GIB}, "use run.async_checkpoint: false"),
        ({"n_workers": 0, "batches_bytes": 0, "shm_free_bytes": 0}, None),
    ],
)
def test_what_there_is_too_little_of_is_named_with_a_remedy(changes, expected):
    problem = HostBudget(**BUDGET | changes).find_problem()
    assert problem is None if expected is None else expected in problem
