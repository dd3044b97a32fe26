"""Drive a headless Chromium by its DevTools protocol, over a pipe: for tests of pages, and for their pictures."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
FLAGS += ("--no-first-run", "--disable-background-networking", "--remote-debugging-pipe")
PATIENCE_S = 60.0  # ends what hangs
LOOK_S = 0.05
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
TEXTS = {"Enter": "\r", " ": " "}
SHIFT = 8
BAD_ENTRIES = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


@contextlib.contextmanager
def start_chromium(profile: Path) -> Iterator[Chromium]:
    """Start a browser that keeps its profile in a folder, and end it after the block."""
    assert PROGRAM
    ends = [*os.pipe(), *os.pipe()]
    to_read, to_write, from_read, from_write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    # The browser reads commands from descriptor 3 and writes answers to 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash"]
    with (profile.parent / "chromium.log").open("ab") as log:
        process = subprocess.Popen(
            [*shell, PROGRAM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_read, from_write),
            stdout=log,
            stderr=log,
        )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Chromium(to_write, from_read)
    finally:
        os.close(to_write)  # ends it, as does a test that is killed
        os.close(from_read)
        process.wait(PATIENCE_S)


class Chromium:
    """The browser: sends commands and sorts what comes back by the page it is about."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers, self._rest = commands, answers, b""
        self._numbers = itertools.count(1)
        self._pages: dict[str, Page] = {}

    def open(self) -> Page:
        """Open a page in a tab of its own."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises RuntimeError with what the browser says against it."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._commands, data) :]
        until_s = time.monotonic() + PATIENCE_S
        while True:
            answer = self._receive(until_s)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page.hear(answer)

    def _receive(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._answers], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended; see chromium.log beside its profile")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


class Page:
    """A tab. ``errors`` holds what its console complained about: scripts, the content policy, requests that failed."""

    def __init__(self, browser: Chromium, session: str):
        self._browser, self._session = browser, session
        self.errors: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, session=self._session, **params)

    def hear(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        level = params.get("entry", params).get("level", params.get("type", "error"))
        if method in BAD_ENTRIES and level in ("error", "assert", "warning"):
            self.errors.append(json.dumps(params)[:600])

    def go(self, url: str) -> None:
        """Open an address and wait until all of it is there; what follows the # alone loads nothing."""
        self.evaluate("window.isOld = true")
        self.call("Page.navigate", url=url)
        self.wait("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, of a promise what it comes to."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {json.dumps(done['exceptionDetails'])[:600]}")
        return done["result"].get("value")

    def wait(self, script: str, *, patience_s: float = PATIENCE_S) -> Any:
        """Return the value of an expression as soon as it is something."""
        until_s = time.monotonic() + patience_s
        while True:
            found = None
            with contextlib.suppress(RuntimeError):  # between two documents there is none
                found = self.evaluate(script)
            if found:
                return found
            if time.monotonic() > until_s:
                shown = self.evaluate("document.body.innerText")
                raise AssertionError(f"{script} never came true; the page shows: {shown}")
            time.sleep(LOOK_S)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key that has a name, as a hand does."""
        same = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        same |= {"modifiers": SHIFT if shift else 0}
        text = {"text": TEXTS[key]} if key in TEXTS else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **same, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def show_as(self, *, width: int, height: int = 900, is_dark: bool = False, scale: float = 1.0) -> None:
        """Take on the size of a screen and its scheme of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def take_picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
