"""Training processes that are killed, interrupted, or run out of disk: what they leave, and how they go on."""

import contextlib
import csv
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_slowly
from leftovers import SLOW, find_processes, mark_processes, read_step, start_slowly, wait_for_step

from fulltilt.engine.interrupt import SAID

N_STEPS = 64
PATIENCE_S = 600  # ends what hangs; a busy machine takes its time to load torch


def run(out_dir, *options):
    """Train to the end in this process, which has loaded torch already, and return what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert train_slowly.main([str(out_dir), *options]) == 0, said.getvalue()
    return said.getvalue()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder, "--fast")
    return folder


def read_rows(folder, name, columns):
    with (folder / name).open() as stream:
        return [tuple(row[c] for c in columns) for row in csv.DictReader(stream)]


def assert_same_run(folder, whole):
    for name, columns in (("steps.csv", ("step", "n_steps", "loss", "lr")), ("epochs.csv", ("epoch", "split", "loss"))):
        assert read_rows(folder, name, columns) == read_rows(whole, name, columns)
    mine, theirs = (torch.load(f / "checkpoint.pt", weights_only=True)["model"] for f in (folder, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("options", [(), pytest.param(("--async-checkpoint",), marks=pytest.mark.slow)])
def test_a_run_killed_in_the_middle_resumes_to_the_same_result(tmp_path, whole_run, options):
    process = start_slowly(tmp_path, *options)
    wait_for_step(process, 18)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL
    assert "no checkpoint" not in run(tmp_path, "--resume", "--fast", *options)
    assert_same_run(tmp_path, whole_run)


def stop(process, send, number):
    """Signal a run in its 6th step and see that it answered and left a checkpoint; return what it printed."""
    wait_for_step(process, 6)
    send(process.pid, number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (128 + number, f"{SAID}\n")
    return out


PERSISTENT = ("--persistent-workers",)


def test_sigterm_ends_with_a_checkpoint_and_143(tmp_path, whole_run):
    stop(start_slowly(tmp_path), os.kill, signal.SIGTERM)
    assert 6 < read_step(tmp_path) < N_STEPS
    run(tmp_path, "--resume", "--fast")
    assert_same_run(tmp_path, whole_run)


@pytest.mark.parametrize(
    ("start_method", "number", "options"),
    [
        ("fork", signal.SIGINT, ()),  # Ctrl-C on a terminal
        ("fork", signal.SIGTERM, ()),  # as ``timeout``, a scheduler and CI send it
        pytest.param("fork", signal.SIGTERM, PERSISTENT, marks=pytest.mark.slow),
        pytest.param("forkserver", signal.SIGTERM, (), marks=pytest.mark.slow),
        pytest.param("spawn", signal.SIGTERM, PERSISTENT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_whole_group_spares_the_workers_until_the_checkpoint_is_written(
    tmp_path, monkeypatch, start_method, number, options
):
    mark = mark_processes(monkeypatch)
    words = ["--num-workers", "2", "--n-quick", "16", "--start-method", start_method, *options]
    assert "Error" not in stop(start_slowly(tmp_path, *words), os.killpg, number)
    assert not find_processes(mark)
    assert 6 < read_step(tmp_path) < N_STEPS


def has_user_mounts():
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


FULL_DISK = """
mount -t tmpfs -o size=2600k none "$1" || exit 99
"$2" -u "$3" "$1/out" --fast --n-weights 400000; echo "exit $?"
ls -A "$1/out"; echo "--- more room"
mount -o remount,size=64m "$1"
"$2" -u "$3" "$1/out" --fast --n-weights 400000 --resume; echo "exit $?"
cat "$1/out/steps.csv"
"""


@pytest.mark.slow
@pytest.mark.skipif(not has_user_mounts(), reason="needs unshare with user and mount namespaces, to mount a tmpfs")
def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_the_run_goes_on_with_more_room(tmp_path):
    """2.6 MB hold one checkpoint of 1.6 MB and not a second beside it"""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL_DISK, "sh"]
    command += [str(tmp_path), sys.executable, str(SLOW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Traceback" not in done.stderr
    first, _, second = done.stdout.partition("--- more room\n")
    assert "StorageError: no checkpoint of step 10: no space left for" in first
    assert "the checkpoint of step 5 is kept" in first
    assert [name for name in first.split("exit 1\n")[1].split() if "checkpoint" in name] == ["checkpoint.pt"]
    assert second.startswith("going on from step 5, in epoch 1 of 4\nstep 6 ")
    assert "exit 0" in second
    steps = [line.split(",")[1] for line in second.splitlines() if line[:2] in ("1,", "2,", "3,", "4,")]
    assert steps == [str(step) for step in range(2, N_STEPS + 1, 2)]


LITTLE = Path(__file__).with_name("train_in_little_memory.py")


def run_little(*options):
    done = subprocess.run(
        [sys.executable, str(LITTLE), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps, notes = [], []
    for line in done.stdout.splitlines():
        (steps if line.startswith("step ") else notes).append(line)
    return steps, notes


@pytest.mark.slow
def test_a_real_lack_of_memory_makes_the_run_replan_to_the_losses_of_the_smaller_plan(tmp_path):
    """The allocator refuses the first plan's step: 64 MB a tensor, and 170 MB to spend; perhaps the next too."""
    steps, notes = run_little(tmp_path / "little", 64, 1, "--spare-mib", 170)
    assert any("can't allocate memory" in note and "the effective batch stays 64" in note for note in notes), notes
    replanned = [note for note in notes if note.startswith("replanned ")]
    batch_size, accumulate = replanned[-1].split()[1:]
    assert int(batch_size) * int(accumulate) == 64
    expected, none = run_little(tmp_path / "plenty", batch_size, accumulate)
    losses, expected_losses = ([float(line.split()[-1]) for line in lines] for lines in (steps, expected))
    assert len(losses) == 2
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert none == []
