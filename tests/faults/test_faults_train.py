"""Training processes that are killed, interrupted, or run out of disk: what they leave, and how they go on."""

import csv
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from leftovers import find_processes, mark_processes

SCRIPT = Path(__file__).with_name("train_slowly.py")
N_STEPS = 64
PATIENCE_S = 600  # ends what hangs; a busy machine takes its time to load torch


def start(out_dir, *options):
    return subprocess.Popen(
        [sys.executable, "-u", str(SCRIPT), str(out_dir), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(process, step):
    for line in process.stdout:
        if line.startswith("step ") and int(line.split()[1]) >= step:
            return
    raise AssertionError(f"the run ended before step {step}: {process.stderr.read()}")


def run(out_dir, *options):
    process = start(out_dir, *options)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    code, out, err = run(folder, "--fast")
    assert code == 0, out + err
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
    process = start(tmp_path, *options)
    wait_for_step(process, 18)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL
    code, out, err = run(tmp_path, "--resume", "--fast", *options)
    assert code == 0, out + err
    assert "no checkpoint" not in out
    assert_same_run(tmp_path, whole_run)


def test_sigterm_ends_with_a_checkpoint_and_143(tmp_path, whole_run):
    process = start(tmp_path)
    wait_for_step(process, 6)
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (143, "")
    assert 6 < torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"] < N_STEPS
    assert run(tmp_path, "--resume", "--fast")[0] == 0
    assert_same_run(tmp_path, whole_run)


def test_ctrl_c_on_a_terminal_reaches_the_workers_too_and_the_step_is_finished(tmp_path):
    process = start(tmp_path, "--num-workers", "1", "--n-quick", "16")
    wait_for_step(process, 6)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")
    assert 6 < torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"] < N_STEPS


@pytest.mark.parametrize(
    ("start_method", "option"),
    [
        ("fork", None),
        pytest.param("forkserver", "--persistent-workers", marks=pytest.mark.slow),
        pytest.param("fork", "--persistent-workers", marks=pytest.mark.slow),
        pytest.param("forkserver", None, marks=pytest.mark.slow),
        pytest.param("spawn", None, marks=pytest.mark.slow),
        pytest.param("spawn", "--persistent-workers", marks=pytest.mark.slow),
    ],
)
def test_sigterm_to_the_whole_group_spares_the_workers_until_the_checkpoint_is_written(
    tmp_path, monkeypatch, start_method, option
):
    """as ``timeout``, a scheduler and CI send it; what is said and left is what a signal to the process alone leaves"""
    mark = mark_processes(monkeypatch)
    options = ["--num-workers", "2", "--n-quick", "16", "--start-method", start_method, *([option] if option else [])]
    process = start(tmp_path, *options)
    wait_for_step(process, 6)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (143, "")
    assert "Error" not in out
    assert not find_processes(mark)
    assert 6 < torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"] < N_STEPS


def has_user_mounts():
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def run_on_small_disk(script, *words):
    """Run a shell script that may mount a disk of its own; return what it says."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    words = map(str, (*words[:1], sys.executable, SCRIPT, *words[1:]))
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Traceback" not in done.stderr
    return done.stdout


def list_checkpoints(listed):
    return [name for name in listed.split() if "checkpoint" in name]


needs_mounts = pytest.mark.skipif(
    not has_user_mounts(), reason="needs unshare with user and mount namespaces, to mount a tmpfs"
)

FULL_DISK = """
mount -t tmpfs -o size=2600k none "$1" || exit 99
"$2" -u "$3" "$1/out" --fast --n-weights 400000; echo "exit $?"
ls -A "$1/out"; echo "--- more room"
mount -o remount,size=64m "$1"
"$2" -u "$3" "$1/out" --fast --n-weights 400000 --resume; echo "exit $?"
cat "$1/out/steps.csv"
"""


@needs_mounts
def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_the_run_goes_on_with_more_room(tmp_path):
    """2.6 MB hold one checkpoint of 1.6 MB and not a second beside it"""
    first, _, second = run_on_small_disk(FULL_DISK, tmp_path).partition("--- more room\n")
    assert "StorageError: no checkpoint of step 10: no space left for" in first
    assert "the checkpoint of step 5 is kept" in first
    assert list_checkpoints(first.split("exit 1\n")[1]) == ["checkpoint.pt"]
    assert second.startswith("going on from step 5, in epoch 1 of 4\nstep 6\n")
    assert "exit 0" in second
    steps = [line.split(",")[1] for line in second.splitlines() if line[:2] in ("0,", "1,", "2,", "3,")]
    assert steps == [str(step) for step in range(2, N_STEPS + 1, 2)]


STAYS_FULL = """
mount -t tmpfs -o size=2600k none "$1" || exit 99
"$2" -u "$3" "$1/out" --fast --n-weights 400000 --on-full-disk continue $4; echo "exit $?"
ls -A "$1/out"
"""


@pytest.mark.slow
@needs_mounts
@pytest.mark.parametrize("option", ["", "--async-checkpoint"])
def test_told_to_continue_on_a_full_disk_the_run_trains_to_its_end_and_fails_for_want_of_a_last_checkpoint(
    tmp_path, option
):
    out = run_on_small_disk(STAYS_FULL, tmp_path, option)
    assert "no checkpoint of step 10: no space left for" in out
    assert "the checkpoint of step 5 is kept; training goes on" in out
    assert f"step {N_STEPS}\n" in out
    assert f"StorageError: no checkpoint of step {N_STEPS}" in out
    assert list_checkpoints(out.split("exit 1\n")[1]) == ["checkpoint.pt"]


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
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("step ")], [
        line for line in lines if not line.startswith("step ")
    ]


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
