"""The page of a service in a real Chromium: live without a reload, on a phone, in the dark."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from scripts.chromium import PROGRAM, start_chromium
from tests.faults.test_faults_infer_serve import start

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]

PHONE, DESK = 390, 1200
AUDIT = Path(__file__).with_name("audit.js").read_text()


def ask(url, *samples):
    body = json.dumps({"inputs": samples}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/predict", data=body), timeout=20) as answer:
        assert answer.status == 200


def test_the_page_fits_reads_well_follows_the_load_and_says_when_the_server_is_gone(tmp_path):
    with start(0.01) as (process, port), start_chromium(tmp_path / "profile") as browser:
        url, page = f"http://127.0.0.1:{port}", browser.open()
        for n in range(5):
            ask(url, [n], [n, n], [1])
        for width, is_dark in ((PHONE, False), (DESK, True)):
            page.show_as(width=width, is_dark=is_dark)
            page.go(url)
            page.evaluate(AUDIT)
            assert page.evaluate("findFaint()") == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("document.querySelectorAll('#live svg').length") >= 2
        page.evaluate("window.marker = 1")
        ask(url, [7, 7])
        page.wait("document.querySelector('#live').innerText.includes('16 samples')")
        assert page.evaluate("window.marker") == 1
        assert page.errors == []
        process.kill()
        page.wait("!document.getElementById('notice').hidden")
