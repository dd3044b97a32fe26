"""Who gets in, and what for: tokens, roles, other sites, other names (A1 to A5, A8, A15, A16, A23, A26)."""

from __future__ import annotations

import re
import stat

import pytest
from starlette.staticfiles import StaticFiles
from tests.attacks.wire import LAB, ROOT, fill, list_routes, parse
from tests.lab_cases import lease

from fulltilt.cli import run_command
from fulltilt.errors import UsageError
from fulltilt.lab.server.access import COOKIE, ROLES
from fulltilt.web.gate import HEADERS, read_or_make_token

OPEN = {"/healthz", "/login", "/static/{name:path}"}


# A1: nobody without a token


def test_a01_every_route_names_its_role_and_answers_nobody_without_it(attacked):
    routes, before = attacked.routes(), attacked.take_stock()
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
    ours = [LAB / "server/static/lab.js", *LAB.rglob("*.py"), *LAB.rglob("*.html")]
    for path in [*ours, *(LAB.parent / "cli").glob("*lab*")]:
        assert not re.search(r"[?&](access_)?token=", path.read_text()), path


# A8: methods that nobody offered


def test_a08_nothing_is_called_by_a_name_that_somebody_sends(attacked):
    before = attacked.take_stock()
    names = ("__class__", "__init__", "submit", "finish", "lease", "advance", "eval", "cancel()", "cancel%00", "CANCEL")
    for name in names:
        assert attacked.wire("POST", f"/api/experiments/e1/{name}").status in (404, 405, 422), name
    for method in ("TRACE", "PATCH", "PROPFIND", "BREW", "PUT"):
        assert attacked.wire(method, "/api/experiments/e1").status == 405
    for override in ("x_http_method_override", "x_method_override", "x_http_method"):
        attacked.wire("GET", "/api/experiments/e1", **{override: "DELETE"})
        attacked.wire("GET", "/api/experiments/e1?_method=DELETE", **{override: "POST"})
    assert attacked.take_stock() == before


# A15: a client that was taken over


def test_a15_a_runner_speaks_for_its_own_live_attempt_alone(attacked):
    mine, my_token = attacked.lease()
    other, their_token = attacked.lease()
    secret = attacked.send(their_token, b"secret of another", "checkpoint.pt")
    assert attacked.commit(their_token, [secret]).status == 200
    path = f"/runner/files/{secret['digest']}"
    assert attacked.wire("GET", path, token=their_token).body == b"secret of another"
    assert attacked.wire("GET", path, token=my_token).status == 409
    assert attacked.wire("GET", f"/api/experiments/{mine.experiment}/files/checkpoint.pt").status == 404
    for method, path, role in attacked.routes():
        if role not in ("runner", "anyone"):
            assert attacked.wire(method, fill(path, id=other.experiment), token=my_token).status == 401
    assert attacked.finish(my_token, {"outcome": "user_error", "reason": "no"}).status == 200
    assert (attacked.read(mine.experiment).state, attacked.read(other.experiment).state) == ("failed", "running")
    for path, body in (("/runner/checkpoint", {"files": [secret]}), ("/runner/hello", {"pid": 1})):
        assert attacked.wire("POST", path, body, token=my_token).status == 409, "what is over is over"


def test_a15_a_runner_says_nothing_of_where_it_is_so_none_brings_another_machine_into_disrepute(attacked):
    attempt, token = lease(attacked.lab.store, attacked.read(attacked.add()))
    assert attacked.wire("POST", "/runner/hello", {"pid": 1, "node": "another"}, token=token).status == 200
    assert attacked.read(attempt.experiment).node == "n1"


def test_a15_each_role_has_its_own_routes(attacked):
    for method, path, role in attacked.routes():
        if role in ("runner", "anyone"):
            continue
        for token in {"read", "submit", "worker"} - set(ROLES[role]):
            status = attacked.wire(method, fill(path, id="e0", name="none"), token=token).status
            assert status == 403, (method, path, token)


# A16: tokens


def test_a16_no_answer_and_no_file_but_its_own_has_a_token(attacked):
    attempt, token = attacked.lease()
    owner = attacked.wire.token
    for method, path, role in attacked.routes():
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


# A23: frames, types, referrers


def test_a23_every_answer_forbids_frames_sniffing_and_scripts_from_elsewhere(attacked):
    answers = [attacked.wire("GET", fill(path)) for method, path, _ in attacked.routes() if method == "GET"]
    answers += [attacked.wire("GET", "/nowhere"), attacked.wire("GET", "/healthz", host="evil.example")]
    answers += [attacked.wire("POST", "/login", origin="http://evil.example"), attacked.wire("BREW", "/login")]
    assert {answer.status for answer in answers} >= {200, 403, 404, 405, 421}
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers[name.lower()] == value or name == "Cache-Control"
        assert "server" not in answer.headers


# A26: a second server beside the first


def test_a26_one_socket_at_loopback_is_all_that_listens(attacked):
    assert attacked.listening == {("127.0.0.1", attacked.wire.port)}
    tree = re.compile(r"StaticFiles|\.mount\(|http\.server|directory=")
    assert [str(path) for path in LAB.rglob("*.py") if tree.search(path.read_text())] == []
