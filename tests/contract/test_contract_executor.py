"""What an engine promises the lab: an order starts one guard, it is found again, ended, and told apart from unknown."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.lab_cases import wait_for

from fulltilt.errors import UsageError
from fulltilt.hardware.proctree import find_marked, kill_marked
from fulltilt.lab.executors import AwayError, Place, RefusedError
from fulltilt.lab.executors.cluster import LOG
from fulltilt.lab.executors.local import GUARD_MARK, LocalExecutor
from fulltilt.lab.executors.ray import RayExecutor
from fulltilt.lab.executors.ray_node import RayNode, build_simulated_slots
from fulltilt.lab.executors.slurm import SlurmExecutor
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import MARK, RAY_JOB, VARIABLE, Order
from fulltilt.lab.serving import open_lab, serve
from fulltilt.lab.store import compute_digest

ODD = "it's $(touch pwned) %j"  # a folder that no shell and no pattern must see into


@pytest.fixture(params=["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slurm", "ray"))])
def executor(request, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if request.param != "local":
        yield request.getfixturevalue(f"{request.param}_executor")
        return
    executor = LocalExecutor([0, 1], logs=tmp_path / "logs", is_lasting=True)
    executor.read_logs = lambda: read_files(tmp_path / "logs")
    yield executor
    executor.close()


@pytest.fixture
def slurm_executor(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    for name in ("FRESH_S", "AWAY_S"):
        monkeypatch.setattr(f"fulltilt.lab.executors.slurm.{name}", 0.2)
    executor = SlurmExecutor(logs=tmp_path / "logs" / ODD, partition="main")
    executor.read_logs = lambda: read_files(tmp_path / "logs")
    yield executor
    slurm.end_jobs()


@pytest.fixture(scope="module")
def ray_executor(tmp_path_factory):
    """A real cluster: a head, and one machine with two simulated GPUs."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    folder, machine = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("machine")
    executor = RayExecutor(folder, host="127.0.0.1")
    with open_lab(folder, create=True) as lab, serve(lab, [executor]) as (address, _):
        node = RayNode(url=address.url, name="n1", boot="one start", folder=machine, slots=build_simulated_slots(2))
        node._machine = dataclasses.replace(node._machine, url="http://127.0.0.1:9")  # nobody answers attempts there
        ((name, value),) = node._machine.to_environment().items()
        node._mark = f"{name}={value}"
        try:
            node.join(address.token)
            session = executor._get("/api/version")["session_name"]
            executor.read_logs = lambda: read_files(folder / LOG, machine / LOG, Path("/tmp/ray", session, "logs"))
            wait_for(executor.read_places)
            yield executor
        finally:
            node.leave(lambda: True)
            executor.end_head()
    assert not find_marked(node._mark)


def read_files(*places: Path) -> bytes:
    found = [path for place in places for path in ([place] if place.is_file() else place.rglob("*")) if path.is_file()]
    assert found
    return b"".join(path.read_bytes() for path in found)


def read_order(process: Path) -> str:
    """Return the secret text that a guard was started with."""
    with contextlib.suppress(OSError):
        for entry in (process / "environ").read_bytes().split(b"\0"):
            name, _, value = entry.decode(errors="replace").partition("=")
            if name in (VARIABLE, RAY_JOB):
                return value if name == VARIABLE else json.loads(value)["metadata"].get(VARIABLE, "")
    return ""


