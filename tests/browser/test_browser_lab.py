"""The lab's page in a real Chromium: live without a reload, by keyboard, on a phone, in the dark."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.chromium import PROGRAM, start_chromium
from tests.lab_cases import PATIENCE_S, wait_for

from fulltilt.errors import UsageError
from fulltilt.lab.client import Client
from fulltilt.lab.serving import find_server
from fulltilt.lab.states import OVER

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]

SERVER = Path(__file__).parents[1] / "unit" / "lab" / "run_stand_in_server.py"
TTL_S, N_DEVICES = 20.0, 2
PHONE, DESK = 390, 1200
AUDIT = Path(__file__).with_name("audit.js").read_text()


class Served:
    """A lab with a server of its own, whose trainings are stand-ins that take a second an epoch."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "STAND_IN_EVENTS": "1", "STAND_IN_ALONE": "1"}
        command = [sys.executable, str(SERVER), str(self.folder), str(TTL_S), str(N_DEVICES)]
        environment |= {"STAND_IN_CHECKPOINT": "checkpoint.pt"}
        self.process = subprocess.Popen(command, env=environment)
        self.address = wait_for(lambda: find_server(self.folder), self.process)
        self.client = Client(None, self.address)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    def submit(self, name: str, text: str) -> list[str]:
        path = self.folder.parent / name
        path.write_text(text)
        return self.client.submit(path, [])["ids"]

    def read(self, id: str) -> dict:
        return self.client.get(f"/api/experiments/{id}")["experiment"]

    def wait(self, id: str, *states: str) -> None:
        wait_for(lambda: self.read(id)["state"] in states, told=lambda: self.read(id))

    def clear(self) -> None:
        for each in self.client.get("/api/experiments")["experiments"]:
            if each["state"] not in OVER:
                with contextlib.suppress(UsageError):  # it has just ended
                    self.client.post(f"/api/experiments/{each['id']}/cancel")
                self.wait(each["id"], *OVER)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("browser") / "lab")
    try:
        yield served
    finally:
        served.clear()
        served.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with start_chromium(tmp_path_factory.mktemp("chromium") / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def finished(lab):
    """Two experiments with results, the second with the lower loss, and one that failed."""
    ids = lab.submit("done.yaml", "lr: [0.1, 0.01, 0.666]\nepochs: 2\n")
    for id in ids:
        lab.wait(id, *OVER)
    assert [lab.read(id)["state"] for id in ids] == ["succeeded", "succeeded", "failed"]
    return ids


@pytest.fixture
def page(lab, browser):
    """A page of somebody who signed in, as the address of the first visit does; its console stays silent."""
    found = browser.open()
    found.show_as(width=DESK)
    found.go(f"{lab.address.url}/login#{lab.address.token}")
    found.wait("location.pathname === '/' && document.readyState === 'complete'")
    yield found
    found.call("Page.close")
    assert found.errors == []


def visit(page, lab, path: str) -> None:
    page.go(lab.address.url + path)
    page.evaluate(f"window.marker = 'this document'; {AUDIT}")


def press_on(page, id: str, key: str) -> None:
    page.wait(f"!!document.getElementById('{id}')")
    page.evaluate(f"document.getElementById('{id}').focus()")
    page.press(key)


def type_configuration(page, text: str) -> None:
    page.evaluate("document.querySelector('.CodeMirror').CodeMirror.setValue('')")
    page.evaluate("document.querySelector('.CodeMirror').CodeMirror.focus()")
    page.type(text)


def test_a_grid_is_checked_submitted_and_seen_live_without_a_reload(lab, page, browser):
    visit(page, lab, "/queue")
    other = browser.open()
    visit(other, lab, "/submit")  # signed in already: the cookie is the browser's
    type_configuration(other, "model: small_cnn\ndataset: digits\nlr: [0.1, -2]\n")
    said = "document.getElementById('said').innerText"
    other.evaluate("document.querySelector('[value=check]').click()")
    assert "lr -2" in other.wait(said)
    type_configuration(other, "lr: [0.1, 0.2, 0.3]\nepochs: 12\n")
    other.press("Escape")
    other.press("Tab")  # leaves the editor
    assert other.evaluate("document.activeElement.name") == "priority"
    other.press("Tab")
    other.press("Enter")
    other.wait(f"{said}.startsWith('3 points')")
    other.press("Tab")
    other.press(" ")
    other.wait(f"{said}.startsWith('3 points, 3 of them new')")
    other.press("Enter")
    other.wait(f"{said}.startsWith('3 points, 0 of them new')")

    rows = "[...document.querySelectorAll('[data-row]')].filter((row) => row.innerText.includes('grid'))"
    page.wait(f"{rows}.length === 3 && {rows}[0].innerText.includes('running')")
    page.call("Page.bringToFront")  # what nobody looks at asks less often
    page.wait(f"{rows}[0].innerText.includes('accuracy')")  # of an evaluation, which changes no state
    id = page.evaluate(f"{rows}[0].dataset.row")
    assert page.evaluate("window.marker")

    other.call("Page.bringToFront")
    visit(other, lab, f"/experiments/{id}")
    log = "document.getElementById('log').textContent"
    n_before = len(other.wait(f"{log}.includes('from step 0') && {log}"))
    other.wait(f"{log}.length > {n_before}")
    n_marks = other.wait("document.querySelectorAll('.plot circle').length")
    other.wait(f"document.querySelectorAll('.plot circle').length > {n_marks}")
    assert "backward 12 ms (60 %)" in other.evaluate("document.body.innerText")
    other.wait("document.querySelector('h1 .state').innerText === 'succeeded'")
    shown = other.wait("document.getElementById('more').innerText.includes('result.json') && document.body.innerText")
    for part in ("Checkpoints", "checkpoint.pt", "Environment", "CPU: a stand-in, 1 thread", "Configuration"):
        assert part in shown
    assert other.evaluate("window.marker")
    get = "fetch([...document.querySelectorAll('a[download]')].find((a) => a.innerText === 'result.json').href)"
    assert other.evaluate(f"{get}.then((answer) => answer.headers.get('content-disposition'))").startswith("attachment")
    assert other.evaluate(f"{get}.then((answer) => answer.json()).then((result) => result.reason)") == "finished"

    page.wait(f"{rows}[0].innerText.includes('succeeded')")
    assert page.evaluate("window.marker"), "it was loaded once"
    assert other.errors == []
    other.call("Page.close")
    lab.clear()


def test_priorities_pause_resume_cancel_and_retry_by_keyboard(lab, page):
    first, second, waiting = lab.submit("keys.yaml", "lr: [0.11, 0.12, 0.13]\nepochs: 100\n")
    lab.wait(first, "running")
    lab.wait(second, "running")
    visit(page, lab, "/queue?sweep=keys")
    page.evaluate(f"document.getElementById('priority-{waiting}').select()")
    page.type("7")
    page.press("Enter")
    page.wait(f"document.getElementById('priority-{waiting}')?.defaultValue === '7'")
    assert lab.read(waiting)["priority"] == 7
    page.evaluate(f"document.getElementById('priority-{waiting}').select()")
    page.type("5000")
    page.press("Enter")
    assert "must be from -1000 to 1000" in page.wait("document.getElementById('notice').innerText")
    assert page.evaluate(f"document.getElementById('priority-{waiting}').value") == "7"
    assert "422" in page.errors.pop()

    press_on(page, f"pause-{waiting}", "Enter")
    page.wait(f"document.querySelector('[data-row={waiting}] .state').innerText === 'held'")
    page.wait(f"document.activeElement.closest('[data-row]')?.dataset.row === '{waiting}'")
    press_on(page, f"resume-{waiting}", " ")
    page.wait(f"document.querySelector('[data-row={waiting}] .state').innerText !== 'held'")
    press_on(page, f"pause-{first}", " ")
    page.wait(f"document.querySelector('[data-row={first}] .state').innerText === 'held'")
    press_on(page, f"cancel-{second}", "Enter")
    page.wait(f"document.querySelector('[data-row={second}] .state').innerText === 'cancelled'")
    press_on(page, f"retry-{second}", "Enter")
    page.wait(f"document.querySelector('[data-row={second}] .state').innerText === 'running (2)'")
    assert page.evaluate("window.marker"), "it was loaded once"
    page.go(f"{lab.address.url}/experiments/{second}")
    page.wait("document.getElementById('log').textContent.includes('attempt 2')")
    page.go(f"{lab.address.url}/experiments/{second}?attempt=1")
    page.wait("document.getElementById('log').textContent.includes('attempt 1')")
    lab.clear()


def test_a_comparison_sorts_by_figures_overlays_curves_and_is_exported(lab, page, finished):
    visit(page, lab, "/queue?sweep=done")
    press_on(page, "pick-all", " ")
    press_on(page, "compare-chosen", "Enter")
    page.wait("location.pathname === '/compare' && document.readyState === 'complete'")
    first, second, failed = finished
    assert page.evaluate("document.querySelector('h1').innerText").startswith(f"Lowest loss: {second}")
    assert page.evaluate("document.querySelectorAll('.parallel polyline').length") == 2
    assert page.evaluate("document.querySelectorAll('.plot polyline').length") >= 4
    order = "[...document.querySelectorAll('.sortable tbody tr')].map((row) => row.cells[0].innerText)"
    head = "[...document.querySelectorAll('.sortable th button')].find((each) => each.innerText.startsWith('lr'))"
    page.evaluate(f"{head}.focus()")
    page.press("Enter")
    assert page.evaluate(order) == [second, first, failed]
    page.press(" ")
    assert page.evaluate(order) == [failed, first, second]
    assert page.evaluate(f"{head}.parentNode.getAttribute('aria-sort')") == "descending"
    table = page.evaluate("fetch(document.querySelector('main a[download]').href).then((answer) => answer.text())")
    assert [line.split(",")[0] for line in table.splitlines()] == ["id", *finished]
    visit(page, lab, "/compare")
    assert "Choose experiments" in page.evaluate("document.body.innerText")


def test_the_page_goes_on_by_itself_when_the_server_was_away(lab, page):
    (id,) = lab.submit("away.yaml", "lr: 0.21\nepochs: 7\n")
    lab.wait(id, "running")
    visit(page, lab, f"/experiments/{id}")
    log = "document.getElementById('log').textContent"
    page.wait(f"{log}.includes('from step 0')")
    lab.stop()
    page.wait("document.getElementById('notice').innerText.includes('does not answer')")
    lab.start()
    page.wait("document.getElementById('notice').hidden")
    lab.wait(id, "succeeded")
    page.wait("document.querySelector('h1 .state').innerText === 'succeeded'")
    page.wait(f"{log}.includes('epoch 7')")
    assert page.evaluate("window.marker"), "it was loaded once"
    page.errors.clear()  # of the time in which there was no server


def test_machines_show_what_they_do_now(lab, page):
    visit(page, lab, "/machines")
    before = page.evaluate("document.getElementById('machines').innerText")
    assert "cpu:0, cpu:1" in before
    assert "memory" in before
    page.wait(f"document.getElementById('machines').innerText !== {before!r}")
    assert page.evaluate("window.marker")


@pytest.fixture(scope="module")
def addresses(finished):
    first, second, failed = finished
    experiments = [f"/experiments/{first}", f"/experiments/{failed}"]
    return ["/", "/queue", *experiments, f"/compare?id={first}&id={second}", "/compare", "/machines", "/submit"]


def test_every_control_is_reached_by_tab_and_shows_it_and_nothing_holds_a_reader(lab, page, addresses):
    for address in addresses:
        visit(page, lab, address)
        n_stops = page.evaluate("findStops()")
        seen = []
        for _ in range(n_stops):
            page.press("Tab")
            seen.append(page.evaluate("findStand()"))
        missed = set(range(n_stops)) - {place for place, *_ in seen}
        assert [page.evaluate(f"stops[{place}].outerHTML") for place in missed] == [], address
        assert [each for _, is_shown, each in seen if not is_shown] == [], address
        assert [place for place, *_ in seen] == sorted(place for place, *_ in seen), "in the order of the page"


def test_no_page_is_wider_than_a_phone_and_every_text_can_be_read_in_the_light_and_in_the_dark(lab, page, addresses):
    for is_dark in (False, True):
        page.show_as(width=PHONE, is_dark=is_dark)
        for address in addresses:
            visit(page, lab, address)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE, address
            assert page.evaluate("findFaint()") == [], (address, is_dark)
