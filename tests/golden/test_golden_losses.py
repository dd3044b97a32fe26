"""The losses of a fixed run: a change in the loop, the data or the levers that alters training shows here.

One thread, CPU, real digits. Recorded with ``python tests/golden/test_golden_losses.py``.

Tolerance: kernels of other CPUs add in another order, and the steps amplify it. ``rtol_between_kernels`` in the file is
what the vectorised and the plain kernels of one machine differ by (``ATEN_CPU_CAPABILITY=default``); ``rtol`` leaves
other CPUs a thousand times that, and still sees a learning rate that is off by 1 %.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fulltilt.config import config_from_values
from fulltilt.engine.loop.train import train
from fulltilt.records import Evaluated, StepsDone

FILE = Path(__file__).with_name("losses_digits.json")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_digits(out_dir, *, lr=0.05, batch_size=64, accumulate=1):
    config = config_from_values(
        {
            "task": "classification",
            "model": "small_cnn(width=8)",
            "data": {"dataset": "digits", "transform": "normalize", "batch_size": batch_size},
            "optim": {"optimizer": "sgd(momentum=0.9)", "lr": lr, "schedule": "cosine", "warmup": 5},
            "speed": {"accumulate": accumulate, "threads": 1},
            "run": {"epochs": 2, "seed": 7, "device": "cpu", "log_every_n_steps": 5},
        },
        base_dir=".",
    )
    events = []
    train(config, out_dir=out_dir, listeners=[events.append])
    return {
        "train_losses": [[e.step, e.loss] for e in events if isinstance(e, StepsDone)],
        "val": [e.metrics for e in events if isinstance(e, Evaluated)],
    }


def compare(found, expected):
    """Largest relative difference of the training losses."""
    assert [step for step, _ in found] == [step for step, _ in expected]
    return max(abs(a - b) / abs(b) for (_, a), (_, b) in zip(found, expected, strict=True))


def test_losses_are_those_on_record(tmp_path):
    golden = json.loads(FILE.read_text())
    found = run_digits(tmp_path)
    assert compare(found["train_losses"], golden["train_losses"]) <= golden["rtol"]
    for mine, theirs in zip(found["val"], golden["val"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=golden["rtol"])
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=1.5 / golden["n_val"])  # one sample may flip


def test_the_tolerance_sees_a_learning_rate_one_per_cent_off(tmp_path):
    golden = json.loads(FILE.read_text())
    found = run_digits(tmp_path, lr=0.05 * 1.01)
    assert compare(found["train_losses"], golden["train_losses"]) > 2 * golden["rtol"]


def record() -> None:
    """Write the file: the losses, and how far the plain kernels are from the vectorised ones on this machine."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        values = run_digits(folder)
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        print(json.dumps(values))
        return
    plain_kernels = os.environ | {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    plain = subprocess.run([sys.executable, __file__], env=plain_kernels, capture_output=True, text=True, check=True)
    measured_rtol = compare(values["train_losses"], json.loads(plain.stdout)["train_losses"])
    header = {"torch": torch.__version__, "command": "python tests/golden/test_golden_losses.py", "n_val": 359}
    header |= {"rtol_between_kernels": measured_rtol, "rtol": 1e-4}
    FILE.write_text(json.dumps(header | values, indent=1) + "\n")


if __name__ == "__main__":
    record()