class Job:
    """An attempt whose server nobody answers for: its guard waits, which is all that an engine has to do with."""

    def __init__(self, executor, root: Path, number: int = 1):
        self.executor, token = executor, f"token {root} {number}"
        (place, *_) = executor.read_places()
        given = {"sweep": "s", "state": "leased", "priority": 0, "point": {}, "overrides": (), "node": place.node}
        fence = compute_digest(token)
        self.experiment = Experiment(id="e1", attempt=number, fence=fence, engine=executor.name, **given)
        self.mark = f"e1/{number}/{fence[:16]}"
        self.order = Order(url="http://127.0.0.1:9", token=token, mark=self.mark, node=place.node, root=str(root))
        self.place = place

    def submit(self) -> str:
        attempt = Attempt(experiment="e1", number=self.experiment.attempt)
        return self.executor.submit(attempt, self.order, self.place.node, self.place.devices[:1])

    def look(self) -> str:
        return self.executor.poll([self.experiment])["e1"]

    def wait_until_it_lives(self) -> None:
        """It is there at once; an engine with a queue of its own may begin it a little later."""
        assert self.look() in ("waiting", "alive")
        wait_for(lambda: self.look() == "alive")

    def find_guards(self) -> list[Path]:
        """Guards and runners that have this order."""
        token = self.order.token.encode()
        return [path for path in Path("/proc").glob("[0-9]*") if token in base64.b64decode(read_order(path))]


def test_the_machines_are_named_with_all_their_devices(executor):
    (place, *_) = executor.read_places()
    assert place.node
    assert len(set(place.devices)) == len(place.devices) == 2


def test_an_order_starts_an_attempt_once_and_it_is_found_until_it_is_ended(executor, tmp_path):
    job = Job(executor, tmp_path)
    assert job.look() == "gone"
    assert job.submit() == job.submit()
    job.wait_until_it_lives()
    wait_for(lambda: len(job.find_guards()) == 2)  # and its runner
    job.executor.cancel(job.experiment, is_urgent=True)
    wait_for(lambda: job.look() == "gone")
    assert find_marked(f"{MARK}={job.mark}") == []
    wait_for(lambda: not job.find_guards())


def test_one_attempt_is_not_taken_for_another_of_the_same_experiment(executor, tmp_path):
    first, second = Job(executor, tmp_path, 1), Job(executor, tmp_path, 2)
    second.submit()
    second.wait_until_it_lives()
    assert first.look() == "gone"
    executor.cancel(first.experiment, is_urgent=True)
    assert second.look() == "alive"
    executor.cancel(second.experiment, is_urgent=True)
    wait_for(lambda: second.look() == "gone")


def test_what_another_process_of_the_lab_started_is_found_again(executor, tmp_path):
    job = Job(executor, tmp_path)
    child = os.fork()
    if child == 0:
        job.submit()
        os._exit(0)
    os.waitpid(child, 0)
    job.wait_until_it_lives()
    executor.cancel(job.experiment, is_urgent=True)
    wait_for(lambda: job.look() == "gone")


def test_the_token_of_an_attempt_is_in_no_log_and_on_no_command_line(executor, tmp_path):
    job = Job(executor, tmp_path)
    job.submit()
    (guard, *_) = wait_for(job.find_guards)
    secrets = [job.order.token.encode(), read_order(guard).encode()]
    lines = [entry.read_bytes() for entry in Path("/proc").glob("[0-9]*/cmdline") if os.access(entry, os.R_OK)]
    assert any(sys.executable.encode() in line for line in lines)
    assert not any(secret in line for line in lines for secret in secrets)
    executor.cancel(job.experiment, is_urgent=True)
    wait_for(lambda: job.look() == "gone")
    logs = executor.read_logs()
    assert not any(secret in logs for secret in secrets)


def test_a_guard_that_has_ended_by_itself_is_no_zombie_when_others_are_looked_for(tmp_path):
    executor = LocalExecutor([0, 1], logs=tmp_path / "logs", is_lasting=True)
    first, second = Job(executor, tmp_path, 1), Job(executor, tmp_path, 2)
    for job in (first, second):
        job.submit()
    guards = wait_for(first.find_guards)
    kill_marked(f"{GUARD_MARK}={first.mark}")  # its experiment is over, and nobody looks for it again
    executor.poll([second.experiment])
    assert not any(guard.exists() for guard in guards)
    executor.cancel(second.experiment, is_urgent=True)
    assert second.look() == "gone"


