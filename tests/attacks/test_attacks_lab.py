"""The classes of attack on a lab, A1 to A26 (docs/security.md): the real server refuses each, over its real line."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from starlette.staticfiles import StaticFiles
from tests.attacks.browser import build_proxy, dump_page
from tests.attacks.wire import PATIENCE_S, Attacked, Wire, fill, list_routes, parse

from fulltilt.cli import run_command
from fulltilt.config.binding import find_target
from fulltilt.errors import ConfigError, StorageError, UsageError
from fulltilt.lab.backup import write_backup
from fulltilt.lab.client import Client
from fulltilt.lab.depot import Depot
from fulltilt.lab.export import write_csv
from fulltilt.lab.redaction import HIDDEN, redact
from fulltilt.lab.runner.link import Link, UnreachableError
from fulltilt.lab.runner.order import Order
from fulltilt.lab.server import live
from fulltilt.lab.server.access import COOKIE, MOST_FAILURES, ROLES
from fulltilt.lab.server.app import build_app
from fulltilt.lab.server.bodies import MOST_BODY_BYTES
from fulltilt.lab.serving import find_server, open_lab, serve
from fulltilt.lab.snapshot import unpack_code
from fulltilt.lab.states import OVER
from fulltilt.records.run_folder import hold_folder
from fulltilt.web import patience
from fulltilt.web.gate import HEADERS, read_or_make_token

ROOT = Path(__file__).parents[2]
LAB = ROOT / "src" / "fulltilt" / "lab"
WEB = ROOT / "src" / "fulltilt" / "web" / "static"
STAND_IN = ROOT / "tests" / "unit" / "lab" / "run_stand_in_server.py"
OPEN = {"/healthz", "/login", "/static/{name:path}"}
CANARY = b"THE-CANARY-OF-THE-HOST"


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


def wait_for(look, seconds: float = PATIENCE_S):
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def read_routes(attacked) -> list[tuple[str, str, str | None]]:
    return list_routes(build_app(attacked.lab, token="t"))


# A1: nobody without a token


def test_a01_every_route_names_its_role_and_answers_nobody_without_it(attacked):
    routes, before = read_routes(attacked), attacked.take_stock()
    assert len(routes) > 20
    assert {path for _, path, role in routes if role == "anyone"} <= OPEN
    for method, path, role in routes:
        assert role in ROLES, f"{method} {path} has no role"
        if role == "anyone":
            continue
        at = fill(path)
        for token in (None, "a-guess", ""):
            assert attacked.wire(method, at, token=token).status == 401, (method, path, token)
        asked = f"{at}?token={attacked.wire.token}&access_token={attacked.wire.token}"
        assert attacked.wire(method, asked, token=None).status == 401, "a token in a URL is none"
        if role == "runner":
            assert attacked.wire(method, at).status == 401, "who owns the lab is no attempt"
    assert attacked.take_stock() == before


def test_a01_a_route_a_router_a_mount_or_a_file_server_without_a_role_is_found(attacked):
    from fastapi import APIRouter, FastAPI

    app, router = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), APIRouter()
    router.get("/late")(lambda: {})
    router.websocket("/socket")(lambda websocket: None)
    app.include_router(router, prefix="/more")
    app.mount("/files", StaticFiles(directory=ROOT))
    app.mount("/app", FastAPI())
    app.add_route("/bare", lambda request: None)
    found = {path: role for _, path, role in list_routes(app)}
    assert found == dict.fromkeys(("/more/late", "/more/socket", "/files", "/app", "/bare"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_a01_off_loopback_tokens_do_not_travel_in_the_clear(host, tmp_path, capsys):
    assert run_command(["lab", "serve", "--host", host, "--devices", "none", "--lab", str(tmp_path / "lab")]) == 2
    assert "tokens would cross the network unencrypted" in capsys.readouterr().err


# A2: no default password


def test_a02_every_lab_has_a_token_of_its_own_and_no_usual_one_opens_any(attacked, tmp_path):
    labs = [tmp_path / name for name in ("one", "two", "crashed")]
    for lab in labs:
        lab.mkdir()
    (labs[2] / "token").touch(mode=0o600)  # its server was killed before it had written one
    tokens = {read_or_make_token(lab) for lab in labs}
    assert len(tokens) == 3
    assert all(len(token) >= 32 for token in tokens)
    for token in ("admin", "password", "token", "none", "null", "undefined", "*", "root", "0" * 32):
        assert attacked.wire("GET", "/api/status", token=token).status == 401
    for headers in (
        {"cookie": f"{COOKIE}="},
        {"cookie": COOKIE},
        {"authorization": "Basic YWRtaW46YWRtaW4="},
        {"authorization": attacked.wire.token},
        {"authorization": "Bearer"},
        {"authorization": "Bearer \xff\xfe"},
    ):
        assert attacked.wire("GET", "/api/status", token=None, **headers).status in (400, 401), headers


# A3: another site in the user's browser


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost:1"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://{netloc}.evil.example"}, 403),
        ({"origin": "http://{netloc}"}, 200),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "cross-site", "user_agent": "curl/8"}, 403),
        ({"content_type": "text/plain"}, 422),
        ({"content_type": "application/x-www-form-urlencoded"}, 422),
        ({"content_type": "multipart/form-data; boundary=x"}, 422),
        ({"content_type": None}, 422),
    ],
)
def test_a03_what_a_browser_sends_for_another_site_changes_nothing(attacked, headers, status):
    id = attacked.add()
    headers = {name: value and value.replace("{netloc}", attacked.wire.netloc) for name, value in headers.items()}
    headers |= {"cookie": f"{COOKIE}={attacked.wire.token}"}
    given = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    answer = attacked.wire("POST", f"/api/experiments/{id}/priority", b'{"priority": 5}', token=None, **given)
    assert answer.status == status, answer.text
    assert attacked.read(id).priority == (5 if status == 200 else 0)


def test_a03_no_site_is_told_that_it_may_and_none_signs_a_browser_in(attacked):
    evil = {"origin": "http://evil.example", "access_control_request_method": "POST"}
    for method in ("OPTIONS", "GET", "POST"):
        answer = attacked.wire(method, "/api/experiments", **evil)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    form = f"token={attacked.wire.token}".encode()
    answer = attacked.wire("POST", "/login", form, token=None, origin="http://evil.example")
    assert (answer.status, "set-cookie" in answer.headers) == (403, False)


# A4: another name that leads here


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        *((host, False) for host in ("evil.example", "evil.example:{port}", "localhost.evil.example", "", "0.0.0.0")),
        *((host, False) for host in ("localhost:80@evil.example", "[::1]evil.example", "localhost.", "127.0.0.1:x")),
        *((host, False) for host in ("2130706433", "127.1", "[::ffff:127.0.0.1]", "localhost, evil.example")),
        *((host, True) for host in ("127.0.0.1:{port}", "localhost", "LOCALHOST:9", "[::1]:{port}")),
    ],
)
def test_a04_only_to_its_own_names_a_server_answers(attacked, host, is_ours):
    answer = attacked.wire("GET", "/api/status", host=host.replace("{port}", str(attacked.wire.port)))
    assert answer.status == 200 if is_ours else answer.status in (400, 421)


def test_a04_a_second_name_or_one_in_the_first_line_counts_for_nothing(attacked):
    line = f"Authorization: Bearer {attacked.wire.token}\r\nConnection: close\r\n\r\n"
    for head in (
        f"GET /api/status HTTP/1.1\r\nHost: {attacked.wire.netloc}\r\nHost: evil.example\r\n",
        "GET http://localhost/api/status HTTP/1.1\r\nHost: evil.example\r\n",
        "GET /api/status HTTP/1.1\r\n",
    ):
        assert parse(attacked.wire.raw((head + line).encode())).status in (400, 421)


# A5: no websocket, no token in a URL


def test_a05_there_is_no_websocket(attacked):
    headers = {"upgrade": "websocket", "connection": "Upgrade, close", "sec_websocket_version": "13"}
    for path in ("/", "/live", "/api/status", "/ws"):
        answer = attacked.wire("GET", path, token=None, sec_websocket_key="AAAAAAAAAAAAAAAAAAAAAA==", **headers)
        assert answer.status in (401, 404)


def test_a05_no_part_of_the_lab_writes_a_token_where_servers_and_logs_see_it():
    for path in [
        *LAB.rglob("*.py"),
        *LAB.rglob("*.html"),
        LAB / "server/static/lab.js",
        *(LAB.parents[0] / "cli").glob("*lab*"),
    ]:
        assert not re.search(r"[?&](access_)?token=", path.read_text()), path


# A6: names that lead elsewhere

NAMES = ["..", "../canary.txt", "../../canary.txt", "/etc/passwd", "//proc/self/cwd/canary.txt", "..\\canary.txt"]
NAMES += ["%2e%2e%2fcanary.txt", "canary.txt\0", "#", "?", "a" * 5000]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
def test_a06_no_name_in_a_path_leads_out_of_a_lab(attacked, name):
    _, token = attacked.lease()
    around = attacked.lab.folder.parent
    before = sorted(around.iterdir())
    for method, path, role in read_routes(attacked):
        if "{" not in path:
            continue
        for written in (quote(name), quote(name, safe=""), quote(quote(name, safe=""), safe="")):
            at = fill(path, **dict.fromkeys(("id", "name", "digest", "action", "label", "node"), written))
            answer = attacked.wire(
                method, at, b"x" if method == "PUT" else b"", token=token if role == "runner" else "owner"
            )
            assert 300 <= answer.status < 500, (method, at, answer.text)
            assert CANARY not in answer.body
            assert b"root:" not in answer.body
    assert sorted(around.iterdir()) == before
    assert (around / "canary.txt").read_bytes() == CANARY


FILE_NAMES = ["..", "../x", "/etc/passwd", "a/b", ".hidden", "", "a\0b", "a\nb", "\x1b[2J", "é" * 150, "\ud800"]


@pytest.mark.parametrize("name", FILE_NAMES, ids=ascii)
def test_a06_no_name_of_a_result_leads_out_of_its_folder_or_stops_the_queue(attacked, name):
    attempt, token = attacked.lease()
    file = attacked.send(token, b"x", name)
    for path, body in (
        ("/runner/checkpoint", {"files": [file]}),
        ("/runner/finish", {"outcome": "succeeded", "files": [file]}),
    ):
        assert attacked.wire("POST", path, body, token=token).status in (400, 422)
    assert attacked.read(attempt.experiment).state == "running"
    source = f"/somewhere/{name or '..'}" if not name.startswith(("a/", ".h", "../x")) else "/"
    answer = attacked.wire("POST", "/api/sweeps", {"source": source, "text": "lr: 1\n"}, token="submit")
    assert answer.status in (400, 422) or name in ("/etc/passwd",), answer.text


# A7: archives


def build_tar(*entries: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for entry, content in entries:
            entry.size = entry.size or len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def build_link(kind: bytes) -> tarfile.TarInfo:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = kind, "/etc/passwd"
    return link


def build_huge() -> bytes:
    entry = tarfile.TarInfo("sparse")
    entry.size = 1 << 40
    return entry.tobuf(tarfile.GNU_FORMAT)


EVIL_TARS = {
    "above": build_tar((tarfile.TarInfo("../out.py"), b"x")),
    "absolute link": build_tar((build_link(tarfile.SYMTYPE), b"")),
    "hard link": build_tar((build_link(tarfile.LNKTYPE), b"")),
    "device": build_tar((build_link(tarfile.CHRTYPE), b"")),
    "packed bomb": gzip.compress(build_tar((tarfile.TarInfo("zeros"), b"\0" * (1 << 20)))),
    "huge": build_huge(),
    "none": b"no archive at all",
}


@pytest.mark.parametrize("name", EVIL_TARS)
def test_a07_an_archive_that_leads_outside_or_grows_without_end_is_refused(tmp_path, name):
    (tmp_path / "evil.tar").write_bytes(EVIL_TARS[name])
    with pytest.raises(UsageError):
        unpack_code(tmp_path / "evil.tar", tmp_path / "code", beside=tmp_path / "nowhere")
    assert [each.name for each in tmp_path.iterdir()] == ["evil.tar"]


def test_a07_an_archive_of_too_many_or_too_large_files_is_refused(tmp_path, monkeypatch):
    (tmp_path / "code.tar").write_bytes(build_tar(*((tarfile.TarInfo(f"{n}.py"), b"x" * 100) for n in range(5))))
    for limit, most in (("MOST_FILES", 4), ("MOST_BYTES", 400)):
        monkeypatch.setattr(f"fulltilt.lab.snapshot.{limit}", most)
        with pytest.raises(UsageError, match="larger than"):
            unpack_code(tmp_path / "code.tar", tmp_path / "code", beside=tmp_path / "nowhere")
        monkeypatch.undo()


# A8: methods that nobody offered


def test_a08_nothing_is_called_by_a_name_that_somebody_sends(attacked):
    before = attacked.take_stock()
    for name in (
        "__class__",
        "__init__",
        "submit",
        "finish",
        "lease",
        "advance",
        "eval",
        "cancel()",
        "cancel%00",
        "CANCEL",
    ):
        assert attacked.wire("POST", f"/api/experiments/e1/{name}").status in (404, 405, 422), name
    for method in ("TRACE", "PATCH", "PROPFIND", "BREW", "PUT"):
        assert attacked.wire(method, "/api/experiments/e1").status == 405
    for override in ("x_http_method_override", "x_method_override", "x_http_method"):
        attacked.wire("GET", "/api/experiments/e1", **{override: "DELETE"})
        attacked.wire("GET", "/api/experiments/e1?_method=DELETE", **{override: "POST"})
    assert attacked.take_stock() == before


# A9: pickles


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def build_hostile_checkpoints(canary: Path) -> list[bytes]:
    """A pickle, and one in an archive as torch writes them."""
    pickled, buffer = pickle.dumps(Bomb(canary), protocol=2), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return [pickled, buffer.getvalue()]


def test_a09_the_server_opens_no_checkpoint_and_hands_it_out_as_it_came(attacked, tmp_path):
    canary = tmp_path / "canary"
    for content in build_hostile_checkpoints(canary):
        attempt, token = attacked.lease()
        files = [attacked.send(token, content, name) for name in ("checkpoint.pt", "result.json", "events.jsonl")]
        assert attacked.wire("POST", "/runner/checkpoint", {"files": files}, token=token).status == 200
        attacked.wire("PUT", "/runner/streams/events.jsonl?offset=0", content + b"\n", token=token)
        done = attacked.wire("POST", "/runner/finish", {"outcome": "succeeded", "files": files}, token=token)
        assert done.json() == {"state": "succeeded"}
        for path in (f"/experiments/{attempt.experiment}", "/", "/queue", "/export.csv", "/api/experiments"):
            assert attacked.wire("GET", path).status == 200
        found = attacked.wire("GET", f"/api/experiments/{attempt.experiment}/files/checkpoint.pt")
        assert (found.body, found.headers["content-type"]) == (content, "application/octet-stream")
        assert found.headers["content-disposition"].startswith("attachment")
    assert not canary.exists()


@pytest.mark.slow
def test_a09_a_training_that_goes_on_from_a_hostile_checkpoint_runs_none_of_it(tmp_path):
    canary, out = tmp_path / "canary", tmp_path / "out"
    (tmp_path / "one.yaml").write_text("model: small_cnn\ndataset: digits\ntransform: normalize\nepochs: 1\n")
    command = [
        sys.executable,
        "-m",
        "fulltilt",
        "train",
        tmp_path / "one.yaml",
        "run.device=cpu",
        "--resume",
        "--out",
        out,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    assert (out / "checkpoint.pt").is_file()
    for content in build_hostile_checkpoints(canary):
        for name in ("checkpoint.pt", "checkpoint.previous.pt"):
            (out / name).write_bytes(content)
        done = subprocess.run([*command, "epochs=2"], capture_output=True, text=True, timeout=600)
        assert "checkpoint" in done.stdout + done.stderr
        assert not canary.exists()


# A10: YAML and JSON that explode

LAUGHS = "".join(
    [
        "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    ]
)
MERGES = "a0: &a0 {}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 20))
REFERENCES = (
    f"name: {'x' * 1000}\nmodel: '{'${name}' * 50}'\ndataset: '{'${model}' * 50}'\nloss: '{'${dataset}' * 5000}'\n"
)
BAD_TEXTS = {
    "laughs": (LAUGHS, "more than"),
    "merges": (MERGES, "more than"),
    "references": (REFERENCES, "references bring more than"),
    "itself": ("a: &a [*a]\n", "anchor"),
    "apply": ("lr: !!python/object/apply:os.system [touch canary]\n", "unknown tag"),
    "name": ("lr: !!python/name:os.system\n", "unknown tag"),
    "module": ("lr: !!python/module:os\n", "unknown tag"),
    "new": ("lr: !!python/object/new:os.system {args: [ls]}\n", "unknown tag"),
    "twice": ("optim: {lr: 1, lr: 2}\n", "stands here and in line"),
    "hexadecimal": (f"seed: 0x{'f' * 6000}\n", "bits"),
    "decimal": (f"seed: {'9' * 6000}\n", "is not int"),
    "call": (f"model: small_cnn(width={'9' * 6000})\n", "model"),
    "infinite": ("lr: 1e999999\n", "finite"),
    "deep": ("a: " + "[" * 900 + "\n", "nested deeper"),
    "deep call": (f"model: {'a(' * 900}{')' * 900}\n", "inside each other"),
    "zero": ('model: "a\\0b"\n', "expected"),
    "two": ("lr: 1\n---\nlr: 2\n", "second document"),
    "no mapping": ("[" + "1," * 1000 + "]", "key: value"),
    "points": ("".join(f"{key}: {list(range(1, 1000))}\n" for key in ("lr", "batch_size", "seed")), "points"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_a10_a_configuration_that_explodes_is_refused_in_words(attacked, name):
    text, said = BAD_TEXTS[name]
    before = attacked.take_stock()
    answer = attacked.submit(text)
    assert answer.status == 422, answer.text[:300]
    assert said in answer.json()["error"]
    form = f"name=x.yaml&do=check&priority=0&text={quote(text)}".encode()
    assert attacked.wire("POST", "/submit", form, token="submit").status == 200
    assert attacked.take_stock() == before


def test_a10_so_is_json_that_does(attacked):
    before = attacked.take_stock()
    for body in (
        b"[" * 100_000,
        b'{"source": "/x.yaml", "text": "lr: 1", "priority": ' + b"9" * 6000 + b"}",
        b'{"source": "/x.yaml", "text": "lr: 1", "priority": NaN}',
        b'{"source": "/x.yaml", "text": "lr: 1", "priority": 1e999}',
        b'{"source": "/x.yaml", "text": "\\ud800"}',
        b'{"source": "/x.yaml", "text": "lr: 1", "overrides": ["lr=!!python/name:os.system"]}',
        b'{"source": "/x.yaml", "text": "lr: 1", "overrides": ["seed=0x' + b"f" * 6000 + b'"]}',
        b'{"source": "/x.yaml", "text": "lr: 1", "code": {"digest": "x"}}',
        b'{"source": "/x.yaml", "text": "lr: 1", "code": {"digest": "../../x", "root": "/", "entry": "x"}}',
        b"\xff\xfe",
    ):
        answer = attacked.wire("POST", "/api/sweeps", body, token="submit", content_type="application/json")
        assert answer.status in (400, 422), (body[:60], answer.text)
    assert attacked.take_stock() == before


def test_a10_what_a_runner_tells_of_its_training_breaks_no_page_of_others(attacked):
    told = ("{}", "[1]", '"x"', '{"a": "b"}', '{"a": NaN}', '{"a": ' + "9" * 6000 + "}", "[" * 5000)
    lines = [f'{{"event": "Evaluated", "metrics": {each}}}' for each in told]
    lines += ['{"event": "Evaluated"', '{"event": "StepsDone", "phases_ms": [1]}', '{"event": "StepsDone"}x', "[]", "0"]
    started = '{"event": "RunStarted", "name": "x", "steps_per_epoch": "1"}\n'
    done = {"event": "StepsDone", "step": 1, "loss": "x", "lr": [], "samples_per_s": {}, "n_samples": 1, "seconds": 1}
    lines += [started + json.dumps(done), started.replace('"1"', "1") + json.dumps(done), started + "[" * 5000]
    for line in lines:
        attempt, token = attacked.lease()
        data = line.encode() + b"\n"
        assert attacked.wire("PUT", "/runner/streams/events.jsonl?offset=0", data, token=token).status == 200
        for path in ("/", "/queue", "/api/experiments", "/export.csv", f"/experiments/{attempt.experiment}"):
            assert attacked.wire("GET", path).status == 200, (line[:40], path)
        attacked.wire("POST", "/runner/finish", {"outcome": "user_error"}, token=token)
    _, token = attacked.lease()
    for metrics in (b'{"a": NaN}', b'{"a": Infinity}', b'{"a": "x"}'):
        body = b'{"outcome": "succeeded", "metrics": ' + metrics + b"}"
        assert attacked.wire("POST", "/runner/finish", body, token=token, content_type="application/json").status == 422


# A11: names that become code


@pytest.fixture
def evil_module(tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    (tmp_path / "evil_attack.py").write_text(f"import os\nos.mkdir({str(canary)!r})\ndef build(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return canary


def test_a11_the_server_imports_nothing_that_a_configuration_names(attacked, evil_module):
    for key in ("model", "dataset", "loss", "optimizer", "task", "schedule"):
        attacked.submit(f"{key}: evil_attack:build\n")
        attacked.submit("lr: 1\n", overrides=[f"{key}=evil_attack:build"])
    assert not evil_module.exists()
    assert "evil_attack" not in sys.modules


CODE_NAMES = [
    "().__class__.__bases__",
    "__import__('os').system('ls')",
    "lambda: 0",
    "{_target_: os.system}",
    "a;b",
    "`ls`",
]


@pytest.mark.parametrize("name", CODE_NAMES)
@pytest.mark.parametrize("key", ["model", "loss"])
def test_a11_what_is_no_name_is_refused_where_it_is_submitted(attacked, key, name):
    assert attacked.submit(f"{key}: {name}\n").status == 422


@pytest.mark.parametrize(
    "name", ["logging.os.system", "os.system", "builtins.eval", "small_cnn.__globals__", "__builtins__"]
)
def test_a11_a_name_is_one_of_the_list_and_no_way_through_modules(name):
    with pytest.raises(ConfigError, match="unknown model"):
        find_target(name, {"small_cnn": dict}, kind="model", where="model")


@pytest.mark.parametrize(
    "name", ["json:__builtins__", "json:JSONDecoder.__init__.__globals__", "json:dumps.__globals__"]
)
def test_a11_ones_own_code_is_named_and_not_what_lies_behind_it(name):
    with pytest.raises(ConfigError, match="Python's own"):
        find_target(name, {}, kind="model", where="model")


# A12 and A16: a real run, looked at from outside

SHELL = "$(touch pwned);`touch pwned`|touch pwned&.yaml"


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
    own = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    assert all(
        Path(each).is_relative_to(folder) for each in seen["environ"]["PYTHONPATH"].split(os.pathsep) if each not in own
    )


@pytest.mark.parametrize("name", ["env", "environment", "command", "environ", "cwd", "depot", "url", "python"])
def test_a12_a_submission_has_no_place_for_an_environment_or_a_command(attacked, name):
    answer = attacked.submit("lr: 1\n", **{name: {"LD_PRELOAD": "/tmp/x.so", "PYTHONPATH": "/tmp"}})
    assert answer.status == 422
    assert "LD_PRELOAD" not in (ROOT / "src/fulltilt/lab/runner/attempt.py").read_text()


# A13: addresses that the server is asked to fetch


def test_a13_the_server_opens_no_address_that_a_request_names(attacked):
    heard: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as bait:
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/x"
        stop = threading.Event()
        bait.settimeout(0.05)

        def listen():
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    heard.append(bait.accept())

        thread = threading.Thread(target=listen)
        thread.start()
        for key in ("model", "dataset", "data_path"):
            attacked.submit(f"{key}: {json.dumps(url)}\n")
            attacked.submit(f"dataset: images(root={json.dumps(url)})\n", owner=url)
        digest = "0" * 64
        attacked.submit("lr: 1\n", source=f"{url}/grid.yaml", code={"digest": digest, "root": url, "entry": url})
        _, token = attacked.lease()
        attacked.wire("POST", "/runner/hello", {"node": url, "pid": 1}, token=token)
        attacked.wire("POST", "/runner/finish", {"outcome": "user_error", "reason": url}, token=token)
        for method, path, role in read_routes(attacked):
            at = fill(path, id=quote(url, safe=""), name=quote(url, safe=""), digest=quote(url, safe=""))
            attacked.wire(method, f"{at}?url={url}&path={url}&uri={url}", token="owner" if role != "runner" else token)
        for header in ("referer", "x_forwarded_host", "x_original_url", "x_forwarded_for", "forwarded"):
            attacked.wire("GET", "/", **{header: url})
        stop.set()
        thread.join()
    assert heard == []
    fetchers = re.compile(r"^\s*(import|from) (httpx2?|fsspec|urllib\.request|requests|aiohttp|http\.client)\b", re.M)
    assert [str(path) for path in (LAB / "server").rglob("*.py") if fetchers.search(path.read_text())] == []


# A14: markup and scripts in what people and trainings write

OWN = "document.body.setAttribute('data-owned','1')"
MARKUP = [
    f"<script>{OWN}</script>",
    f'<img src=/canary-img onerror="{OWN}">',
    f'"><svg onload="{OWN}">',
    f'\'"><body onload="{OWN}">',
    f"</title></pre></textarea><script>{OWN}</script>",
    f'<a href="javascript:{OWN}" id=owned>x</a>',
    f'<iframe srcdoc="<script>parent.{OWN}</script>"></iframe>',
    f'<div hx-get=/canary-img hx-trigger=load></div><div hx-on:load="{OWN}"></div>',
    "{{7*191}}${7*191}",
    f"\x1b]8;;javascript:{OWN}\x07x\x1b]8;;\x07",
]
ALL_MARKUP = "".join(MARKUP)


def write_markup_everywhere(attacked) -> str:
    """An experiment in which every text is markup; its id."""
    id = attacked.add(name="markup", overrides=[f"note={ALL_MARKUP}"], owner=ALL_MARKUP, model=f"net {ALL_MARKUP}")
    _, token = attacked.lease(id, node=ALL_MARKUP[:200])
    events = [
        {"event": "RunStarted", "name": ALL_MARKUP, "device": ALL_MARKUP, "n_parameters": 1, "steps_per_epoch": 10},
        *(
            {
                "event": "StepsDone",
                "epoch": 1,
                "step": n,
                "lr": 0.1,
                "samples_per_s": 1.0,
                "n_samples": 64,
                "loss": 1.0 / n,
            }
            | {"seconds": 1.0, "phases_ms": {ALL_MARKUP: 2.0}}
            for n in (10, 20)
        ),
        {
            "event": "Evaluated",
            "epoch": 1,
            "step": 20,
            "training_seconds": 2.0,
            "metrics": {ALL_MARKUP: 1.0, "loss": 1.0},
        },
    ]
    log = "".join(json.dumps(event) + "\n" for event in events).encode()
    assert attacked.wire("PUT", "/runner/streams/events.jsonl?offset=0", log, token=token).status == 200
    attacked.wire("PUT", "/runner/streams/log.txt?offset=0", ALL_MARKUP.encode(), token=token)
    svg = attacked.send(
        token, f"<svg xmlns='http://www.w3.org/2000/svg' onload=\"{OWN}\"/>".encode(), "<b onload=x>.svg"
    )
    done = {"outcome": "succeeded", "metrics": {ALL_MARKUP[:200]: 1.0, "loss": 0.5}, "files": [svg]}
    assert attacked.wire("POST", "/runner/finish", done, token=token).json() == {"state": "succeeded"}
    return id


@pytest.fixture(scope="module")
def marked(attacked) -> str:
    return write_markup_everywhere(attacked)


def list_pages(id: str) -> list[str]:
    return [
        "/",
        "/queue",
        "/queue?sweep=markup",
        f"/experiments/{id}",
        f"/compare?id={id}&id=e1",
        "/machines",
        "/submit",
    ]


def test_a14_markup_stays_text_and_a_picture_that_was_sent_is_no_page(attacked, marked):
    for page in list_pages(marked):
        answer = attacked.wire("GET", page)
        assert answer.status == 200
        bare = re.sub(r"&lt;.*?&gt;", "", answer.text)
        for tag in ("<script>", "<img", "<iframe", "<svg onload", "<body onload", '="javascript:', "hx-on:"):
            assert tag not in bare, (page, tag)
        assert "script-src" not in answer.headers["content-security-policy"]
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    found = attacked.wire("GET", f"/api/experiments/{marked}/files/{quote('<b onload=x>.svg')}")
    assert found.headers["content-disposition"].startswith("attachment")
    assert (found.headers["content-type"], found.headers["x-content-type-options"]) == (
        "application/octet-stream",
        "nosniff",
    )


@pytest.mark.slow
def test_a14_in_a_browser_no_payload_changes_the_document_or_asks_for_anything(attacked, marked, tmp_path):
    control = f"<!doctype html><html><body>{ALL_MARKUP}</body></html>".encode()
    with build_proxy(attacked.wire, f"{COOKIE}={attacked.wire.token}", {"/control": control}) as (url, asked):
        assert re.search("<body[^>]* data-owned", dump_page(f"{url}/control", tmp_path / "profile")), (
            "the payload works"
        )
        assert "/canary-img" in asked
        for page in list_pages(marked):
            asked.clear()
            text = dump_page(url + page, tmp_path / "profile")
            assert not re.search("<body[^>]* data-owned", text), page
            assert 'id="owned"' not in text
            assert "/canary-img" not in asked
            assert "/static/lab.js" in asked, "its own scripts run"
            assert "<title>sign in" not in text


# A15: a client that was taken over


def test_a15_a_runner_speaks_for_its_own_live_attempt_alone(attacked):
    mine, my_token = attacked.lease()
    other, their_token = attacked.lease()
    secret = attacked.send(their_token, b"secret of another", "checkpoint.pt")
    assert attacked.wire("POST", "/runner/checkpoint", {"files": [secret]}, token=their_token).status == 200
    path = f"/runner/files/{secret['digest']}"
    assert attacked.wire("GET", path, token=their_token).body == b"secret of another"
    assert attacked.wire("GET", path, token=my_token).status == 409
    assert attacked.wire("GET", f"/api/experiments/{mine.experiment}/files/checkpoint.pt").status == 404
    for method, path, role in read_routes(attacked):
        if role not in ("runner", "anyone"):
            assert attacked.wire(method, fill(path, id=other.experiment), token=my_token).status == 401
    assert (
        attacked.wire("POST", "/runner/finish", {"outcome": "user_error", "reason": "no"}, token=my_token).status == 200
    )
    assert (attacked.read(mine.experiment).state, attacked.read(other.experiment).state) == ("failed", "running")
    for path, body in (("/runner/checkpoint", {"files": [secret]}), ("/runner/hello", {"node": "n", "pid": 1})):
        assert attacked.wire("POST", path, body, token=my_token).status == 409, "what is over is over"


def test_a15_each_role_has_its_own_routes(attacked):
    for method, path, role in read_routes(attacked):
        if role in ("runner", "anyone", "join"):  # a token to join is used up by showing it
            continue
        for token in ("read", "submit", "worker"):
            status = (
                attacked.wire(method, fill(path, id="e0", name="none"), token=token).status
                if token not in ROLES[role]
                else 403
            )
            assert status == 403, (method, path, token)


# A16: tokens


def test_a16_no_answer_and_no_file_but_its_own_has_a_token(attacked):
    attempt, token = attacked.lease()
    owner = attacked.wire.token
    for method, path, role in read_routes(attacked):
        if method == "GET" and role != "runner":
            answer = attacked.wire("GET", fill(path, id=attempt.experiment))
            assert owner not in answer.text + str(answer.headers)
            assert token not in answer.text + str(answer.headers)
    for path in attacked.lab.folder.rglob("*"):
        if path.is_file() and path.name not in ("token", "server.json"):
            content = path.read_bytes()
            assert owner.encode() not in content, path
            assert token.encode() not in content, path
    for name in ("token", "server.json"):
        assert stat.S_IMODE((attacked.lab.folder / name).stat().st_mode) == 0o600


def test_a16_a_token_that_others_can_read_is_not_used_and_without_one_there_is_another(tmp_path):
    first = read_or_make_token(tmp_path)
    assert read_or_make_token(tmp_path) == first
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UsageError, match="others can read it"):
        read_or_make_token(tmp_path)
    (tmp_path / "token").unlink()
    assert read_or_make_token(tmp_path) != first


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


def measure_rss() -> int:
    return psutil.Process().memory_info().rss


def test_a17_no_body_is_read_beyond_what_its_route_takes(attacked):
    piece = b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))
    before = measure_rss()
    for method, path, _ in read_routes(attacked):
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
    assert measure_rss() - before < 16 * MOST_BODY_BYTES
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
        answer = attacked.wire(
            "POST", "/api/sweeps", packed, token="submit", content_type="application/json", content_encoding=kind
        )
        assert answer.status in (400, 415, 422)
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
    attacked.wire("POST", "/runner/checkpoint", {"files": [file]}, token=token)
    with attacked.wire.open() as line:
        head = f"GET /runner/files/{file['digest']} HTTP/1.1\r\nHost: {attacked.wire.netloc}\r\n"
        line.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
        own = psutil.Process()
        us = line.getsockname()
        wait_for(lambda: not [each for each in own.net_connections("tcp") if each.raddr == us])
    for _ in range(3):  # who is only slow is not: a body that comes in pieces, then another request on the same line
        assert attacked.wire("GET", "/healthz").status == 200


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


# A18: SQL

SQL = [
    "' OR 1=1 --",
    "'; DROP TABLE experiment; --",
    '" OR ""="',
    "1 UNION SELECT digest FROM token",
    "%",
    "_",
    "\\",
    "0x31",
]
SQL += ["1e3", "-1", "9" * 30, "e1' AND '1'='1", "e1/**/OR/**/1=1", "\u0661"]


@pytest.mark.parametrize("text", SQL, ids=ascii)
def test_a18_no_word_of_a_request_becomes_sql(attacked, text):
    before, written = attacked.take_stock(), quote(text, safe="")
    for name in ("state", "sweep", "urgent", "limit", "offset", "order", "sort", "after", "id"):
        for path in ("/api/experiments", "/queue"):
            answer = attacked.wire("GET", f"{path}?{name}={written}")
            assert answer.status < 500, (path, name, answer.text)
            assert b"fence" not in answer.body
    assert attacked.wire("GET", f"/api/experiments?sweep={written}").json()["experiments"] == []
    for method, path, role in read_routes(attacked):
        if re.search("{(id|name|label)}", path) and role != "runner":
            at = fill(path, **dict.fromkeys(("id", "name", "label"), written))
            found = attacked.wire(method, at)
            assert found.status < 500, (method, at, found.text)
    assert attacked.wire("GET", "/api/status", token=text.encode().decode("latin-1")).status == 401
    assert attacked.take_stock() == before


# A19: formulas and terminals

FORMULAS = ["=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "x\r=1"]
STEERING = "\x1b[2J\x1b]0;title\x07\x1b]52;c;aGk=\x07\x9b31m\x08"


def test_a19_no_cell_of_a_table_is_a_formula():
    entry = {"id": "e1", "sweep": "=x", "state": "failed", "attempt": 1, "seconds": 1.0, "reason": FORMULAS[0]}
    text = io.StringIO(newline="")
    write_csv([entry | {"point": dict.fromkeys(FORMULAS, FORMULAS[1]), "metrics": {FORMULAS[3]: 1.0}}], text)
    cells = [cell for row in csv.reader(io.StringIO(text.getvalue(), newline="")) for cell in row]
    assert sum(cell.startswith("'") for cell in cells) >= 2 * len(FORMULAS)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_a19_nothing_that_is_printed_steers_the_terminal(attacked, capsys, monkeypatch):
    id = attacked.add(overrides=[f"note={STEERING}"], owner=STEERING, model=f"net{STEERING}")
    _, token = attacked.lease(id, node=f"n{STEERING}")
    attacked.wire("PUT", "/runner/streams/log.txt?offset=0", f"log{STEERING}\n".encode(), token=token)
    line = json.dumps({"event": "Evaluated", "metrics": {f"loss{STEERING}": 1.0}}) + "\n"
    attacked.wire("PUT", "/runner/streams/events.jsonl?offset=0", line.encode(), token=token)
    at = ["--lab", str(attacked.lab.folder)]
    finish = {"outcome": "user_error", "reason": f"no{STEERING}"}
    said = {}
    for words in (
        ["list", "--verbose"],
        ["show", id],
        ["logs", id],
        ["export", "-"],
        ["priority", id, "3"],
        ["retry", id],
    ):
        with monkeypatch.context() as patch:
            if words[0] == "logs":  # they go to a pipe as they came
                patch.setattr("sys.stdout.isatty", lambda: True)
            assert run_command(["lab", *words, *at]) == 0
        said[words[0]] = capsys.readouterr().out
        if words[0] == "show":
            assert attacked.wire("POST", "/runner/finish", finish, token=token).status == 200
    assert ("log" in said["logs"], "net" in said["show"], "no" in said["export"]) == (True, True, True)
    for each in said.values():
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", each), each


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
                found += [
                    each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN
                ]
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
            found.wire("PUT", "/runner/streams/log.txt?offset=0", b"log", token=token)
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


# A22: secrets of configurations

SECRET = "s3cr3t-0f-th3-us3r"


def test_a22_secrets_are_known_by_their_key_their_place_in_a_url_or_their_shape():
    hidden = {
        "password": SECRET,
        "track.api_key": SECRET,
        "apiKey": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "HF_TOKEN": SECRET,
        "options": {"auth_token": SECRET, "deep": [{"client-secret": 12345678}]},
        "tracker": f"wandb(mode=online, api_key={SECRET}, project=x)",
        "quoted": f'wandb(password="{SECRET} {SECRET}")',
        "data": f"s3://key:{SECRET}@bucket/x",
        "mirror": f"https://{SECRET}@host/x?token={SECRET}&y=1",
        "note": f'{{"secret": "{SECRET}"}}',
        "words": [f"a.token={SECRET}", f"export PASSWORD: {SECRET}"],
        "shapes": ["hf_" + "a1" * 12, "ghp_" + "a1" * 12, "sk-proj-" + "a1" * 12, "AKIA" + "A1" * 8],
    }
    text = json.dumps(redact(hidden))
    assert SECRET not in text
    assert "a1a1" not in text
    assert "12345678" not in text
    assert text.count(HIDDEN) >= 19
    plain = {
        "optim.lr": 0.1,
        "n_tokens": 5,
        "tokenizer": "bpe(vocab=100)",
        "mask_token": "[MASK]",
        "data.path": "git@host:x",
        "model": "net(keys=4, secretary=1)",
        "digest": "a" * 64,
        "key": "a1",
        "token": None,
    }
    assert redact(plain) == plain


def test_a22_nobody_is_shown_them_and_the_owner_only_on_request(attacked, capsys, tmp_path):
    data = f"dataset: 'images(root=\"https://user:{SECRET}@host/x\")'\n"
    answer = attacked.submit(
        f"{data}model: 'net(api_key={SECRET})'\nlr: [1, 2]\n", overrides=[f"loss=mine:loss(password={SECRET})"]
    )
    assert answer.status == 200, answer.text
    id = answer.json()["ids"][0]
    _, token = attacked.lease(id)
    title = attacked.wire("POST", "/runner/hello", {"node": "n1", "pid": 1}, token=token).json()["title"]
    assert SECRET not in title
    attacked.wire("POST", "/runner/finish", {"outcome": "user_error", "reason": f"bad token={SECRET}"}, token=token)
    for path in (f"/experiments/{id}", f"/api/experiments/{id}", "/api/experiments", "/queue", "/", "/export.csv"):
        for role in ("read", "owner"):
            found = attacked.wire("GET", path, token=role)
            assert found.status == 200
            assert SECRET not in found.text, path
    assert HIDDEN in attacked.wire("GET", f"/api/experiments/{id}").text
    for role in ("read", "submit"):
        assert attacked.wire("GET", f"/api/experiments/{id}?reveal=true", token=role).status == 403
    for words, times in (([], 0), (["--reveal"], 3)):
        assert run_command(["lab", "show", id, "--json", "-", *words, "--lab", str(attacked.lab.folder)]) == 0
        assert (capsys.readouterr().out.count(SECRET) >= 1) == bool(times)


# A23: frames, types, referrers


def test_a23_every_answer_forbids_frames_sniffing_and_scripts_from_elsewhere(attacked):
    answers = [attacked.wire("GET", fill(path)) for method, path, _ in read_routes(attacked) if method == "GET"]
    answers += [attacked.wire("GET", "/nowhere"), attacked.wire("GET", "/healthz", host="evil.example")]
    answers += [attacked.wire("POST", "/login", origin="http://evil.example"), attacked.wire("BREW", "/login")]
    assert {answer.status for answer in answers} >= {200, 403, 404, 405, 421}
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers[name.lower()] == value or name == "Cache-Control"
        assert "server" not in answer.headers


# A24: what is brought along


def test_a24_every_file_of_others_has_its_version_its_licence_and_its_digest():
    vendor = WEB / "vendor"
    manifest, licences = json.loads((vendor / "manifest.json").read_text()), (vendor / "LICENSES.txt").read_text()
    assert set(manifest) == {path.name for path in vendor.iterdir()} - {"manifest.json", "LICENSES.txt"}
    for name, entry in manifest.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == entry["sha256"], name
        assert f"== {entry['package']} {entry['version']} (npm)" in licences
        assert entry["licence"] in ("0BSD", "MIT")


def test_a24_no_page_refers_to_another_host_and_what_has_known_holes_is_not_installed():
    own = LAB / "server" / "static" / "lab.js"
    for path in [*(LAB / "server" / "templates").iterdir(), own, WEB / "pages.css"]:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, which nobody looks up
        assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text), path
    for path in WEB.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", path.read_text()), path
    import fastapi
    import starlette

    versions = [tuple(map(int, each.split(".")[:2])) for each in (starlette.__version__, fastapi.__version__)]
    assert versions >= [(1, 10), (0, 165)]


# A25: what an engine gives away


def test_a25_what_is_not_protected_is_said():
    text = " ".join((ROOT / "docs" / "security.md").read_text().split())
    for said in ("Ray", "the same operating system user", "another user of the operating system", "Slurm"):
        assert said in text
    assert all(f"A{n}" in text for n in range(1, 27))


# A26: a second server beside the first


def test_a26_one_socket_at_loopback_is_all_that_listens(attacked):
    assert attacked.listening == {("127.0.0.1", attacked.wire.port)}
    tree = re.compile(r"StaticFiles|\.mount\(|http\.server|directory=")
    assert [str(path) for path in LAB.rglob("*.py") if tree.search(path.read_text())] == []


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
        wait_for(lambda: client.get("/api/experiments/e1")["experiment"]["state"] in OVER, seconds=600)
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
                Link(order).greet(node="n", pid=1)
        monkeypatch.setenv("FULLTILT_LAB_TOKEN", address.token)
        for authority, code in ((certificate, 0), (other, 2), (tmp_path / "none", 2)):
            monkeypatch.setenv("FULLTILT_LAB_AUTHORITY", str(authority))
            assert run_command(["lab", "list", "--url", address.url]) == code
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
