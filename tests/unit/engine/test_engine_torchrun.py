"""A run that torchrun starts, not ``train``: two processes that find each other by what torchrun tells them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
task: classification
model: small_cnn(width=4)
data: {dataset: digits, transform: normalize, batch_size: 60, num_workers: 0}
optim: {optimizer: sgd, lr: 0.05}
run: {epochs: 2, device: cpu, seed: 3, log_every_n_steps: 5}
"""


def run(command, folder, *options):
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
    run(TORCHRUN, tmp_path / "torchrun")
    run([], tmp_path / "ours", "run.n_ranks=2")
    theirs, ours = (read_losses(tmp_path / name) for name in ("torchrun", "ours"))
    assert len(ours) > 8
    assert theirs == ours
