"""What an engine promises the lab: an order starts one guard, it is found again, ended, and told apart from unknown."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from fulltilt.hardware.proctree import find_marked
from fulltilt.lab.executors.local import LocalExecutor
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import MARK, Order
from fulltilt.lab.store import compute_digest

PATIENCE_S = 60


@pytest.fixture(params=["local"])
def executor(request, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    executor = LocalExecutor([0, 1], logs=tmp_path / "logs", is_lasting=True)
    yield executor
    executor.close()


def wait_for(look):
    end = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


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


def test_the_machines_are_named_with_all_their_devices(executor):
    (place, *_) = executor.read_places()
    assert place.node
    assert len(set(place.devices)) == len(place.devices) == 2


def test_an_order_starts_an_attempt_once_and_it_is_found_until_it_is_ended(executor, tmp_path):
    job = Job(executor, tmp_path)
    assert job.look() == "gone"
    assert job.submit() == job.submit()
    assert job.look() == "alive"
    job.executor.cancel(job.experiment, is_urgent=True)
    wait_for(lambda: job.look() == "gone")
    assert find_marked(f"{MARK}={job.mark}") == []


def test_one_attempt_is_not_taken_for_another_of_the_same_experiment(executor, tmp_path):
    first, second = Job(executor, tmp_path, 1), Job(executor, tmp_path, 2)
    second.submit()
    assert (first.look(), second.look()) == ("gone", "alive")
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
    assert job.look() == "alive"
    executor.cancel(job.experiment, is_urgent=True)
    wait_for(lambda: job.look() == "gone")


def test_the_token_of_an_attempt_is_in_no_log_and_on_no_command_line(executor, tmp_path):
    job = Job(executor, tmp_path)
    job.submit()
    secrets = [job.order.token.encode(), next(iter(job.order.to_environment().values())).encode()]
    lines = [entry.read_bytes() for entry in Path("/proc").glob("[0-9]*/cmdline") if os.access(entry, os.R_OK)]
    assert any(sys.executable.encode() in line for line in lines)
    assert not any(secret in line for line in lines for secret in secrets)
    executor.cancel(job.experiment, is_urgent=True)
    wait_for(lambda: job.look() == "gone")
    logs = b"".join(path.read_bytes() for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert not any(secret in logs for secret in secrets)
