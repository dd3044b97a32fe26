"""A run over two processes of which one is killed, and that is then told to end."""

import csv
import os
import signal

import pytest
from leftovers import (
    find_children,
    find_processes,
    mark_processes,
    read_step,
    start_slowly,
    wait_for_line,
    wait_for_step,
)

from fulltilt.engine.interrupt import SAID

TWO = ("--n-ranks", "2", "--n-quick", "16")


def wait_for_end(process, mark, out_dir):
    """What it said, and the step of its checkpoint; it ended by SIGTERM, with one line, and left no process."""
    out, err = process.communicate(timeout=600)
    said = [line for line in err.splitlines() if "[c10d] The hostname of the client socket" not in line]  # by torch
    assert (process.returncode, said, find_processes(mark)) == (143, [SAID], [])
    return out, read_step(out_dir)


@pytest.mark.slow
def test_a_killed_rank_restarts_all_and_sigterm_ends_all_with_one_checkpoint(tmp_path, monkeypatch):
    """each step is told once, and nobody is left; the workload is one of ``__main__`` and travels by value"""
    mark = mark_processes(monkeypatch)
    out_dir = tmp_path / "run"
    process = start_slowly(out_dir, *TWO, "--max-restarts", "1")
    wait_for_step(process, 12)
    os.kill(find_children(process.pid)[1], signal.SIGKILL)
    said = wait_for_line(process, lambda line: "(1 of 1 restarts)" in line)
    assert "rank 1 (cpu, process " in said
    assert "was killed by SIGKILL" in said
    wait_for_step(process, 18)
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
    out_dir = tmp_path / "run"
    process = start_slowly(out_dir, *TWO, "--num-workers", "1")
    wait_for_step(process, 8)
    ranks = find_children(process.pid)
    workers = [worker for rank in ranks for worker in find_children(rank)]
    assert (len(ranks), len(workers)) == (2, 2)
    for pid in [*workers, *ranks, process.pid]:  # the workers first: they wait for nobody's word
        os.kill(pid, signal.SIGTERM)
    out, saved = wait_for_end(process, mark, out_dir)
    assert "Error" not in out
    assert 8 <= saved < 64
