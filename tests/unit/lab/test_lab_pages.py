"""The pages of a lab: what they show, that nothing in them runs that is not ours, and who gets in."""

from __future__ import annotations

import asyncio
import json
import re

import httpx2 as httpx
import pytest

from fulltilt.config import Config
from fulltilt.lab.records import Node, Point
from fulltilt.lab.scheduling.order import Room
from fulltilt.lab.server.access import COOKIE, MOST_FAILURES, PAUSE_S
from fulltilt.lab.server.app import build_app
from fulltilt.lab.server.live import _tell
from fulltilt.lab.serving import open_lab

OWNER = "the owner's token"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'"
STEP = {"event": "StepsDone", "epoch": 1, "lr": 0.1, "samples_per_s": 100.0, "n_samples": 640, "seconds": 1.0}
STARTED = {"event": "RunStarted", "name": "grid", "device": "cpu", "n_parameters": 7, "steps_per_epoch": 10}


class Browser:
    """Asks for pages as a browser does that was signed in once."""

    def __init__(self, lab):
        self.lab = lab
        self.app = build_app(lab, token=OWNER, read_rooms=lambda: [Room(node="n1", free=[], n_devices=2)])
        self.cookies = {COOKIE: OWNER}

    def __call__(self, method: str, path: str, **options) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost:8000", cookies=self.cookies
            ) as client:
                return await client.request(method, path, headers={"accept": "text/html"}, **options)

        return asyncio.run(send())

    def read(self, path: str) -> str:
        answer = self("GET", path)
        assert answer.status_code == 200, (path, answer.text)
        return answer.text


@pytest.fixture
def browse(tmp_path):
    with open_lab(tmp_path, create=True) as lab:
        points = [
            Point(values={"optim.lr": 0.1 * n, "model": f"net {EVIL}"}, config=Config().to_values(), digest=f"d{n}")
            for n in range(1, 4)
        ]
        lab.store.add("/somewhere/grid.yaml", points, ["note=<b>bold</b>"], owner=EVIL)
        yield Browser(lab)


def finish(lab, id: str, *, outcome: str, reason: str | None = None, loss: float = 1.0) -> None:
    (found,) = lab.store.read_experiments(id=id)
    attempt, _ = lab.store.lease(found, node=EVIL, devices=["cpu:0"], n_threads=1, engine="local")
    lab.store.advance("start", attempt, pid=1)
    folder = lab.folder / id
    folder.mkdir()
    steps = [STEP | {"step": n, "loss": loss + 1.0 / n, "phases_ms": {"forward": 2.0}} for n in (10, 20)]
    seen = {"event": "Evaluated", "epoch": 1, "step": 20, "training_seconds": 2.0, "metrics": {EVIL: 1.0, "loss": loss}}
    lines = [json.dumps(event) + "\n" for event in (STARTED, *steps, seen)]
    (folder / "events-1.jsonl").write_text("".join(lines))
    arrow = "finish" if outcome == "succeeded" else "fail"
    metrics = {"loss": loss, EVIL: 1.0} if outcome == "succeeded" else {}
    lab.store.advance(arrow, attempt, outcome=outcome, reason=reason, metrics=metrics)
    if arrow == "finish":
        lab.store.advance("commit", attempt)


