"""The pages of a lab: what they show, that nothing in them runs that is not ours, and who gets in."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re

import httpx2 as httpx
import pytest
from tests.lab_cases import OWNER, ask, build_points, lease

from fulltilt.config import Config
from fulltilt.lab import operations
from fulltilt.lab.records import Artefact, Attempt, Node, Point
from fulltilt.lab.scheduling.order import Room
from fulltilt.lab.server.access import COOKIE, MOST_FAILURES, PAUSE_S
from fulltilt.lab.server.app import build_app
from fulltilt.lab.server.live import _tell, read_mark
from fulltilt.lab.server.trainings import LOG_TAIL_BYTES
from fulltilt.lab.serving import open_lab

PAGES_OF = {None: "/queue", "e1": "/experiments/e1", "e2": "/experiments/2"}
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'"
STEP = {"event": "StepsDone", "epoch": 1, "lr": 0.1, "samples_per_s": 100.0, "n_samples": 640, "seconds": 1.0}
STARTED = {"event": "RunStarted", "name": "grid", "device": "cpu", "n_parameters": 7, "steps_per_epoch": 10}


class Browser:
    """Asks for pages as a browser does that was signed in once."""

    def __init__(self, lab):
        self.lab, self.rooms = lab, [Room(node="n1", free=[], n_devices=2)]
        self.app = build_app(lab, token=OWNER, read_rooms=lambda: self.rooms)
        self.cookies = {COOKIE: OWNER}

    def __call__(self, method: str, path: str, **options) -> httpx.Response:
        return ask(self.app, method, path, cookies=self.cookies, headers={"accept": "text/html"}, **options)

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
    attempt, _ = lease(lab.store, found, node=EVIL)
    lab.store.advance("start", attempt, pid=1)
    folder = lab.folder / id
    folder.mkdir()
    steps = [
        STEP | {"step": n, "loss": loss + 1.0 / n, "phases_ms": {"forward": n / 10, "backward": 1.0}} for n in (10, 20)
    ]
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
    browse.app.state.guesses._clock = lambda: clock[0]
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
    assert "Lowest loss: e2" in browse.read("/")
    assert "no &lt;script&gt;" in browse.read("/queue?state=failed")
    experiment = browse.read("/experiments/e1")
    assert experiment.count("<svg") >= 1
    assert "forward 1.5 ms (60 %), backward 1 ms (40 %)" in experiment
    assert "mean of the last 2 steps" in experiment
    compared = browse.read("/compare?id=e1&id=e2")
    assert compared.count("<polyline") >= 2
    assert re.findall(r'data-value="(0\.[\d.]+)">', compared) == ["0.1", "0.5", "0.2", "0.25"], "sorted as figures"
    assert "Choose experiments" in browse.read("/compare")
    assert "e1,grid,succeeded" in browse.read("/export.csv")


def test_only_what_can_be_done_is_offered_and_only_to_who_may(browse):
    assert 'hx-post="/api/experiments/e1/cancel"' in browse.read("/queue")
    assert 'hx-post="/api/experiments/e1/retry"' not in browse.read("/queue")
    browse.lab.store.add_token("a reader", role="read", label="kim", lasts_s=None, is_single_use=False)
    browse.cookies = {COOKIE: "a reader"}
    assert "hx-post" not in browse.read("/queue")
    assert browse("GET", "/submit").status_code == 403


def test_what_no_machine_can_run_is_told_while_it_waits_and_as_soon_as_there_is_one_no_more(browse):
    browse.lab.store.add("/somewhere/large.yaml", build_points(1), [], n_devices=3)
    for page in ("/queue", "/queue?state=queued", "/experiments/e4"):
        assert browse.read(page).count("no machine here has 3 devices") == 1, page
    assert "no machine" not in browse.read("/experiments/e1")
    browse.rooms = [Room(node="n2", free=[], n_devices=4)]
    assert "no machine" not in browse.read("/queue")
    browse.rooms = []
    assert browse.read("/queue").count("no machine here has 1 device<") == 3, "none has joined, or all are gone"
    operations.act(browse.lab, "pause", "e4")
    assert "no machine here has 3" not in browse.read("/queue"), "it would not begin anyway"


def test_files_and_checkpoints_of_each_attempt_are_listed_and_an_earlier_log_is_led_to(browse):
    finish(browse.lab, "e1", outcome="user_error", reason="no")
    attempt = Attempt(experiment="e1", number=1)
    for name in ("checkpoint.pt", "fingerprint.json", f"{EVIL}.csv"):
        browse.lab.depot.put_pieces([name.encode()], digest := hashlib.sha256(name.encode()).hexdigest())
        browse.lab.store.add_artefacts(attempt, [Artefact(name=name, digest=digest, n_bytes=1536)])
    text = browse.read("/experiments/e1")
    assert "<script>alert" not in text
    files, checkpoints = text.partition("<h2>Files")[2].split("<h2>Checkpoints")
    assert "%3Cscript%3E" in files
    assert "/api/experiments/e1/files/checkpoint.pt?attempt=1" in checkpoints
    assert "1.5 KiB" in checkpoints
    assert "fingerprint.json" not in text
    path = "/api/experiments/e1/files/checkpoint.pt?attempt="
    assert browse("GET", f"{path}1").content == b"checkpoint.pt"
    assert browse("GET", f"{path}2").status_code == 404
    assert 'href="/experiments/e1?attempt=1"' in text
    assert 'data-attempt="1" data-start="0" data-only' in browse.read("/experiments/e1?attempt=1")


def test_a_long_log_is_shown_from_its_last_part(browse):
    finish(browse.lab, "e1", outcome="user_error", reason="no")
    (browse.lab.folder / "e1" / "log-1.txt").write_bytes(b"x" * (LOG_TAIL_BYTES + 7))
    text = browse.read("/experiments/e1")
    assert 'data-start="7"' in text
    assert "fulltilt lab logs e1" in text


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

    before = {*browse.lab.folder.rglob("*")}
    assert "2 points; nothing is wrong" in send("lr: [0.1, 0.2]\n", "check")
    assert {*browse.lab.folder.rglob("*")} == before, "what is only checked is not kept"
    assert '<p class="alarm">new.yaml:1: ' in (said := send("lrr: 1\n", "submit"))
    assert "did you mean" in said
    assert "takes 3 devices" in send("lr: 1\ndevice: [0, 1, 2]\n", "check")
    assert "is no name of a file" in send("lr: 1\n", "check", name="../x.yaml")
    assert len(browse.lab.store.read_experiments()) == 3
    assert "2 points, 2 of them new" in send("lr: [0.1, 0.2]\n", "submit")
    assert '<a href="/queue?sweep=page%3Anew">2 points, 0 of them new' in send("lr: [0.1, 0.2]\n", "submit")
    assert [each.priority for each in browse.lab.store.read_experiments()][3:] == [2, 2]
    work = browse.lab.store.read_work("e4")
    assert work.code.entry == "new.yaml", "a node fetches the text that was typed"
    assert browse.lab.depot.has(work.code.digest)


@pytest.mark.parametrize("name", ["../access.py", "vendor/../../access.py", "%2e%2e/access.py", "lab.js.map", "x.js"])
def test_no_file_but_the_pages_own_is_served(browse, name):
    assert browse("GET", f"/static/{name}").status_code == 404
    assert browse("GET", "/static/vendor/htmx.min.js").headers["content-type"].startswith("text/javascript")


class Request:
    def __init__(self, app):
        self.app = app


def test_a_browser_is_told_of_each_change_and_lets_go_when_the_server_ends(browse):
    request = Request(browse.app)

    async def listen() -> list[bytes]:
        told = []
        async for piece in _tell(request, read_mark(request)):
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


def test_what_changed_since_the_page_was_made_is_told_at_once_a_priority_too_and_of_one_experiment_only_its_own(browse):
    request = Request(browse.app)

    async def hear(mark: str, id: str | None = None) -> bytes:
        stream = _tell(request, mark, id)
        try:
            await anext(stream)
            return await asyncio.wait_for(anext(stream), 0.1)
        except TimeoutError:
            return b""
        finally:
            await stream.aclose()

    marks = {id: re.search(r"after=([\d.]+)", browse.read(page))[1] for id, page in PAGES_OF.items()}
    assert [asyncio.run(hear(mark, id)) for id, mark in marks.items()] == [b""] * 3
    browse.lab.store.advance("hold", browse.lab.store.read_experiments(id="e1")[0].newest)
    assert [bool(asyncio.run(hear(mark, id))) for id, mark in marks.items()] == [True, True, False]
    mark = read_mark(request)
    assert browse("POST", "/api/experiments/e2/priority", json={"priority": 3}).status_code == 200
    assert asyncio.run(hear(mark)).startswith(b"event: change\n")
