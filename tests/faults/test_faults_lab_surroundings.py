"""What a lab stands on goes wrong: disks that are full on either side, clocks that jump, clients that do not read."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from tests.lab_cases import PATIENCE_S, Bench, lease, wait_for

from fulltilt.cli import run_command
from fulltilt.errors import StorageError
from fulltilt.lab.client import Client
from fulltilt.lab.operations import prioritise
from fulltilt.lab.records import Artefact
from fulltilt.lab.scheduling.leases import Term
from fulltilt.lab.serving import open_lab, serve

pytestmark = pytest.mark.slow
TTL_S = 30.0
CHECKPOINTING = {"STAND_IN_STEPS": "100000", "STAND_IN_CHECKPOINT": "checkpoint.pt"}
SITE = """
import random, time
real = time.time
time.time = lambda: real() + random.choice((-86400.0, 86400.0))
"""


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk of its own can be mounted here ({mounted.stderr.decode().strip()})")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def open_bench(folder: Path, root: Path):
    folder.mkdir()
    with (
        open_lab(folder, create=True, term=Term(ttl_s=TTL_S, grace_s=0.1 * TTL_S)) as lab,
        serve(lab, []) as (address, _),
    ):
        bench = Bench(lab, address.url, root)
        bench.address = address
        yield bench


def may_prioritise(bench: Bench, priority: int) -> bool:
    with contextlib.suppress(StorageError):
        return prioritise(bench.lab, "e1", priority).priority == priority
    return False


def fill(disk: Path) -> Path:
    path = disk / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"0" * 4096)
    return path


def test_while_the_servers_disk_is_full_all_waits_and_then_goes_on_by_itself(small_disk, tmp_path):
    blob = tmp_path / "blob"
    blob.write_bytes(os.urandom(1 << 20))
    with open_bench(small_disk / "lab", tmp_path) as bench:
        guard, _ = bench.start(STAND_IN_STEPS="10", STAND_IN_PRINTS=str(blob))
        filler = fill(small_disk)
        wait_for(lambda: bench.read().state == "running")  # the ballast makes room for that
        wait_for((tmp_path / "node" / "attempts" / "e1-1" / "result.json").exists)
        time.sleep(1.5)  # it was tried to hand that in
        assert not Client(None, bench.address).get("/api/status")["has_room"]
        wait_for(lambda: may_prioritise(bench, 5))  # the first change of state that finds no room makes some
        assert (bench.read().state, guard.poll()) == ("running", None)
        filler.unlink()
        assert guard.wait(PATIENCE_S) == 0
        assert bench.read().state == "succeeded"
        assert (bench.lab.folder / "e1" / "log-1.txt").read_bytes().endswith(blob.read_bytes())
        assert (bench.lab.folder / "e1" / "counter").read_text() == "10"
        assert bench.lab.store.has_room()


def test_a_nodes_full_disk_is_told_as_such_and_is_no_fault_of_the_experiment(small_disk, tmp_path):
    blob = tmp_path / "blob"
    blob.write_bytes(os.urandom(9 << 20))
    with open_bench(tmp_path / "lab", tmp_path) as bench:
        guard, _ = bench.start(root=small_disk / "node", STAND_IN_PRINTS=str(blob))
        assert guard.wait(PATIENCE_S) == 0
        found = bench.read()
        assert (found.state, found.outcome) == ("backoff", "infra_refused")
        assert found.reason.startswith(f"no space left for {small_disk}/node/attempts/e1-1 on n1; free some there")
        bench.lab.store.advance("wake", found.newest)
        fill(small_disk)
        guard, _ = bench.start(root=small_disk / "node")  # now it cannot even begin there
        assert guard.wait(PATIENCE_S) == 0
        assert bench.read().outcome == "infra_refused"
        assert re.match(r"n1 cannot (begin|start it): .*No space left", bench.read().reason)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


def test_a_disk_that_became_read_only_is_told_as_such_and_nothing_of_the_queue_is_lost(small_disk, tmp_path, capfd):
    folder = small_disk / "lab"
    with open_bench(folder, tmp_path) as bench:
        assert bench.read().state == "queued"
    remount(small_disk, "ro")
    for words in (["list"], ["cancel", "e1"], ["serve", "--port", "0"], ["backup", str(small_disk / "lab.tar")]):
        assert run_command(["lab", *words, "--lab", str(folder)]) not in (0, 130)
        said = capfd.readouterr().err
        assert re.search(r"lab: .*([Rr]ead-only|cannot be (written|used)).*; \S", said, re.DOTALL), said
        assert "Traceback" not in said
    remount(small_disk, "rw")
    with open_bench(tmp_path / "lab", tmp_path) as bench:
        remount(small_disk, "ro")
        guard, _ = bench.start(root=small_disk / "node")
        assert guard.wait(PATIENCE_S) == 0
        assert (bench.read().state, bench.read().outcome) == ("backoff", "infra_refused")
        assert re.match(r"n1 cannot begin: .*Read-only file system", bench.read().reason)
    remount(small_disk, "rw")
    assert run_command(["lab", "list", "--lab", str(folder)]) == 0
    assert "1 queued" in capfd.readouterr().out


def test_a_checkpoint_that_is_damaged_in_the_depot_is_left_for_the_one_before(tmp_path):
    with open_bench(tmp_path / "lab", tmp_path) as bench:
        reached = []
        for number in (1, 2):  # each on a node of its own
            guard, _ = bench.start(root=tmp_path / f"n{number}", **CHECKPOINTING)
            wait_for(lambda number=number: {file.attempt for file in bench.lab.store.read_artefacts("e1")} >= {number})
            guard.send_signal(signal.SIGTERM)
            assert guard.wait(PATIENCE_S) == 0
            reached.append(int((tmp_path / f"n{number}" / "e1" / "checkpoint.pt").read_text()))
        newest, _ = bench.lab.store.read_artefacts("e1")
        assert 0 < reached[0] < reached[1]
        (bench.lab.folder / "depot" / newest.digest[:2] / newest.digest).write_bytes(b"garbage")
        guard, _ = bench.start(root=tmp_path / "n3", **CHECKPOINTING | {"STAND_IN_STEPS": str(reached[1] + 1)})
        assert guard.wait(PATIENCE_S) == 0
        assert bench.read_log(3)[1] == f"from step {reached[0]}: optim.lr=0.001"
        assert bench.read().state == "succeeded"


def test_clocks_that_jump_by_a_day_change_nothing(tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    real = time.time
    with open_bench(tmp_path / "lab", tmp_path) as bench:
        monkeypatch.setattr(time, "time", lambda: real() + random.choice((-86400.0, 86400.0)))
        guard, _ = bench.start(STAND_IN_STEPS="50", PYTHONPATH=str(site))
        assert guard.wait(PATIENCE_S) == 0
        found = bench.read()
        assert (found.state, found.attempt) == ("succeeded", 1)
        assert [event.arrow for event in bench.lab.store.read_events()] == [
            "submit",
            "lease",
            "start",
            "finish",
            "commit",
        ]
        assert bench.read_log(1)[1] == "from step 0: optim.lr=0.001"


def test_clients_that_do_not_read_keep_nobody_waiting(tmp_path):
    """More of them than the server has threads: downloads of a large file, and listeners to changes."""
    with open_bench(tmp_path / "lab", tmp_path) as bench, contextlib.ExitStack() as stack:
        large = tmp_path / "checkpoint.pt"
        with large.open("wb") as stream:
            stream.truncate(64 << 20)
        attempt, _ = lease(bench.lab.store, bench.read())
        digest = bench.lab.depot.put(large)
        bench.lab.store.add_artefacts(attempt, [Artefact(name=large.name, digest=digest, n_bytes=64 << 20)])
        host, port = bench.url.removeprefix("http://").split(":")
        for path in [f"/api/experiments/e1/files/{large.name}"] * 60 + ["/live"] * 20:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            lines = (f"GET {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {bench.address.token}", "", "")
            client.sendall("\r\n".join(lines).encode())
            assert client.recv(12) == b"HTTP/1.1 200"
        assert Client(None, bench.address).get("/api/status")["states"] == {"leased": 1}
