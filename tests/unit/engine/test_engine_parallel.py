"""Two ranks train as one does: losses, gradients, metrics and weights, and checkpoints that pass between them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import parallel_cases
import pytest
import torch
import torch.distributed as dist
from parallel_cases import CASES, Net, Normed, run_case, run_part
from torch.nn.functional import cross_entropy
from training_cases import N_FEATURES, Points, read_weights

from fulltilt.engine.announce import Announcer
from fulltilt.engine.ranks.group import run_ranks
from fulltilt.engine.ranks.parallel import replicate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder):
    """Everything that two ranks find, from one start of them; of one run they find what one process has begun."""
    begun = run_part(folder / "begun by one", shard="none", max_steps=9)
    options = {"devices": ("cpu", "cpu"), "announcer": Announcer(())}
    return run_ranks(parallel_cases.run_all, {"folder": str(folder)}, **options) | {"begun by one": begun}


def flatten(value):
    """The numbers of nested figures, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in flatten(value[key])]
    if isinstance(value, tuple | list):
        return [number for item in value for number in flatten(item)]
    return [value]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_does(two, folder, tmp_path, name):
    """batches that do not divide, an epoch's last sample that only one rank has, windows that its end cuts short"""
    (result, figures), (result_of_two, figures_of_two) = run_case(name, tmp_path), two[name]
    rounding = 0.05 if name == "bf16" else 2e-5
    assert flatten(figures_of_two) == pytest.approx(flatten(figures), rel=rounding, abs=rounding)
    assert len(figures[0]) >= 2
    assert (result_of_two.step, result_of_two.epoch) == (result.step, result.epoch)
    assert result_of_two.metrics == pytest.approx(result.metrics, rel=rounding)
    weights = read_weights(folder / name), read_weights(tmp_path / name)
    torch.testing.assert_close(*weights, rtol=rounding, atol=rounding)


def test_what_the_split_means_is_said(two):
    notes = " ".join(two["plain"][0].notes)
    assert "2 ranks; of a micro-batch of 15 they get 8, 7 samples" in notes
    assert "every rank reads all of it" in " ".join(two["stream"][0].notes)


def test_a_checkpoint_passes_between_two_ranks_one_and_two_with_divided_weights(two, folder, tmp_path):
    """left in the middle of epochs, windows and logging intervals; at the end it is the run that was never left"""
    _, whole = run_part(tmp_path, shard="none")
    ends = {("begun by two",): [5, 16], ("begun by one", "divided"): [9, 11, 16]}
    for names, steps in ends.items():
        parts = [*(two[name] for name in names), run_part(folder / names[0], shard="none", resume=True)]
        assert [step for step, _ in parts] == steps
        joined = [interval for _, intervals in parts for interval in intervals]
        assert [step for step, _ in joined] == [step for step, _ in whole]
        assert flatten(joined) == pytest.approx(flatten(whole), rel=1e-4)


def test_with_batch_norm_what_is_evaluated_over_ranks_is_what_is_saved(two, folder):
    model = Normed()
    model.load_state_dict(read_weights(folder / "normed"))
    points = Points(n_samples=31, noise=0)
    with torch.no_grad():
        outputs = model.eval()(points.inputs)
    assert two["normed"]["loss"] == pytest.approx(float(cross_entropy(outputs, points.targets)), rel=1e-5)


def test_ranks_go_on_with_their_own_random_numbers(two):
    whole, cut = (dict(intervals) for intervals in two["random"])
    assert len(whole) > 4
    left_open = {4, 8}  # the run was left at steps 3 and 7: what ranks had summed by then is added up in another order
    assert {step: cut[step] for step in cut.keys() - left_open} == {s: whole[s] for s in whole.keys() - left_open}
    assert [cut[step] for step in left_open] == pytest.approx([whole[step] for step in left_open], rel=1e-6)


def test_a_stop_that_one_rank_hears_of_ends_all_at_one_step(two):
    reason, step, saved_step = two["stopped"]
    assert reason == "interrupted"
    assert 5 <= step == saved_step


@pytest.fixture
def group():
    """A group of this process alone: what is sent can be seen without another one to receive it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("static_graph", "first_window"), [(False, [0, 0, 1]), (True, [1, 1, 1])])
@pytest.mark.usefixtures("group")
def test_a_window_sends_its_gradients_once_and_they_lie_in_the_buffer_that_is_sent(static_graph, first_window):
    """a first window that is recorded sends in every step; copies of gradients would be a model's worth of memory"""
    model, sync = replicate(Net(), static_graph=static_graph)
    buffers = []

    def send(state, bucket):
        buffers.append(bucket.buffer())
        sent = torch.futures.Future()
        sent.set_result(bucket.buffer())
        return sent

    model.register_comm_hook(None, send)
    n_sent = []
    for is_last in (False, False, True) * 2:
        buffers.clear()
        sync(is_last)
        model(torch.rand(4, N_FEATURES)).sum().backward()
        n_sent.append(len(buffers))
    assert n_sent == [*first_window, 0, 0, 1]
    (buffer,) = buffers
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.any()]
    assert len(gradients) == 8
    assert {gradient.untyped_storage().data_ptr() for gradient in gradients} == {buffer.untyped_storage().data_ptr()}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("name", ["window", "sharded"])
def test_two_gpus_train_as_one_does(tmp_path, name):
    _, figures = run_case(name, tmp_path / "one", device="cuda:0")
    _, figures_of_two = run_case(name, tmp_path / "two", device=[0, 1])
    assert flatten(figures_of_two) == pytest.approx(flatten(figures), rel=1e-3, abs=1e-4)


CONFIG = """
task: classification
model: small_cnn(width=4)
data: {dataset: digits, transform: normalize, batch_size: 60, num_workers: 0}
optim: {optimizer: sgd, lr: 0.05}
run: {epochs: 2, device: cpu, seed: 3, log_every_n_steps: 5}
"""


def run_command(command, folder, *options):
    arguments = [*command, "-m", "fulltilt", "train", str(folder.parent / "tiny.yaml"), "--out", str(folder), *options]
    where = {"cwd": Path(__file__).parents[3], "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, **where)
    assert done.returncode == 0, done.stdout + done.stderr


def read_losses(folder):
    with (folder / "steps.csv").open() as steps, (folder / "epochs.csv").open() as epochs:
        return [float(row["loss"]) for rows in (steps, epochs) for row in csv.DictReader(rows)]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "2"]


@pytest.mark.slow
def test_two_processes_of_torchrun_train_as_two_of_ours(tmp_path):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    run_command(TORCHRUN, tmp_path / "torchrun")
    run_command([], tmp_path / "ours", "run.n_ranks=2")
    theirs, ours = (read_losses(tmp_path / name) for name in ("torchrun", "ours"))
    assert len(ours) > 8
    assert theirs == ours
