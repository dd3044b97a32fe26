"""A run over two processes of which one is killed, and that is then told to end."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from leftovers import find_children, find_processes, mark_processes

SCRIPT = Path(__file__).with_name("train_slowly.py")


def wait_for(process, is_it, lines):
    for line in process.stdout:
        lines.append(line.rstrip())
        if is_it(lines[-1]):
            return
    raise AssertionError("\n".join([*lines, process.stderr.read()]))


def start(out_dir, *flags):
    command = [sys.executable, "-u", str(SCRIPT), str(out_dir), "--n-ranks", "2", "--n-quick", "16", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})


def is_step_from(step):
    return lambda line: line.startswith("step ") and int(line.split()[1]) >= step


def wait_for_end(process, mark, out_dir):
    """What it said, and the step of its checkpoint; it ended by SIGTERM, silently, and left no process."""
    out, err = process.communicate(timeout=600)
    said = [line for line in err.splitlines() if "[c10d] The hostname of the client socket" not in line]  # by torch
    assert (process.returncode, said, find_processes(mark)) == (143, [], [])
    return out, torch.load(out_dir / "checkpoint.pt", weights_only=True)["progress"]["step"]


def test_a_killed_rank_restarts_all_and_sigterm_ends_all_with_one_checkpoint(tmp_path, monkeypatch):
    """each step is told once, and nobody is left; the workload is one of ``__main__`` and travels by value"""
    mark = mark_processes(monkeypatch)
    out_dir, lines = tmp_path / "run", []
    process = start(out_dir, "--max-restarts", "1")
    wait_for(process, is_step_from(12), lines)
    os.kill(find_children(process.pid)[1], signal.SIGKILL)
    wait_for(process, lambda line: "(1 of 1 restarts)" in line, lines)
    assert "rank 1 (cpu, process " in lines[-1]
    assert "was killed by SIGKILL" in lines[-1]
    wait_for(process, is_step_from(18), lines)
    process.terminate()
    out, saved = wait_for_end(process, mark, out_dir)
    assert 18 <= saved < 64
    with (out_dir / "steps.csv").open() as stream:
        steps = [int(row["step"]) for row in csv.DictReader(stream)]
    assert steps == list(range(2, saved + 1, 2)), out


@pytest.mark.slow
def test_sigterm_to_every_process_of_two_ranks_with_workers_ends_with_one_checkpoint(tmp_path, monkeypatch):
    """Slurm and systemd know all processes of a job; the ranks lead groups of their own"""
    mark = mark_processes(monkeypatch)
    out_dir, lines = tmp_path / "run", []
    process = start(out_dir, "--num-workers", "1")
    wait_for(process, is_step_from(8), lines)
    ranks = find_children(process.pid)
    workers = [worker for rank in ranks for worker in find_children(rank)]
    assert (len(ranks), len(workers)) == (2, 2)
    for pid in [*workers, *ranks, process.pid]:  # the workers first: they wait for nobody's word
        os.kill(pid, signal.SIGTERM)
    out, saved = wait_for_end(process, mark, out_dir)
    assert "Error" not in out
    assert 8 <= saved < 64
