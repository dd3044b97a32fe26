"""Look at a page of a served lab in a real browser: a proxy adds the cookie of somebody who has signed in."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import shutil
import subprocess
import threading

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=3000")


@contextlib.contextmanager
def build_proxy(wire, cookie: str, extra: dict[str, bytes]):
    """Serve the lab's pages to a browser → the address, and the paths that it asked for.

    Args:
        extra: Pages of our own, path → HTML.
    """
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path in extra:
                self.answer(200, [("content-type", "text/html")], extra[self.path])
            elif self.path.partition("?")[0] == "/live":
                self.answer(204, [], b"")
            else:
                line = http.client.HTTPConnection(wire.host, wire.port, timeout=60)
                line.request("GET", self.path, headers={"Cookie": cookie, "Accept": "text/html"})
                found = line.getresponse()
                self.answer(found.status, found.getheaders(), found.read())
                line.close()

        def answer(self, status, headers, body):
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "date", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def dump_page(url: str, profile) -> str:
    """What a browser has made of a page, as HTML. Skips the test where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    command = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
