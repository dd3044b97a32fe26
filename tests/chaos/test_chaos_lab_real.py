"""A lab with real trainings, and one with a real Ray, killed: too long for every build."""

from __future__ import annotations

import random
from importlib.util import find_spec

import psutil
import pytest
from tests.faults.test_faults_lab_ray import GRID, Cluster
from tests.integration.test_integration_lab import kill_at_random_moments, lab_command
from tests.lab_cases import wait_for

from fulltilt.hardware.proctree import find_marked, kill_marked
from fulltilt.lab.executors.cluster import read_head

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def test_killed_at_any_moment_with_real_trainings(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    kill_at_random_moments(
        lambda folder: lab_command("submit", "--local", GRID, "epochs=2", folder=folder),
        lambda n: tmp_path / f"lab{n}",
        seed,
        n_kills=4,
        longest_s=15.0,
    )


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    kill_marked(cluster.mark)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_grid_survives_the_death_of_rays_gcs_alone(cluster):
    """Its machines end what they ran once they have missed it for some seconds, and join a new head."""
    cluster.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "3"  # instead of a minute
    server = cluster.serve(ttl_s=10.0)
    machine = cluster.work("n1")
    cluster.ask(lambda client: client.submit(GRID, ["epochs=30", "batch_size=128", "lr=[0.001, 0.01]"]))
    wait_for(lambda: [each for each in cluster.list().values() if each["metrics"]])  # it trains, and has evaluated
    (gcs,) = (process for process in map(psutil.Process, find_marked(cluster.mark)) if process.name() == "gcs_server")
    head = read_head(cluster.lab)
    gcs.kill()
    wait_for(lambda: {each["state"] for each in cluster.list().values()} == {"succeeded"}, server)
    found = cluster.list()
    assert read_head(cluster.lab) != head, "it was missed, and there is another one"
    assert max(each["attempt"] for each in found.values()) > 1
    cluster.end(server, [machine])
    assert (len(found), cluster.list_commits()) == (2, sorted(found))
