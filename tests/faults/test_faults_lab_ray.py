"""Several machines through Ray, each with a folder of its own: one is killed, and the server is; nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from tests.lab_cases import PATIENCE_S, wait_for

from fulltilt.errors import UsageError
from fulltilt.hardware.proctree import find_marked, kill_marked
from fulltilt.lab.client import Client
from fulltilt.lab.executors.cluster import MARK, read_head
from fulltilt.lab.serving import find_server
from fulltilt.lab.states import LIVE
from fulltilt.lab.store import open_store

GRID = Path(__file__).parents[2] / "configs" / "parallel_grid.yaml"
SERVER = Path(__file__).with_name("run_ray_server.py")
TTL_S = 20.0
TEST = "FULLTILT_TEST_OF_RAY"  # in the environment of all that this test starts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


class Cluster:
    def __init__(self, folder: Path):
        self.folder, self.lab = folder, folder / "lab"
        self.mark = f"{TEST}={folder}"
        self.environ = {**os.environ, TEST: str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def serve(self, ttl_s: float = TTL_S) -> subprocess.Popen:
        command = [sys.executable, str(SERVER), str(self.lab), str(ttl_s)]
        server = subprocess.Popen(command, env=self.environ, start_new_session=True)
        wait_for(lambda: find_server(self.lab))
        return server

    def work(self, name: str) -> subprocess.Popen:
        address = find_server(self.lab)
        words = ["--url", address.url, "--name", name, "--gpus", "2", "--folder", str(self.folder / name)]
        words += ["--json", str(self.folder / f"{name}.json")]
        environ = self.environ | {"FULLTILT_LAB_TOKEN": address.token}
        return subprocess.Popen([sys.executable, "-m", "fulltilt", "lab", "work", *words], env=environ)

    def ask(self, what):
        """What a command gets that asks until the server answers."""

        def look():
            with contextlib.suppress(UsageError):
                return (what(Client(None, find_server(self.lab))),) if find_server(self.lab) else None

        return wait_for(look)[0]

    def list(self) -> dict[str, dict]:
        return {each["id"]: each for each in self.ask(lambda client: client.get("/api/experiments"))["experiments"]}

    def end(self, server: subprocess.Popen, machines: list[subprocess.Popen]) -> None:
        """End what is left of machines and server as their users do, and see that nothing stays."""
        for machine in machines:
            machine.terminate()
        assert {machine.wait(PATIENCE_S) for machine in machines} == {0}
        server.terminate()
        server.wait()
        wait_for(lambda: not find_marked(self.mark))  # Ray ends its own a moment after their node

    def list_commits(self) -> list[str]:
        with contextlib.closing(open_store(self.lab)) as store:
            return sorted(event.experiment for event in store.read_events() if event.arrow == "commit")

    def kill_machine(self, name: str) -> None:
        """Kill all that a machine runs, as its power supply does."""
        folder = str(self.folder / name)
        for pid in find_marked(self.mark):
            with contextlib.suppress(OSError):
                if (
                    folder.encode()
                    in Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
                ):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    kill_marked(cluster.mark)


def test_a_grid_survives_the_death_of_a_machine_and_of_the_server(cluster):
    server = cluster.serve()
    machines = [cluster.work(name) for name in ("n1", "n2")]
    cluster.ask(lambda client: client.submit(GRID, ["epochs=8"]))
    most = 0

    def find_victim():
        """A machine with an experiment that has a checkpoint and runs on."""
        nonlocal most
        found = cluster.list()
        live = [each for each in found.values() if each["state"] in LIVE]
        most = max(most, len(live))
        for each in live:
            files = cluster.ask(lambda client, id=each["id"]: client.get(f"/api/experiments/{id}"))["files"]
            if each["attempt"] == 1 and "checkpoint.pt" in files:
                return each
        return None

    victim = wait_for(find_victim)
    nodes = cluster.ask(lambda client: client.get("/api/nodes"))["nodes"]
    assert {node["name"]: node["sample"]["memory_total_bytes"] > 0 for node in nodes} == {"n1": True, "n2": True}
    told = [json.loads((cluster.folder / f"{name}.json").read_text()) for name in ("n1", "n2")]
    devices = ["simulated:0", "simulated:1"]
    assert told == [{"version": 1, "name": name, "devices": devices} for name in ("n1", "n2")]
    cluster.kill_machine(victim["node"])
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    head = read_head(cluster.lab)
    server = cluster.serve()

    def is_over() -> bool:
        nonlocal most
        found = cluster.list().values()
        most = max(most, sum(each["state"] in LIVE for each in found))
        return all(each["state"] == "succeeded" for each in found)

    wait_for(is_over)
    assert 2 <= most <= 4, "no more than there were devices; a part of Ray that starts slowly is started again"
    assert read_head(cluster.lab) == head, "the second server took over the head of the first"
    found = cluster.list()
    assert len(found) == 6
    again = found[victim["id"]]
    assert again["attempt"] > 1
    assert again["node"] != victim["node"]
    log = cluster.ask(lambda client: client.read(f"/api/experiments/{again['id']}/log", attempt=again["attempt"]))
    assert b"going on from step" in log
    (survivor,) = (machine for machine in machines if machine.poll() is None)
    cluster.end(server, [survivor])
    assert cluster.list_commits() == sorted(found)
    result = json.loads((Path(again["out_dir"]) / "result.json").read_text())
    assert result["reason"] == "finished"
    assert not find_marked(f"{MARK}={head.mark}")


OF_RAY = (
    "gcs_server",
    "raylet",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "dashboard.py",
    "ray.util.client.server",
)
GRPC = {"gcs_server", "raylet", "ray.util.client.server"}  # speak no HTTP 1 at any port, as the agent at one of two


def test_a1_no_port_of_ray_answers_who_has_no_token(cluster):
    server = cluster.serve()
    machine = cluster.work("n1")
    answers: dict[str, set[int | None]] = {}

    def ask_all() -> bool:
        answers.clear()
        for pid in find_marked(cluster.mark):
            with contextlib.suppress(psutil.Error, StopIteration):
                words = [(process := psutil.Process(pid)).name(), *process.cmdline()]
                name = next(name for name in OF_RAY if any(name in word for word in words))
                for each in process.net_connections("inet"):
                    if each.status == psutil.CONN_LISTEN:
                        answers.setdefault(name, set()).update(ask(each.laddr.ip, each.laddr.port))
        return {*answers} == {*OF_RAY} and all(answers[name] != {None} for name in {*OF_RAY} - GRPC)

    wait_for(ask_all, server)
    assert {name for name, codes in answers.items() if codes == {None}} == GRPC
    assert {code for codes in answers.values() for code in codes} == {None, 401}
    cluster.end(server, [machine])


def ask(ip: str, port: int) -> set[int | None]:
    """The codes of what Ray's dashboard and agent answer somebody without a token; None: no word of HTTP."""
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(ip, ip.removeprefix("::ffff:"))
    codes = set()
    for path in ("/api/jobs/", "/api/v0/nodes", "/api/job_agent/jobs/", "/metrics", "/"):
        try:
            answer = httpx.get(f"http://{host}:{port}{path}", trust_env=False, timeout=10)
        except httpx.TransportError:
            codes.add(None)
        else:
            is_page = path == "/" and answer.headers.get("content-type", "").startswith("text/html")
            codes |= set() if is_page else {answer.status_code}  # the dashboard's page is a shell, which asks for it
    return codes
