"""What a machine gives: a shell, memory, ports, the files of its users, an encrypted line (A12, A16, A17, A20, A21)."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from tests.attacks.wire import CANARY, ROOT, SHELL, Attacked, Wire, fill, parse
from tests.lab_cases import PATIENCE_S, wait_for

from fulltilt.cli import run_command
from fulltilt.errors import StorageError, UsageError
from fulltilt.lab.backup import write_backup
from fulltilt.lab.client import Client
from fulltilt.lab.depot import Depot
from fulltilt.lab.runner.link import Link, UnreachableError
from fulltilt.lab.runner.order import Order
from fulltilt.lab.server import live
from fulltilt.lab.server.access import MOST_FAILURES
from fulltilt.lab.server.bodies import MOST_BODY_BYTES
from fulltilt.lab.serving import find_server, open_lab, serve
from fulltilt.lab.states import OVER
from fulltilt.records.run_folder import hold_folder
from fulltilt.web import patience

# A12 and A16: a real run, looked at from outside


@pytest.mark.slow
def test_a12_no_shell_reads_what_a_user_wrote_and_no_environment_comes_from_a_request(run_of_a_lab):
    folder, _, seen = run_of_a_lab
    assert not list(folder.rglob("pwned"))
    assert not Path("pwned").exists()
    assert any(SHELL in line for line in seen["lines"]), "one word of an argument list"
    foreign = set(seen["environ"]) - set(os.environ) - {"LC_CTYPE"}
    ours = ("FULLTILT_", "STAND_IN_", "OMP_", "PYTHONUNBUFFERED", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
    assert all(name.startswith(ours) for name in foreign), foreign
    assert seen["environ"]["CUDA_VISIBLE_DEVICES"] == "", "a slot of the CPU has no GPU"
    added = {*seen["environ"]["PYTHONPATH"].split(os.pathsep)} - {*os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    assert all(Path(each).is_relative_to(folder) for each in added)


@pytest.mark.parametrize("name", ["env", "environment", "command", "environ", "cwd", "depot", "url", "python"])
def test_a12_a_submission_has_no_place_for_an_environment_or_a_command(attacked, name):
    answer = attacked.submit("lr: 1\n", **{name: {"LD_PRELOAD": "/tmp/x.so", "PYTHONPATH": "/tmp"}})
    assert answer.status == 422
    assert "LD_PRELOAD" not in (ROOT / "src/fulltilt/lab/runner/attempt.py").read_text()


@pytest.mark.slow
def test_a16_no_log_no_command_line_and_no_training_has_a_token(run_of_a_lab):
    folder, address, seen = run_of_a_lab
    assert not any(address.token in line for line in seen["lines"])
    assert not {"FULLTILT_ORDER", "FULLTILT_LAB_TOKEN"} & set(seen["environ"])
    assert address.token not in str(seen["environ"])
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("token", "server.json"):
            assert address.token.encode() not in path.read_bytes(), path


# A17: too much, too slow, too often


def test_a17_no_body_is_read_beyond_what_its_route_takes(attacked):
    piece = b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))
    before = psutil.Process().memory_info().rss
    for method, path, _ in attacked.routes():
        if method not in ("POST", "PUT", "DELETE"):
            continue
        at = fill(path)
        huge = attacked.wire(method, at, b"{}", token=None, content_type="application/json", content_length="9" * 12)
        assert huge.status in (400, 401, 413), (method, path)
        if "/files/" in path:
            continue
        head = f"{method} {at} HTTP/1.1\r\nHost: {attacked.wire.netloc}\r\nContent-Type: application/json\r\n"
        head += "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        pieces = [piece] * (2 * MOST_BODY_BYTES >> 20)
        assert parse(attacked.wire.raw(head.encode(), *pieces)).status in (401, 413), (method, path)
    assert psutil.Process().memory_info().rss - before < 16 * MOST_BODY_BYTES
    assert attacked.wire("GET", "/healthz").status == 200


def test_a17_heads_ranges_and_packed_bodies_have_their_limits(attacked):
    assert attacked.wire("GET", "/healthz", x_large="x" * (1 << 20)).status in (0, 400, 431)
    assert attacked.wire("GET", "/" + "x" * (1 << 17)).status in (0, 400, 414, 431)
    name = "/static/vendor/pico.min.css"
    size = len(attacked.wire("GET", name).body)
    ranges = attacked.wire("GET", name, range="bytes=" + ",".join(f"{n}-" for n in range(5000)))
    assert ranges.status in (200, 206, 400, 416)
    assert len(ranges.body) < 2 * size
    packed = gzip.compress(b'{"source": "/x.yaml", "text": "lr: 1"}')
    for kind in ("gzip", "deflate", "br"):
        headers = {"content_type": "application/json", "content_encoding": kind}
        assert attacked.wire("POST", "/api/sweeps", packed, token="submit", **headers).status in (400, 415, 422)
    form = b"--x\r\n" + b'Content-Disposition: form-data; name="a"\r\n\r\n1\r\n--x\r\n' * 5000
    answer = attacked.wire("POST", "/api/sweeps", form, token="submit", content_type="multipart/form-data; boundary=x")
    assert answer.status == 422


def test_a17_who_sends_or_reads_nothing_is_hung_up_on(attacked, monkeypatch):
    monkeypatch.setattr(patience, "HEAD_S", 0.2)
    monkeypatch.setattr(patience, "PIECE_S", 0.2)
    head = f"POST /login HTTP/1.1\r\nHost: {attacked.wire.netloc}\r\n".encode()
    for begun in (b"", b"G", head, head + b"Content-Length: 100\r\n\r\ntok"):
        with attacked.wire.open() as line:
            line.sendall(begun)
            with contextlib.suppress(ConnectionError):
                assert line.recv(1000) == b"", begun
    _, token = attacked.lease()
    file = attacked.send(token, os.urandom(16 << 20), "large.bin")
    attacked.commit(token, [file])
    with attacked.wire.open() as line:
        head = f"GET /runner/files/{file['digest']} HTTP/1.1\r\nHost: {attacked.wire.netloc}\r\n"
        line.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
        own = psutil.Process()
        us = line.getsockname()
        wait_for(lambda: not [each for each in own.net_connections("tcp") if each.raddr == us])
    assert attacked.wire("GET", "/healthz").status == 200


def test_a17_who_is_only_slow_is_not_and_may_ask_again_on_the_same_line(attacked, monkeypatch):
    monkeypatch.setattr(patience, "HEAD_S", 1.0)
    monkeypatch.setattr(patience, "PIECE_S", 1.0)
    host = f"Host: {attacked.wire.netloc}\r\n"
    with attacked.wire.open() as line:
        line.sendall(f"POST /login HTTP/1.1\r\n{host}Content-Length: 40\r\n\r\n".encode())
        for _ in range(4):  # 1.2 s in all
            time.sleep(0.3)
            line.sendall(b"token=gues")
        assert read_until(line, b"</html>").startswith(b"HTTP/1.1 401")
        line.sendall(f"GET /healthz HTTP/1.1\r\n{host}\r\n".encode())
        assert read_until(line, b'"ok"').startswith(b"HTTP/1.1 200")


def read_until(line: socket.socket, *marks: bytes) -> bytes:
    data = b""
    while not any(mark in data for mark in marks):
        data += (piece := line.recv(1000))
        assert piece
    return data


def test_a17_a_flood_of_listeners_leaves_room_for_others(attacked, monkeypatch):
    monkeypatch.setattr(live, "MOST_LISTENERS", 3)
    head = f"GET /live HTTP/1.1\r\nHost: {attacked.wire.netloc}\r\nAuthorization: Bearer {attacked.wire.token}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(attacked.wire.open()) for _ in range(12)]
        for line in lines:
            line.sendall(head.encode())
        told = [read_until(line, b" 503 ", b"retry: 2000", b"0\r\n\r\n") for line in lines]
        assert sum(b"retry: 2000" in each for each in told) == 3
        assert attacked.wire("GET", "/healthz").status == 200


def test_a17_guesses_become_slow_for_the_address_that_makes_them(attacked):
    def guess(source: str) -> int:
        return attacked.wire("POST", "/login", b"token=a-guess", token=None, source=source).status

    assert [guess("127.0.0.9") for _ in range(MOST_FAILURES + 2)] == [401] * MOST_FAILURES + [429] * 2
    right = f"token={attacked.wire.token}".encode()
    assert attacked.wire("POST", "/login", right, token=None, source="127.0.0.9").status == 429
    assert attacked.wire("POST", "/login", right, token=None).status == 303, "others are not shut out by it"


# A20: ports of ranks


@pytest.mark.slow
def test_a20_the_ranks_of_one_machine_listen_at_loopback_only(tmp_path):
    (tmp_path / "two.yaml").write_text("model: small_cnn\ndataset: digits\ntransform: normalize\nepochs: 30\n")
    words = ["run.device=cpu", "run.n_ranks=2", "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "fulltilt", "train", tmp_path / "two.yaml", *words]
    training = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def list_addresses() -> list[str]:
        found = []
        for process in [training, *training.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                sockets = process.net_connections("inet")
                found += [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
        return found

    try:
        found: set[str] = set()
        log = tmp_path / "out" / "events.jsonl"
        wait_for(lambda: found.update(list_addresses()) or (log.exists() and b"StepsDone" in log.read_bytes()))
        found.update(list_addresses())
    finally:
        training.terminate()
        training.wait(PATIENCE_S)
    assert found
    assert found <= {"127.0.0.1", "::1"}


# A21: other users of the machine

LOOK = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        print("read", path)
    except FileNotFoundError:
        print("missing", path)
    except PermissionError:
        pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a21_another_user_reads_nothing_of_a_lab(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        folder, control = Path(place, "lab"), Path(place, "control")
        control.write_text("x")
        folder.mkdir(mode=0o755)
        with hold_folder(folder), open_lab(folder, create=True) as lab, serve(lab, []) as (address, _):
            found = Attacked(lab, address.url, address.token)
            _, token = found.lease()
            found.append(token, "log.txt", b"log")
            found.send(token, b"weights", "checkpoint.pt")
            found.submit("lr: 1\n")
            write_backup(folder, Path(place, "saved.tar"))
            paths = [folder, *folder.rglob("*"), Path(place, "saved.tar")]
            assert len(paths) > 10
            done = subprocess.run(
                [sys.executable, "-c", LOOK, control, *paths], capture_output=True, text=True, check=True
            )
    assert done.stdout.splitlines() == [f"read {control}"]


def test_a21_a_link_that_somebody_laid_is_not_followed(attacked, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(CANARY)
    digest = hashlib.sha256(CANARY).hexdigest()
    depot = Depot(tmp_path / "depot")
    for lay in (lambda place: place.symlink_to(secret), os.mkfifo):
        (place := tmp_path / "depot" / digest[:2] / digest).parent.mkdir(parents=True, exist_ok=True)
        lay(place)
        assert not depot.has(digest)
        for use in (depot.open, depot.measure, lambda digest: depot.link(digest, tmp_path / "target")):
            with pytest.raises(StorageError):
                use(digest)
        place.unlink()
    place.parent.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / digest).write_bytes(CANARY)
    place.parent.symlink_to(tmp_path / "elsewhere")
    assert not depot.has(digest)
    attempt, token = attacked.lease()
    folder = attacked.lab.folder / attempt.experiment
    folder.mkdir()
    for name in ("log-1.txt", "events-1.jsonl"):
        (folder / name).symlink_to(secret)
    for path in (f"/api/experiments/{attempt.experiment}/log?attempt=1", f"/experiments/{attempt.experiment}", "/"):
        assert CANARY not in attacked.wire("GET", path).body
    assert attacked.wire("PUT", f"/runner/streams/log.txt?offset={len(CANARY)}", b"more", token=token).status >= 400
    assert secret.read_bytes() == CANARY


# The line itself, encrypted


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls_by_flags_a_runner_trains_and_who_trusts_another_authority_gets_no_word(tmp_path, capsys, monkeypatch):
    (certificate, key), (other, _) = (make_certificate(tmp_path, name) for name in ("lab", "other"))
    folder, config = tmp_path / "lab", tmp_path / "one.yaml"
    config.write_text("model: small_cnn\ndataset: digits\ntransform: normalize\nepochs: 1\n")
    command = [sys.executable, "-m", "fulltilt", "lab", "serve", "--lab", folder, "--port", "0", "--devices", "cpu"]
    server = subprocess.Popen([*command, "--tls-certificate", certificate, "--tls-key", key], stdout=subprocess.DEVNULL)
    try:
        address = wait_for(lambda: find_server(folder))
        assert address.url.startswith("https://127.0.0.1:")
        client = Client(None, address)
        client.submit(config, [])
        wait_for(lambda: client.get("/api/experiments/e1")["experiment"]["state"] in OVER)
        assert client.get("/api/experiments/e1")["experiment"]["state"] == "succeeded"
        assert run_command(["lab", "list", "--lab", str(folder)]) == 0, "a command on this machine"
        assert "1 succeeded" in capsys.readouterr().out
        wire = Wire(address.url, address.token)
        assert b"HTTP/" not in wire.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"), "plain HTTP"
        for authority in (None, str(other)):
            with pytest.raises(UsageError, match="CERTIFICATE_VERIFY_FAILED"):
                Client(None, dataclasses.replace(address, authority=authority)).get("/api/status")
            order = Order(url=address.url, token="t", mark="m", node="n", root=str(tmp_path), authority=authority)
            with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
                Link(order).greet(pid=1)
        monkeypatch.setenv("FULLTILT_LAB_TOKEN", address.token)
        for authority, code in ((certificate, 0), (other, 2), (tmp_path / "none", 2)):
            monkeypatch.setenv("FULLTILT_LAB_AUTHORITY", str(authority))
            assert run_command(["lab", "list", "--url", address.url]) == code
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
