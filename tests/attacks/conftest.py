"""A served lab under attack, and a real run of one, looked at from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.attacks.wire import CANARY, SHELL, Attacked
from tests.lab_cases import PATIENCE_S, wait_for

from fulltilt.lab.client import Client
from fulltilt.lab.serving import find_server, open_lab, serve
from fulltilt.records.run_folder import hold_folder

STAND_IN = Path(__file__).parents[1] / "unit" / "lab" / "run_stand_in_server.py"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A served lab with three experiments; beside its folder lies what nobody may read."""
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "canary.txt").write_bytes(CANARY)
    (folder / "lab").mkdir()
    before = list_listeners()
    with (
        hold_folder(folder / "lab"),
        open_lab(folder / "lab", create=True) as lab,
        serve(lab, []) as (address, _),
    ):
        found = Attacked(lab, address.url, address.token)
        for _ in range(3):
            found.add()
        found.listening = list_listeners() - before
        yield found


def list_listeners() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def run_of_a_lab(tmp_path_factory):
    """A server as a process, one experiment with a name for a shell; all that was to be seen of it while it ran."""
    folder = tmp_path_factory.mktemp("run")
    project, lab = folder / "project", folder / "lab"
    project.mkdir()
    (project / SHELL).write_text("lr: 0.1\nmodel: 'x(note=\"$(touch pwned)\")'\n")
    environ = {**os.environ, "STAND_IN_STEPS": "100", "STAND_IN_ALONE": "1"}
    with (folder / "said.txt").open("wb") as said:
        server = subprocess.Popen(
            [sys.executable, STAND_IN, lab, "60", "1"], stdout=said, stderr=said, env=environ, cwd=folder
        )
    try:
        address = wait_for(lambda: find_server(lab))
        client = Client(None, address)
        with contextlib.chdir(project):
            client.submit(project / SHELL, ["optim.lr=0.2"])
        wait_for(lambda: client.get("/api/experiments/e1")["experiment"]["state"] == "running")
        training = wait_for(
            lambda: [p for p in psutil.Process(server.pid).children(True) if "stand_in_train" in str(p.cmdline())]
        )
        seen = {"lines": [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]}
        seen["environ"] = training[0].environ()
        wait_for(lambda: client.get("/api/experiments/e1")["experiment"]["state"] == "succeeded")
        yield folder, address, seen
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
