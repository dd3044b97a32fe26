"""Which devices a run has, and how a batch and a model are divided: what can be told in one process."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_cases import build_config, build_workload

from fulltilt.config import plan_of
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.ranks.division import find_obstacles_to_ranks
from fulltilt.engine.ranks.parallel import DealtBatches, choose_shard, list_sizes
from fulltilt.engine.ranks.world import World, is_first_rank, is_rank, join_devices, plan_devices
from fulltilt.errors import ConfigError, PlanObstacleError, UsageError


@pytest.mark.parametrize(
    ("device", "n_ranks", "expected"),
    [
        ("cpu", None, ["cpu"]),
        ("cpu", 3, ["cpu", "cpu", "cpu"]),
        ("cuda", None, ["cuda"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", None, ["cuda:1"]),
        (2, None, ["cuda:2"]),
        ([3], None, ["cuda:3"]),
        ([1, 3], None, ["cuda:1", "cuda:3"]),
        ([1, 3], 2, ["cuda:1", "cuda:3"]),
    ],
)
def test_devices_of_a_run(device, n_ranks, expected):
    assert plan_devices(build_config(run__device=device, run__n_ranks=n_ranks)) == expected


@pytest.mark.parametrize(("device", "n_ranks"), [("cuda:1", 2), ([0, 1], 3), ([0, 1, 2], 2)])
def test_devices_and_ranks_that_do_not_go_together_are_refused(device, n_ranks):
    with pytest.raises(ConfigError, match="leave n_ranks out, or name as many devices"):
        plan_devices(build_config(run__device=device, run__n_ranks=n_ranks))


def test_a_device_given_by_hand_wins_over_the_configuration():
    assert plan_devices(build_config(run__device=[0, 1]), "cpu") == ["cpu"]


def test_torchrun_is_told_where_its_ranks_and_the_devices_differ(monkeypatch):
    assert not is_rank()
    places = dict.fromkeys(("RANK", "LOCAL_RANK"), 1) | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), 2)
    for name, value in (places | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))
    assert is_rank()
    with pytest.raises(ConfigError, match="2 ranks were started on this machine, the configuration names 3 devices"):
        join_devices(plan_devices(build_config(run__device=[0, 1, 2])))


@pytest.mark.parametrize(("rank", "n_ranks"), [("abc", "2"), ("2", "2"), ("1", "1"), ("0", "2"), ("0", "")])
def test_a_place_among_ranks_that_there_is_not_is_refused_with_what_says_it(monkeypatch, rank, n_ranks):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", rank)
    assert not is_rank()
    assert is_first_rank(), "one alone, whatever a queue has left in the environment"
    monkeypatch.setenv("WORLD_SIZE", n_ranks)
    with pytest.raises(UsageError, match=f"RANK={rank}, WORLD_SIZE={n_ranks}.*or unset RANK"):
        is_rank()


def test_who_waits_for_ranks_that_do_not_come_is_ended_by_a_signal():
    """Nothing but SIGKILL ended it: torch waits in C++, where no handler of Python's runs."""
    code = "import signal; from fulltilt.engine.ranks.world import join_devices\n"
    code += "signal.signal(signal.SIGTERM, print); print('ready', flush=True); join_devices(['cpu'])"
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    given = {"env": os.environ | place, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **given) as process:
        assert process.stdout.readline() == "ready\n"
        status = Path(f"/proc/{process.pid}/status")
        while int(re.search(r"SigCgt:\s(\w+)", status.read_text())[1], 16) & 1 << signal.SIGTERM - 1:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_batch_has_to_give_every_rank_a_sample():
    workload = build_workload()
    alone = build_workload(couples_samples=True)  # one process divides nothing and is refused nothing
    assert find_obstacles_to_ranks(1, 1, build_config(data__on_bad_sample="skip(limit=3)"), alone) == []
    assert find_obstacles_to_ranks(4, 4, build_config(), workload) == []
    (found,) = find_obstacles_to_ranks(4, 3, build_config(), workload)
    assert found.startswith("batch_size 3 is over all 4 devices")
    assert "use batch_size 4 or more" in found


