"""What a lab's server answers to people and runners. What it refuses to attackers: tests/attacks."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.lab_cases import OWNER, PATIENCE_S, ask, build_points, lease

from fulltilt.errors import UsageError
from fulltilt.lab import reception
from fulltilt.lab.executors.cluster import find_free_port
from fulltilt.lab.lab import open_stream
from fulltilt.lab.records import Point
from fulltilt.lab.scheduling.order import Room
from fulltilt.lab.server.api import LOG_BYTES, MOST_INT
from fulltilt.lab.server.app import build_app
from fulltilt.lab.server.metrics import MOST_OWNERS, OTHERS
from fulltilt.lab.server_log import LOG, keep_log
from fulltilt.lab.serving import PORT, _listen_again, open_lab
from fulltilt.lab.store import StaleAttemptError
from fulltilt.web.listening import listen


class Caller:
    """Sends requests to the application, as a client on this machine does."""

    def __init__(self, lab):
        self.lab = lab
        rooms = [Room(node="n1", free=["cuda:0"], n_devices=2)]
        self.app = build_app(lab, token=OWNER, read_rooms=lambda: rooms)

    def __call__(self, method: str, path: str, token: str | None = OWNER, **options) -> httpx.Response:
        headers = options.pop("headers", {}) | ({"authorization": f"Bearer {token}"} if token else {})
        return ask(self.app, method, path, headers=headers, **options)

    def lease(self, n: int) -> tuple:
        return lease(self.lab.store, self.lab.store.read_experiments(id=f"e{n}")[0])


@pytest.fixture
def call(tmp_path):
    with open_lab(tmp_path, create=True) as lab:
        lab.store.add("/somewhere/grid.yaml", build_points(3), [])
        yield Caller(lab)


def test_a_reader_reads_and_changes_nothing_and_a_worker_not_even_that(call):
    for role in ("read", "worker", "join", "submit"):
        call.lab.store.add_token(role, role=role, label=role, lasts_s=None, is_single_use=False)
    said = {role: call("GET", "/api/experiments", role).status_code for role in ("read", "submit", "worker", "join")}
    assert said == {"read": 200, "submit": 200, "worker": 403, "join": 403}
    assert call("POST", "/api/experiments/e1/cancel", "read").status_code == 403
    assert call.lab.store.read_experiments(id="e1")[0].state == "queued"
    assert call("POST", "/api/experiments/e1/cancel", "submit").json()["state"] == "cancelled"


def test_an_old_attempt_is_refused_everywhere_and_the_same_end_may_be_told_twice(call):
    first, old = call.lease(1)
    call.lab.store.advance("requeue", first, outcome="lost")
    second, new = call.lease(1)
    calls = [
        ("POST", "/runner/hello", {"json": {"node": "n1", "pid": 1}}),
        ("POST", "/runner/renew", {"json": {"wait_s": 0}}),
        ("PUT", "/runner/streams/log.txt?offset=0", {"content": b"late"}),
        ("POST", "/runner/checkpoint", {"json": {"files": []}}),
        ("POST", "/runner/finish", {"json": {"outcome": "succeeded", "metrics": {"loss": 0.0}}}),
    ]
    for method, path, options in calls:
        assert call(method, path, old, **options).status_code == 409, path
    for _ in range(2):
        answer = call("POST", "/runner/finish", new, json={"outcome": "succeeded", "metrics": {"loss": 1.0}})
        assert (answer.status_code, answer.json()) == (200, {"state": "succeeded"})
    (found,) = call.lab.store.read_experiments(id="e1")
    assert (found.attempt, found.metrics) == (second.number, {"loss": 1.0})
    with pytest.raises(StaleAttemptError):
        call.lab.store.advance("finish", second)


def test_the_runner_of_an_experiment_that_was_removed_is_refused(call):
    _, token = call.lease(1)
    assert call("POST", "/runner/finish", token, json={"outcome": "user_error"}).json() == {"state": "failed"}
    assert call("DELETE", "/api/experiments/e1").status_code == 200
    for what, body in (("finish", {"outcome": "user_error"}), ("renew", {"wait_s": 0})):
        assert call("POST", f"/runner/{what}", token, json=body).status_code == 409


def test_a_renewal_writes_nothing_to_the_disk(call):
    _, token = call.lease(1)
    log = call.lab.folder / "lab.db-wal"
    before = (log.stat().st_size, log.stat().st_mtime_ns)
    for _ in range(3):
        assert call("POST", "/runner/renew", token, json={"wait_s": 0}).json() == {"wish": None}
    assert (log.stat().st_size, log.stat().st_mtime_ns) == before
    call("POST", "/runner/finish", token, json={"outcome": "user_error"})
    assert log.stat().st_mtime_ns > before[1]


def test_no_answer_waits_for_the_one_before_to_be_acknowledged():
    said = []

    async def serve_once() -> None:
        async def answer(reader, writer) -> None:
            said.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()

    asyncio.run(serve_once())
    assert said == [1], "Nagle's algorithm would hold back every second piece for 40 ms"


def test_a_server_comes_back_to_its_port_where_that_is_free_and_says_so_where_none_can_be_had(call):
    with _listen_again(call.lab, "127.0.0.1", 0) as first, _listen_again(call.lab, "127.0.0.1", 0) as second:
        ports = [each.getsockname()[1] for each in (first, second)]
    assert ports[0] != ports[1]
    with _listen_again(call.lab, "127.0.0.1", 0) as third:
        assert third.getsockname()[1] == ports[1]
        for port in (ports[1], 70_000):
            with pytest.raises(UsageError, match="give another --port"):
                _listen_again(call.lab, "127.0.0.1", port)


def test_a_server_at_another_port_says_what_looks_for_it_at_the_last_one(call, caplog):
    def listen_at(port: int) -> str:
        caplog.clear()
        with _listen_again(call.lab, "127.0.0.1", port):
            return caplog.text

    ports = [find_free_port() for _ in range(3)]
    assert listen_at(ports[0]) == ""
    assert listen_at(ports[1]) == "", "nothing runs"
    call.lease(1)
    assert listen_at(ports[1]) == "", "the same port, named again"
    said = listen_at(ports[2])
    assert f"e1 may still run and can hand nothing in: they look for the server at port {ports[1]}" in said
    assert f"start it with --port {ports[1]}" in said
    os.utime(call.lab.folder / PORT, (time.time(), time.time()))  # a file's own clock is coarse
    assert listen_at(ports[1]) == "", "the remedy is no reason for another warning"


def test_a_stream_takes_bytes_at_its_end_only(call):
    _, token = call.lease(1)
    steps = [(0, b"abc", 3), (0, b"abc", 3), (2, b"xyz", 3), (9, b"xyz", 3), (3, b"\0\xff", 5)]
    for offset, data, size in steps:
        answer = call("PUT", f"/runner/streams/log.txt?offset={offset}", token, content=data)
        assert answer.json() == {"size": size}
    assert (call.lab.folder / "e1" / "log-1.txt").read_bytes() == b"abc\0\xff"
    assert call("PUT", "/runner/streams/log.txt?offset=5", token, content=b"x" * (5 << 20)).status_code == 413
    assert call("PUT", "/runner/streams/other?offset=0", token, content=b"x").status_code == 422
    assert call("GET", "/api/experiments/e1/log?attempt=1&offset=3").content == b"\0\xff"


def test_a_piece_that_is_sent_again_while_it_is_written_is_there_once(call, monkeypatch):
    attempt, _ = call.lease(1)
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Slow(io.FileIO):
        def write(self, data):
            if not has_begun.is_set():
                has_begun.set()
                may_go_on.wait()
            return super().write(data)

    def open_slowly(*words, **given):
        with open_stream(*words, **given) as stream:
            return Slow(os.dup(stream.fileno()), "ab")

    monkeypatch.setattr(reception, "open_stream", open_slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reception.append, call.lab, attempt, "log.txt", 0, b"abc")
        has_begun.wait()
        again = pool.submit(reception.append, call.lab, attempt, "log.txt", 0, b"abc")
        wait([again], timeout=0.3)  # it waits for the first one
        may_go_on.set()
        assert (first.result(), again.result()) == (3, 3)
    assert (call.lab.folder / "e1" / "log-1.txt").read_bytes() == b"abc"


def submit(call, text: str, **given) -> httpx.Response:
    return call("POST", "/api/sweeps", json={"source": "/somewhere/new.yaml", "text": text, **given})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: [1, 2", "while parsing a flow sequence"),
        ("lr: !!python/object/apply:os.system [ls]\n", "!!python"),
        ("lrr: 1\n", "did you mean"),
        (f"lr: {list(range(1, 1000))}\nbatch_size: {list(range(1, 1000))}\nseed: {list(range(1000))}\n", "998001000"),
        ("lr: 1\ndevice: [0, 1, 2]\n", "it takes 3 devices on one machine and the largest here has 2"),
        ("lr: 1\nlr: 2\n", "lr"),
    ],
)
def test_what_cannot_run_is_refused_at_the_door_in_words(call, text, said):
    answer = submit(call, text)
    assert answer.status_code == 422
    assert said in answer.json()["error"].replace(",", "")
    assert len(call.lab.store.read_experiments()) == 3


def test_a_log_of_a_gigabyte_is_read_a_piece_at_a_time(call):
    call.lease(1)
    (call.lab.folder / "e1").mkdir()
    with (call.lab.folder / "e1" / "log-1.txt").open("wb") as log:
        log.seek(1 << 30)
        log.write(b"\xff the end")
    assert call("GET", f"/api/experiments/e1/log?attempt=1&offset={1 << 30}").content == b"\xff the end"
    assert len(call("GET", "/api/experiments/e1/log?attempt=1").content) == LOG_BYTES
    assert call("GET", f"/api/experiments/e1/log?attempt=1&offset={MOST_INT}").content == b"", "no file is so long"


def test_many_slow_senders_keep_nobody_waiting(call):
    """More of them than the server has threads."""
    content = b"x" * 1000
    digest = hashlib.sha256(content).hexdigest()

    async def send() -> list[int]:
        has_waited = asyncio.Event()

        async def slowly():
            yield content[:500]
            await has_waited.wait()
            yield content[500:]

        headers = {"authorization": f"Bearer {OWNER}"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(call.app), base_url="http://localhost:8000", headers=headers
        ) as client:
            slow = [asyncio.create_task(client.put(f"/api/files/{digest}", content=slowly())) for _ in range(60)]
            await asyncio.sleep(0.5)
            other = await asyncio.wait_for(client.get("/api/status"), 60)
            has_waited.set()
            return [other.status_code, *(answer.status_code for answer in await asyncio.gather(*slow))]

    assert set(asyncio.run(send())) == {200}
    assert call.lab.depot.measure(digest) == 1000


def test_a_sender_that_breaks_off_leaves_nothing_and_is_no_error_of_the_server(call):
    told = []

    async def send() -> None:
        heads = [(b"host", b"localhost"), (b"authorization", f"Bearer {OWNER}".encode())]
        path = f"/api/files/{'0' * 64}"
        scope = {"type": "http", "method": "PUT", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": heads, "http_version": "1.1", "scheme": "http", "server": ("localhost", 80)}
        pieces = iter([{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}])

        async def receive():
            return next(pieces)

        async def note(message):
            told.append(message)

        await call.app(scope, receive, note)

    asyncio.run(send())
    assert told[0]["status"] == 400
    assert not [each for each in (call.lab.folder / "depot").rglob("*") if each.is_file()]


def test_what_runs_cannot_be_removed_and_what_was_removed_is_told_so(call):
    for id in ("e4", "e5"):  # a number is not given again: nodes and browsers know the old one by it
        assert submit(call, "lr: 1\n").json()["ids"] == [id]
        attempt, token = call.lease(int(id[1:]))
        call("POST", "/runner/hello", token, json={"node": "n1", "pid": 1})
        call("PUT", "/runner/streams/log.txt?offset=0", token, content=b"x")
        answer = call("DELETE", f"/api/experiments/{id}")
        assert (answer.status_code, answer.json()["error"]) == (422, f"{id} is running; fulltilt lab cancel {id} first")
        assert call("POST", f"/api/experiments/{id}/cancel").json()["state"] == "cancelling"
        assert call("DELETE", f"/api/experiments/{id}").status_code == 422
        call.lab.store.advance("end", attempt)
        assert call("DELETE", f"/api/experiments/{id}").status_code == 200
        late = call("POST", "/runner/finish", token, json={"outcome": "succeeded"})
        again = call("POST", "/runner/renew", token, json={"wait_s": 0})
        assert {late.status_code, again.status_code} <= {401, 409}, "both fence a runner"
        assert len(call.lab.store.read_experiments()) == 3


def test_of_two_runners_of_one_attempt_one_is_fenced_also_where_both_begin_at_once(call, monkeypatch):
    _, token = call.lease(1)
    advance, both = call.lab.store.advance, threading.Barrier(2, timeout=PATIENCE_S)

    def advance_at_once(arrow, attempt, **noted):
        both.wait()  # each has seen that nobody has begun
        advance(arrow, attempt, **noted)

    def greet(pid: int) -> int:
        return call("POST", "/runner/hello", token, json={"pid": pid}).status_code

    monkeypatch.setattr(call.lab.store, "advance", advance_at_once)
    with ThreadPoolExecutor() as threads:
        answers = dict(zip((11, 22), threads.map(greet, (11, 22)), strict=True))
    assert sorted(answers.values()) == [200, 409]
    assert {pid: greet(pid) for pid in answers} == answers, "as often as it asks"


def test_what_nothing_is_heard_of_is_queued_again_at_once_where_somebody_says_so(call, monkeypatch):
    (first, old), (second, _), _ = (call.lease(n) for n in (1, 2, 3))
    for attempt in (first, second):
        call.lab.leases.renew(attempt)
        call.lab.store.advance("start", attempt)
    call("POST", "/api/experiments/e2/cancel")
    heard = call("POST", "/api/experiments/e1/requeue")
    assert (heard.status_code, "nothing was heard of for 30 s" in heard.json()["error"]) == (422, True)
    assert "requeue-e1" not in call("GET", "/queue").text
    monkeypatch.setattr(call.lab.leases, "_clock", lambda: time.monotonic() + 31)
    for at in ("/queue", "/experiments/e1"):
        assert "requeue-e1" in call("GET", at).text
    assert call("POST", "/api/experiments/e1/requeue").json()["state"] == "queued"
    assert call("POST", "/api/experiments/e2/requeue").json()["state"] == "cancelled", "as somebody wished"
    assert call("POST", "/runner/renew", old, json={"wait_s": 0}).status_code in (401, 409), "it ends where it lives"
    assert [each["reason"] for each in call.lab.store.read_attempts("e1")] == ["somebody said that its machine is dead"]
    assert call("POST", "/api/experiments/e1/requeue").status_code == 422


def test_a_grid_is_queued_once_and_more_points_only_themselves(call):
    first = submit(call, "lr: [0.1, 0.2]\n", owner="kim", priority=3).json()
    assert (first["n_new"], first["axes"]) == (2, ["optim.lr"])
    again = submit(call, "lr: [0.1, 0.2, 0.3]\n").json()
    assert (again["n_new"], again["ids"][:2]) == (1, first["ids"])
    rows = call("GET", "/api/experiments", params={"sweep": "new"}).json()["experiments"]
    assert [(row["owner"], row["priority"]) for row in rows] == [("kim", 3), ("kim", 3), ("owner", 0)]


def test_a_grid_that_is_tried_again_runs_the_code_that_is_sent_with_it(call):
    def send(content: bytes) -> dict[str, str]:
        digest = hashlib.sha256(content).hexdigest()
        assert call("PUT", f"/api/files/{digest}", content=content).status_code == 200
        return {"digest": digest, "root": "/somewhere", "entry": "new.yaml"}

    old, new = send(b"with a mistake"), send(b"without")
    for id in submit(call, "lr: [0.1, 0.2, 0.3]\n", code=old).json()["ids"][:2]:
        call("POST", f"/api/experiments/{id}/cancel")
    text = "lr: [0.1, 0.2, 0.3, 0.4]\n"
    again = submit(call, text, code=new, retry=True).json()
    assert (again["n_new"], again["n_retried"]) == (1, 2)
    found = [call.lab.store.read_work(id).code.digest for id in again["ids"]]
    assert found == [new["digest"], new["digest"], old["digest"], new["digest"]]
    assert set(call.lab.store.count_states(sweep="new")) == {"queued"}
    assert submit(call, text, code=new).json()["n_retried"] == 0


def test_a_token_is_shown_once_and_opens_what_its_role_may_until_it_is_removed(call):
    made = call("POST", "/api/tokens", json={"role": "read", "label": "kim"}).json()
    assert call("GET", "/api/experiments", made["token"]).status_code == 200
    for path, body in (("/api/experiments/e1/cancel", {}), ("/api/tokens", {"role": "submit"}), ("/api/prune", {})):
        assert call("POST", path, made["token"], json=body).status_code == 403
    listed = call("GET", "/api/tokens")
    assert [(each["label"], each["role"]) for each in listed.json()["tokens"]] == [("kim", "read")]
    stored = b"".join(file.read_bytes() for file in call.lab.folder.iterdir() if file.is_file())
    assert made["token"].encode() not in stored + listed.content
    assert call("DELETE", "/api/tokens/kim").json() == {"n": 1}
    assert call("GET", "/api/experiments", made["token"]).status_code == 401
    assert "no token labelled 'kim'" in call("DELETE", "/api/tokens/kim").json()["error"]


def test_a_token_to_join_opens_nothing_else_and_lasts_ten_minutes(call, monkeypatch):
    make = [call("POST", "/api/tokens", json={"role": "join"}).json() for _ in range(2)]
    assert len({each["label"] for each in make}) == 2, "each has a name to be removed by"
    (first, second), (listed, _) = (each["token"] for each in make), call("GET", "/api/tokens").json()["tokens"]
    assert listed["expires_s"] - listed["created_s"] == pytest.approx(600, abs=1)
    assert [call("GET", "/api/experiments", first).status_code for _ in range(2)] == [403, 403]
    monkeypatch.setattr("time.time", lambda: listed["expires_s"] + 5)
    assert call("GET", "/api/experiments", second).status_code == 401
    assert call("GET", "/api/tokens").json() == {"tokens": []}


@pytest.mark.parametrize("body", [{"role": "admin"}, {"role": "read", "label": "a/b"}, {"role": "read", "lasts_s": 0}])
def test_a_token_that_makes_no_sense_is_refused(call, body):
    assert call("POST", "/api/tokens", json=body).status_code == 422
    assert call("GET", "/api/tokens").json() == {"tokens": []}


def read_samples(text: str) -> dict[tuple[str, ...], float]:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(each.name.removeprefix("fulltilt_lab_"), *each.labels.values()): each.value for each in found}


def test_metrics_tell_states_ends_and_times_and_no_label_grows_with_what_people_send(call):
    for n in range(MOST_OWNERS + 5):
        point = Point(values={}, config={}, digest=f"of {n}")
        call.lab.store.add("/somewhere/else.yaml", [point], [], owner=f"user {n}")
    _, token = call.lease(1)
    call("POST", "/runner/hello", token, json={"node": "n1", "pid": 1})
    call("POST", "/runner/renew", token, json={"wait_s": 0})
    call("POST", "/runner/finish", token, json={"outcome": "user_error", "reason": "no"})
    for n in range(20):
        call("GET", f"/api/experiments/e{n + 1}")
        call("GET", f"/nowhere/{n}")
        call("BREW", f"/api/experiments/e{n + 1}")
    text = call("GET", "/metrics").text
    found = read_samples(text)
    assert (found["experiments", "failed"], found["experiments", "queued"]) == (1, 2 + MOST_OWNERS + 5)
    assert (found["attempts_ended_total", "user_error"], found["lease_renewals_total",]) == (1, 1)
    assert found["request_seconds_count", "GET /api/experiments/{id}", "200"] == 3 + MOST_OWNERS + 5
    assert found["request_seconds_count", "none", "404"] == 20
    assert (found["stale_leases",], found["has_room",], found["nodes", "barred"]) == (0, 1, 0)
    assert 0 < found["disk_free_bytes",] < found["disk_total_bytes",]
    owners = {key[1]: value for key, value in found.items() if key[0] == "queued"}
    assert len(owners) == MOST_OWNERS + 1
    assert sum(owners.values()) == 2 + MOST_OWNERS + 5
    assert owners[OTHERS] == 6
    assert "BREW" not in text
    assert OWNER not in text
    assert token not in text


def test_refusals_are_in_the_log_a_line_each_and_no_token_is(call):
    with keep_log(call.lab.folder):
        call("GET", "/api/experiments", "a-guess")
        call("GET", "/api/experiments/a-guess?token=a-guess", None)
        call("POST", "/api/experiments/e1/cancel", headers={"origin": "http://evil.example"})
        call("GET", "/api/experiments")
    call("GET", "/api/experiments", None)
    text = (call.lab.folder / LOG).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["event"], line["route"], line["status"]) for line in lines] == [
        ("refused", "GET /api/experiments", 401),
        ("refused", "GET /api/experiments/{id}", 401),
        ("refused", "none", 403),
    ]
    assert all(line["time"].endswith("+00:00") and line["level"] == "info" for line in lines)
    assert "a-guess" not in text
    assert OWNER not in text
