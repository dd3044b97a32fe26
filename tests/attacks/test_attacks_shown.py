"""What others are shown: markup, SQL, formulas, secrets, what is brought along (A14, A18, A19, A22, A24, A25)."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from urllib.parse import quote

import pytest
from tests.attacks.browser import build_proxy, dump_page
from tests.attacks.wire import LAB, ROOT, WEB, fill

from fulltilt.cli import run_command
from fulltilt.lab.export import format_csv
from fulltilt.lab.redaction import HIDDEN, redact
from fulltilt.lab.server.access import COOKIE

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


@pytest.fixture(scope="module")
def marked(attacked) -> str:
    """An experiment in which every text is markup; its id."""
    id = attacked.add(name="markup", overrides=[f"note={ALL_MARKUP}"], owner=ALL_MARKUP, model=f"net {ALL_MARKUP}")
    _, token = attacked.lease(id, node=ALL_MARKUP[:200])
    started = {"event": "RunStarted", "name": ALL_MARKUP, "device": ALL_MARKUP, "n_parameters": 1}
    step = {"event": "StepsDone", "epoch": 1, "lr": 0.1, "samples_per_s": 1.0, "n_samples": 64, "seconds": 1.0}
    step |= {"loss": 0.1, "phases_ms": {ALL_MARKUP: 2.0}}
    seen = {"event": "Evaluated", "epoch": 1, "step": 20, "training_seconds": 2.0, "metrics": {ALL_MARKUP: 1.0}}
    events = [started | {"steps_per_epoch": 10}, *(step | {"step": n} for n in (10, 20)), seen]
    log = "".join(json.dumps(event) + "\n" for event in events).encode()
    assert attacked.append(token, "events.jsonl", log).status == 200
    attacked.append(token, "log.txt", ALL_MARKUP.encode())
    picture = f"<svg xmlns='http://www.w3.org/2000/svg' onload=\"{OWN}\"/>".encode()
    svg = attacked.send(token, picture, "<b onload=x>.svg")
    done = {"outcome": "succeeded", "metrics": {ALL_MARKUP[:200]: 1.0, "loss": 0.5}, "files": [svg]}
    assert attacked.finish(token, done).json() == {"state": "succeeded"}
    return id


def list_pages(id: str) -> list[str]:
    pages = ["/", "/queue", "/queue?sweep=markup", "/machines", "/submit"]
    return [*pages, f"/experiments/{id}", f"/compare?id={id}&id=e1"]


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
    assert found.headers["content-type"] == "application/octet-stream"
    assert found.headers["x-content-type-options"] == "nosniff"


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


# A18: SQL

SQL = ["' OR 1=1 --", "'; DROP TABLE experiment; --", '" OR ""="', "1 UNION SELECT digest FROM token", "%", "_", "\\"]
SQL += ["0x31"]
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
    for method, path, role in attacked.routes():
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
    text = format_csv([entry | {"point": dict.fromkeys(FORMULAS, FORMULAS[1]), "metrics": {FORMULAS[3]: 1.0}}])
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    assert sum(cell.startswith("'") for cell in cells) >= 2 * len(FORMULAS)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_a19_nothing_that_is_printed_steers_the_terminal(attacked, capsys, monkeypatch):
    id = attacked.add(overrides=[f"note={STEERING}"], owner=STEERING, model=f"net{STEERING}")
    _, token = attacked.lease(id, node=f"n{STEERING}")
    attacked.append(token, "log.txt", f"log{STEERING}\n".encode())
    line = json.dumps({"event": "Evaluated", "metrics": {f"loss{STEERING}": 1.0}}) + "\n"
    attacked.append(token, "events.jsonl", line.encode())
    at = ["--lab", str(attacked.lab.folder)]
    finish = {"outcome": "user_error", "reason": f"no{STEERING}"}
    said = {}
    calls = (["list", "--verbose"], ["show", id], ["logs", id], ["export", "-"], ["priority", id, "3"], ["retry", id])
    for words in calls:
        with monkeypatch.context() as patch:
            if words[0] == "logs":  # they go to a pipe as they came
                patch.setattr("sys.stdout.isatty", lambda: True)
            assert run_command(["lab", *words, *at]) == 0
        said[words[0]] = capsys.readouterr().out
        if words[0] == "show":
            assert attacked.finish(token, finish).status == 200
    assert all(word in said[name] for name, word in (("logs", "log"), ("show", "net"), ("export", "no")))
    for each in said.values():
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", each), each


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
    plain = {"optim.lr": 0.1, "n_tokens": 5, "tokenizer": "bpe(vocab=100)", "mask_token": "[MASK]", "key": "a1"}
    plain |= {"data.path": "git@host:x", "model": "net(keys=4, secretary=1)", "digest": "a" * 64, "token": None}
    assert redact(plain) == plain


def test_a22_nobody_is_shown_them_and_the_owner_only_on_request(attacked, capsys, tmp_path):
    text = f"dataset: 'images(root=\"https://user:{SECRET}@host/x\")'\nmodel: 'net(api_key={SECRET})'\nlr: [1, 2]\n"
    answer = attacked.submit(text, overrides=[f"loss=mine:loss(password={SECRET})"])
    assert answer.status == 200, answer.text
    id = answer.json()["ids"][0]
    _, token = attacked.lease(id)
    title = attacked.wire("POST", "/runner/hello", {"pid": 1}, token=token).json()["title"]
    assert SECRET not in title
    attacked.finish(token, {"outcome": "user_error", "reason": f"bad token={SECRET}"})
    for path in (f"/experiments/{id}", f"/api/experiments/{id}", "/api/experiments", "/queue", "/", "/export.csv"):
        for role in ("read", "owner"):
            found = attacked.wire("GET", path, token=role)
            assert found.status == 200
            assert SECRET not in found.text, path
    assert HIDDEN in attacked.wire("GET", f"/api/experiments/{id}").text
    for role in ("read", "submit"):
        assert attacked.wire("GET", f"/api/experiments/{id}?reveal=true", token=role).status == 403
    for words, is_shown in (([], False), (["--reveal"], True)):
        assert run_command(["lab", "show", id, "--json", "-", *words, "--lab", str(attacked.lab.folder)]) == 0
        assert (SECRET in capsys.readouterr().out) == is_shown


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

    for module, least in ((starlette, (1, 10)), (fastapi, (0, 165))):
        assert tuple(map(int, module.__version__.split(".")[:2])) >= least, module.__name__


# A25: what an engine gives away


def test_a25_what_is_not_protected_is_said():
    text = " ".join((ROOT / "docs" / "security.md").read_text().split())
    for said in ("Ray", "the same operating system user", "another user of the operating system", "Slurm"):
        assert said in text
    assert all(f"A{n}" in text for n in range(1, 27))