COMPARES = r"compares the samples of a batch with each other.*run\.device naming one and run\.n_ranks null"


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        # contrastive(exact_batch=false) trained over ranks, with fewer negatives than it said
        ({"couples_samples": True}, UsageError, COMPARES),
        ({"compares_samples": True}, UsageError, COMPARES),
        # it may call encode, which the hooks of divided weights do not see; that came to light after an epoch
        ({"assess": lambda model, device: {}}, PlanObstacleError, r"points assess the model.*use shard none"),
    ],
)
def test_workloads_that_cannot_be_divided_are_refused_before_they_train(fields, error, said):
    config = build_config(speed__shard="full")
    workload = build_workload(prepare=None, **fields)
    with pytest.raises(error, match=said):
        build_run(config, plan_of(config), device="cpu", workload=workload, world=World(n_ranks=2))


@pytest.mark.parametrize(("shard", "is_divided"), [("auto", False), ("full", True), ("none", False)])
def test_weights_that_fit_are_not_divided_unless_asked_for(shard, is_divided):
    assert choose_shard(shard, nn.Linear(4, 4), torch.device("cpu"), World(n_ranks=2)) == (is_divided, None)


@pytest.mark.parametrize(("said", "is_divided"), [([10**6, 10**6], False), ([10**6, 100], True), ([100, 10**6], True)])
def test_the_device_with_the_least_free_memory_decides_for_all_ranks(monkeypatch, said, is_divided):
    """320 bytes of training state: a rank whose own device has room must not choose otherwise."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**6, 10**6))
    world = SimpleNamespace(n_ranks=2, is_divided=True, collect=lambda value: said)
    assert choose_shard("auto", nn.Linear(4, 4), torch.device("cuda:0"), world)[0] is is_divided


def test_batches_of_a_stream_are_cut_where_those_of_a_table_are():
    batches = [(torch.arange(8), {"y": torch.arange(8) * 10}), (torch.arange(8, 11), {"y": torch.arange(8, 11) * 10})]
    dealt = DealtBatches(iter(batches), World(rank=1, n_ranks=4), None)
    inputs, targets = next(dealt)
    assert (inputs.tolist(), targets["y"].tolist()) == ([2, 3], [20, 30])
    assert (dealt.n_global, dealt.n_local, dealt.is_last) == (8, 2, False)
    assert next(dealt)[0].tolist() == [9]
    assert (dealt.n_global, dealt.n_local, dealt.is_last) == (3, 1, True)
    assert next(dealt, None) is None

    last = DealtBatches(iter(batches), World(rank=3, n_ranks=4), None)
    next(last)
    assert next(last)[0].tolist() == [8]  # none of the three is its own: one stands in, and counts for nothing
    assert (last.n_global, last.n_local) == (3, 0)


def test_sizes_of_batches():
    assert list(list_sizes(10, 4, drop_last=False)) == [4, 4, 2]
    assert list(list_sizes(10, 4, drop_last=True)) == [4, 4]
    assert list(list_sizes(0, 4, drop_last=False)) == []


LEAVING = """
import atexit
import torch.distributed as dist
from fulltilt.engine.ranks.world import World
atexit.register(lambda: print(dist.is_initialized()))  # after what is registered later
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
World(n_ranks=2, link={link}).leave_at_exit()
"""


@pytest.mark.parametrize(("link", "is_still_there"), [("None", False), ("object()", True)])
def test_a_process_of_torchrun_leaves_the_group_when_it_exits_and_one_of_ours_is_asked_to(link, is_still_there):
    done = subprocess.run([sys.executable, "-c", LEAVING.format(link=link)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [str(is_still_there)]), done.stderr
