"""Small scripts under the observer, each in a process of its own, and what is read of them."""

import json
import os
import subprocess
import sys

import pytest
import torch

from fulltilt.attach.launch import SITE
from fulltilt.doctor.observation import read_observation

TRAIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def step(optimizer=optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def observe(tmp_path):
    """Run a script under the observer → what was seen of it, and what it printed."""

    def observe(script, *, proves=False, code=0):
        (tmp_path / "seen").mkdir()
        (tmp_path / "train.py").write_text(script)
        session = json.dumps({"folder": str(tmp_path / "seen"), "proves": proves})
        environment = {**os.environ, "PYTHONPATH": str(SITE), "FULLTILT_ATTACH": session}
        words = [sys.executable, "-W", "ignore", "train.py"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "fulltilt" not in done.stderr, done.stderr
        return read_observation(tmp_path / "seen"), done.stdout

    return observe


def test_torch_that_is_looked_for_before_it_is_imported_is_watched(observe):
    """As ``datasets`` and ``transformers`` do."""
    found, _ = observe(f"""
import importlib.util
for _ in range(2):
    assert importlib.util.find_spec("torch") is not None
{TRAIN}
for _ in range(30):
    step()
""")
    assert found.n_steps == 30


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_next_training_of_a_script_is_watched_too_and_the_last_one_is_let_go(observe, is_kept):
    """A new optimizer counts once the first is gone, or has rested while another took 50 steps."""
    found, said = observe(f"""
{TRAIN}
import gc, weakref
for _ in range(30):
    step()
kept = optimizer if {is_kept} else None
seen = weakref.ref(optimizer)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
step.__defaults__ = (optimizer,)
gc.collect()
print(seen() is not None)
for _ in range(90):
    step()
""")
    assert said.split() == [str(is_kept)]
    n_unseen = 50 if is_kept else 0
    assert found.n_steps == 120 - n_unseen
    edges = (found.get("flags") == 1).nonzero()[0].tolist()
    assert edges == [29], "what lies between two trainings is no plain step"


@pytest.mark.slow
def test_two_optimizers_that_take_turns_are_one_training(observe):
    found, _ = observe(f"""
{TRAIN}
other = torch.optim.SGD(model.parameters(), lr=1e-3)
for n in range(120):
    step()
    for _ in range(n % 9):
        step(other)
""")
    assert found.n_steps == 120
    assert not found.get("flags").any()


def test_a_line_that_evaluates_too_is_charged_with_training_steps_alone(observe):
    found, _ = observe(f"""
{TRAIN}
from torch.utils.data import DataLoader, TensorDataset
def run_epoch(n, is_training):
    for x, in DataLoader(TensorDataset(torch.ones(2 * n, 4)), batch_size=2):
        loss = model(x).sum()
        if is_training:
            step()
        loss.item()
for _ in range(3):
    run_epoch(12, True)
    run_epoch(40, False)
run_epoch(500, False)
""")
    (site,) = [site for site in found.sites if site.kind == "host_sync"]
    n = len(found.plain.rows)
    assert n == 35 - 5 - 2, "without the warm-up, and the first step of each later epoch"
    assert (site.n_calls, site.n_steps) == (n, n)


def test_a_training_that_is_killed_early_was_seen(observe):
    found, _ = observe(
        f"{TRAIN}\nfor _ in range(3):\n    step()\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        code=-9,
    )
    assert (found.n_steps, found.n_processes, found.torch) == (1, 1, torch.__version__)


@pytest.mark.slow
def test_slow_steps_are_reported_as_they_end(observe):
    found, _ = observe(
        f"{TRAIN}\nimport os, time\nfor _ in range(3):\n    step()\n    time.sleep(2.1)\nos._exit(3)",
        code=3,
    )
    assert (found.n_steps, len(found.rows)) == (3, 2)


def test_an_observer_that_fails_early_says_so(observe):
    found, _ = observe(
        f"{TRAIN}\nimport sys\nsys.modules['_fulltilt_inside.observer'].Observer._begin_steps = None\nstep()\nstep()"
    )
    assert "NoneType" in found.failure
    assert found.n_steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["", ", num_workers=1"])
def test_samples_are_traced_in_training_after_an_evaluation_and_an_accumulation(observe, workers):
    found, _ = observe(f"""
{TRAIN}
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 40
class Training(Data):
    def __getitem__(self, index):
        return torch.ones(4)
class Evaluation(Data):
    def __getitem__(self, index):
        return torch.zeros(4)
for _ in DataLoader(Evaluation(), batch_size=2{workers}):
    pass
for n, x in enumerate(DataLoader(Training(), batch_size=2{workers}), 1):
    if n % 5 == 0:
        step()
""")
    functions = {line.function.partition(".")[0] for line in found.samples.lines}
    assert functions == {"Training"}


@pytest.mark.slow
def test_compiled_modules_do_not_share_the_limit_of_recompilations(observe):
    """Dynamo compiles one code object eight times at most."""
    classes = "\n".join(
        f"class Net(torch.nn.Module):\n    def forward(self, x):\n        return x * {n}\n"
        "torch.compile(Net(), backend=counter)(torch.ones(2))"
        for n in range(12)
    )
    _, said = observe(f"""
import torch
from torch._dynamo.testing import CompileCounter
counter = CompileCounter()
{classes}
print(counter.frame_count)
""")
    assert said.split() == ["12"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_compiled_steps_are_seen(observe, kind):
    found, _ = observe(f"""
{TRAIN}
model(torch.ones(2, 4)).sum().backward()
optimizer = torch.optim.{kind}(model.parameters())
compiled = torch.compile(optimizer.step, backend="eager")
for _ in range(30):
    compiled()
""")
    assert found.n_steps == 30