@pytest.mark.slow
def test_slurm_says_what_others_use_and_what_is_away(slurm, slurm_executor):
    def read() -> dict[str, Place]:
        return {place.node: place for place in slurm_executor.read_places()}

    assert [(place.node, place.n_used, place.is_away) for place in read().values()] == [("n1", 0, 0), ("n2", 0, 0)]
    slurm.run(
        "sbatch", "--nodelist=n1", "--gres=gpu:1", "--job-name=of others", "--output=/dev/null", "--wrap=sleep 99"
    )
    wait_for(lambda: read()["n1"].n_used == 1)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        wait_for(lambda: read()["n2"].is_away)
        assert len(read()["n2"].devices) == 2
    finally:
        slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    wait_for(lambda: not read()["n2"].is_away)


@pytest.mark.slow
def test_slurm_has_a_job_wait_where_others_have_the_gpus_and_it_can_be_called_back(slurm, slurm_executor, tmp_path):
    slurm.run("sbatch", "--nodelist=n1", "--gres=gpu:2", "--output=/dev/null", "--wrap=sleep 99")
    wait_for(lambda: slurm_executor.read_places()[0].n_used == 2)
    job = Job(slurm_executor, tmp_path)
    job.submit()
    time.sleep(1.0)
    assert job.look() == "waiting"
    slurm_executor.cancel(job.experiment, is_urgent=True)
    wait_for(lambda: job.look() == "gone")


@pytest.mark.slow
def test_a_slurmctld_that_is_gone_has_lost_nothing_and_neither_have_we(slurm, slurm_executor, tmp_path):
    job, later = Job(slurm_executor, tmp_path), Job(slurm_executor, tmp_path, 2)
    name = job.submit().encode()
    job.wait_until_it_lives()
    wait_for(lambda: name in (slurm.folder / "state" / "job_state").read_bytes())  # it writes that now and then
    slurm.end("slurmctld", by_force=True)
    try:
        wait_for(lambda: job.look() == "unknown")
        assert slurm_executor.read_places() == []
        with pytest.raises(AwayError, match="squeue"):
            later.submit()
        assert job.find_guards()
    finally:
        slurm.start_controller()
        slurm.wait_for_nodes("mix", "idle")
    wait_for(lambda: job.look() == "alive")
    assert later.look() == "gone"


@pytest.mark.slow
def test_what_slurm_shows_of_a_job_says_nothing_of_its_token(slurm, slurm_executor, tmp_path):
    job = Job(slurm_executor, tmp_path)
    name = job.submit()
    secret = read_order(wait_for(job.find_guards)[0])
    (number,) = slurm.run("squeue", "-h", f"--name={name}", "-o", "%i")
    shown = slurm.run("scontrol", "-dd", "show", "job", number)
    shown += slurm.run("squeue", "-h", "-O", "ALL") + slurm.run("scontrol", "write", "batch_script", number, "-")
    assert any("lab.runner.guard" in line for line in shown)
    assert (tmp_path / "logs" / ODD / "runner-e1-1.txt").exists()
    assert not any(secret in line or job.order.token in line for line in shown)
    holding = [path for path in slurm.folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert all(path.is_relative_to(slurm.folder / "state") for path in holding), "none that nodes keep"
    assert all(path.stat().st_mode & 0o077 == 0 for path in holding)


@pytest.mark.slow
def test_slurm_refuses_what_no_node_has(slurm_executor, tmp_path):
    order, attempt = Job(slurm_executor, tmp_path).order, Attempt(experiment="e1", number=1)
    with pytest.raises(RefusedError, match="sbatch ended with 1"):
        slurm_executor.submit(attempt, order, "n1", ["gpu:0", "gpu:1", "gpu:2"])


def test_where_slurm_is_not_installed_that_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no sbatch"):
        SlurmExecutor(logs=tmp_path)
