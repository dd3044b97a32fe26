"""The guide's grid through a real Slurm: one flag changes, and whoever is killed, nothing is lost or left behind."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.leftovers import find_processes, mark_processes
from tests.lab_cases import PATIENCE_S, wait_for

from fulltilt.lab.client import Client
from fulltilt.lab.serving import find_server
from fulltilt.lab.states import LIVE
from fulltilt.lab.store import open_store

CONFIGS = Path(__file__).parents[2] / "configs"
FULLTILT = (sys.executable, "-m", "fulltilt", "lab")
EPOCHS = 4


def run(*words: object, folder: Path, code: int = 0) -> str:
    command = [*FULLTILT, *map(str, words), "--lab", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def serve(folder: Path):
    """A server in a process of its own, killed at the end of the block unless it ended before."""
    with (folder.parent / "server.txt").open("ab") as said:
        command = [*FULLTILT, "serve", "--engine", "slurm", "--port", "0", "--lab", str(folder)]
        server = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        wait_for(lambda: find_server(folder))
        yield server
    finally:
        server.kill()
        server.wait()
        (folder / "server.json").unlink(missing_ok=True)  # as it was killed, it tells where nobody is


def read(folder: Path) -> dict[str, dict]:
    document = Client(None, find_server(folder)).get("/api/experiments")
    return {entry["id"]: entry for entry in document["experiments"]}


@pytest.mark.slow
def test_the_guides_grid_runs_by_slurm_and_outlives_a_cancelled_job_and_a_killed_server(slurm, tmp_path, monkeypatch):
    folder = tmp_path / "lab"
    environment = {"SLURM_CONF": slurm.conf, "XDG_CACHE_HOME": tmp_path / "node", "OMP_NUM_THREADS": 1}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    mark = mark_processes(monkeypatch)
    with serve(folder) as server:
        (tmp_path / "large.yaml").write_text("model: small_cnn\ndataset: digits\ndevice: [0, 1, 2]\n")
        refused = run("submit", tmp_path / "large.yaml", folder=folder, code=2)
        assert "takes 3 devices on one machine, and the largest here has 2" in refused
        run("submit", CONFIGS / "parallel_grid.yaml", f"epochs={EPOCHS}", folder=folder)
        wait_for(lambda: has_begun(folder / "e1" / "events-1.jsonl"), told=slurm.read_logs)
        slurm.run("scancel", f"--name={find_job(slurm, 'e1')}")
        wait_for(lambda: has_begun(folder / "e1" / "events-2.jsonl"), told=slurm.read_logs)
        assert server.poll() is None
        server.kill()
        server.wait()
        assert slurm.run("squeue", "-h"), "trainings go on without a server"
    with serve(folder) as server:
        wait_for(lambda: {each["state"] for each in read(folder).values()} == {"succeeded"}, told=slurm.read_logs)
        found = read(folder)
        server.terminate()
        assert server.wait(60) == 0
    assert [entry["attempt"] for entry in found.values()] == [2, 1, 1, 1, 1, 1]
    assert {entry["node"] for entry in found.values()} == {"n1", "n2"}
    assert found["e5"]["metrics"]["loss"] < found["e1"]["metrics"]["loss"]
    with contextlib.closing(open_store(folder)) as store:
        assert [each["outcome"] for each in store.read_attempts("e1")] == ["preempted", "succeeded"]
        events = store.read_events()
    running: set[str] = set()
    for event in events:
        (running.add if event.state in LIVE else running.discard)(event.experiment)
        assert len(running) <= 4
    assert sum(event.arrow == "commit" for event in events) == 6
    before, after = ((folder / "e1" / f"log-{number}.txt").read_text() for number in (1, 2))
    reached = re.search(r"^interrupted after (\d+) steps", before, re.MULTILINE)[1]
    assert f"note: going on from step {reached}," in after, "one signal to all its processes: it has saved first"
    wait_for(lambda: not slurm.run("squeue", "-h"))
    assert find_processes(mark) == []


def find_job(slurm, experiment: str) -> str:
    (name,) = (name for name in slurm.run("squeue", "-h", "-o", "%j") if name.startswith(f"fulltilt-{experiment}-"))
    return name


def has_begun(events: Path) -> bool:
    """The training has taken steps."""
    return events.exists() and b"StepsDone" in events.read_bytes()
