"""A run over two processes of which one is killed, and that is then told to end."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from leftovers import find_children, find_processes, mark_processes

SCRIPT = Path(__file__).with_name("train_slowly.py")


def wait_for(process, is_it, lines):
    for line in process.stdout:
        lines.append(line.rstrip())
        if is_it(lines[-1]):
            return
    raise AssertionError("\n".join([*lines, process.stderr.read()]))


def is_step_from(step):
    return lambda line: line.startswith("step ") and int(line.split()[1]) >= step


def test_a_killed_rank_restarts_all_and_sigterm_ends_all_with_one_checkpoint(tmp_path, monkeypatch):
    """each step is told once, and nobody is left; the workload is one of ``__main__`` and travels by value"""
    mark = mark_processes(monkeypatch)
    out_dir, lines = tmp_path / "run", []
    command = [sys.executable, "-u", str(SCRIPT), str(out_dir), "--n-ranks", "2", "--max-restarts", "1"]
    command += ["--n-quick", "16"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    wait_for(process, is_step_from(12), lines)
    os.kill(find_children(process.pid)[1], signal.SIGKILL)
    wait_for(process, lambda line: "(1 of 1 restarts)" in line, lines)
    assert "rank 1 (cpu, process " in lines[-1]
    assert "was killed by SIGKILL" in lines[-1]
    wait_for(process, is_step_from(18), lines)
    process.terminate()
    out, err = process.communicate(timeout=600)
    said = [line for line in err.splitlines() if "[c10d] The hostname of the client socket" not in line]
    assert (process.returncode, said) == (143, [])  # torch says that where 127.0.0.1 has no name
    assert not find_processes(mark)
    saved = torch.load(out_dir / "checkpoint.pt", weights_only=True)["progress"]["step"]
    assert 18 <= saved < 64
    with (out_dir / "steps.csv").open() as stream:
        steps = [int(row["step"]) for row in csv.DictReader(stream)]
    assert steps == list(range(2, saved + 1, 2)), out