def test_who_has_no_token_is_led_to_where_one_is_given_and_the_cookie_goes_to_no_other_site(browse):
    browse.cookies = {}
    answer = browse("GET", "/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    answer = browse("POST", "/login", content=f"token={OWNER}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert browse("GET", "/api/experiments").status_code == 401, "JSON leads nowhere"


def test_guesses_of_a_token_become_slow(browse, monkeypatch):
    clock = [0.0]
    browse.app.state.patience._clock = lambda: clock[0]
    codes = [browse("POST", "/login", content=f"token=guess{n}").status_code for n in range(MOST_FAILURES + 2)]
    assert codes == [401] * MOST_FAILURES + [429] * 2
    assert browse("POST", "/login", content=f"token={OWNER}").status_code == 429
    clock[0] += PAUSE_S + 1
    assert browse("POST", "/login", content=f"token={OWNER}").status_code == 303


def test_every_page_shows_what_there_is_and_runs_nothing_that_a_name_or_a_log_says(browse):
    finish(browse.lab, "e1", outcome="succeeded", loss=0.5)
    finish(browse.lab, "e2", outcome="succeeded", loss=0.25)
    finish(browse.lab, "e3", outcome="user_error", reason=f"no {EVIL}")
    pages = [
        "/",
        "/queue",
        "/queue?state=failed",
        "/experiments/e1",
        "/compare?id=e1&id=e2&id=e3",
        "/machines",
        "/submit",
    ]
    for page in pages:
        text = browse.read(page)
        assert "<script>alert" not in text, page
        assert "<img src=x" not in text, page
        assert "<b>bold" not in text, page
        assert not re.search(r"\son\w+=", re.sub(r"&lt;.*?&gt;", "", text)), f"{page} has a handler in its HTML"
        assert not re.search(r"<script(?! src=\"/static/)", text), f"{page} has a script of its own"
        assert not re.search(r"(src|href)=\"https?:", text), f"{page} fetches from elsewhere"
    assert "2 succeeded, 1 failed" in browse.read("/")
    assert "lowest loss: e2" in browse.read("/")
    assert "no &lt;script&gt;" in browse.read("/queue?state=failed")
    experiment = browse.read("/experiments/e1")
    assert experiment.count("<svg") >= 1
    assert "forward 2 ms" in experiment
    compared = browse.read("/compare?id=e1&id=e2")
    assert compared.count("<polyline") >= 2
    assert "e1,grid,succeeded" in browse.read("/export.csv")


def test_only_what_can_be_done_is_offered_and_only_to_who_may(browse):
    assert 'hx-post="/api/experiments/e1/cancel"' in browse.read("/queue")
    assert 'hx-post="/api/experiments/e1/retry"' not in browse.read("/queue")
    browse.lab.store.add_token("a reader", role="read", label="kim", lasts_s=None, is_single_use=False)
    browse.cookies = {COOKIE: "a reader"}
    assert "hx-post" not in browse.read("/queue")
    assert browse("GET", "/submit").status_code == 403


def test_a_machine_that_lost_two_is_shown_and_let_go_on(browse):
    browse.lab.store.meet_node(Node(name="n1", boot="b", versions={}, devices=["cuda:0"]))
    browse.lab.store.mark_node("n1", n_bad=2, last_bad="e2")
    assert "takes nothing" in browse.read("/machines")
    assert browse("POST", "/api/nodes/n1/release").status_code == 200
    assert "takes nothing" not in browse.read("/machines")
    assert browse("POST", "/api/nodes/n2/release").status_code == 422


def test_a_configuration_is_checked_and_queued_from_the_page(browse):
    def send(text: str, do: str, name: str = "new.yaml") -> str:
        content = str(httpx.QueryParams({"name": name, "text": text, "priority": "2", "do": do}))
        return browse("POST", "/submit", content=content).text

    assert "2 points, nothing is wrong" in send("lr: [0.1, 0.2]\n", "check")
    assert "did you mean" in send("lrr: 1\n", "submit")
    assert "takes 3 devices" in send("lr: 1\ndevice: [0, 1, 2]\n", "check")
    assert "is no name of a file" in send("lr: 1\n", "check", name="../x.yaml")
    assert len(browse.lab.store.read_experiments()) == 3
    assert "2 experiments are in the queue" in send("lr: [0.1, 0.2]\n", "submit")
    assert [each.priority for each in browse.lab.store.read_experiments()][3:] == [2, 2]
    work = browse.lab.store.read_work("e4")
    assert work.code.entry == "new.yaml", "a node fetches the text that was typed"
    assert browse.lab.depot.has(work.code.digest)


@pytest.mark.parametrize("name", ["../access.py", "vendor/../../access.py", "%2e%2e/access.py", "lab.css.map", "x.js"])
def test_no_file_but_the_pages_own_is_served(browse, name):
    assert browse("GET", f"/static/{name}").status_code == 404
    assert browse("GET", "/static/vendor/htmx.min.js").headers["content-type"].startswith("text/javascript")


def test_a_browser_is_told_of_each_change_and_lets_go_when_the_server_ends(browse):
    class Request:
        app = browse.app

    async def listen() -> list[bytes]:
        told = []
        async for piece in _tell(Request()):
            told.append(piece)
            if len(told) == 1:
                assert browse.app.state.n_listeners == 1
                browse.lab.store.advance("drop", browse.lab.store.read_experiments(id="e1")[0].newest)
            if len(told) == 2:
                browse.app.state.is_closing = True
        return told

    told = asyncio.run(listen())
    assert told[1].startswith(b"event: change\n")
    assert len(told) == 2
    assert browse.app.state.n_listeners == 0
