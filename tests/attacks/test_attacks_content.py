"""What is sent in files, texts and names: paths, archives, pickles, YAML, code, addresses (A6, A7, A9 to A11, A13)."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.attacks.wire import CANARY, LAB, fill

from fulltilt.config.binding import find_target
from fulltilt.errors import ConfigError, UsageError
from fulltilt.lab.snapshot import unpack_code

# A6: names that lead elsewhere

NAMES = ["..", "../canary.txt", "../../canary.txt", "/etc/passwd", "//proc/self/cwd/canary.txt", "..\\canary.txt"]
NAMES += ["%2e%2e%2fcanary.txt", "canary.txt\0", "#", "?", "a" * 5000]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
def test_a06_no_name_in_a_path_leads_out_of_a_lab(attacked, name):
    _, token = attacked.lease()
    around = attacked.lab.folder.parent
    before = sorted(around.iterdir())
    for method, path, role in attacked.routes():
        if "{" not in path:
            continue
        for written in (quote(name), quote(name, safe=""), quote(quote(name, safe=""), safe="")):
            at = fill(path, **dict.fromkeys(("id", "name", "digest", "action", "label", "node"), written))
            body, who = b"x" if method == "PUT" else b"", token if role == "runner" else "owner"
            answer = attacked.wire(method, at, body, token=who)
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
    assert attacked.commit(token, [file]).status in (400, 422)
    assert attacked.finish(token, {"outcome": "succeeded", "files": [file]}).status in (400, 422)
    assert attacked.read(attempt.experiment).state == "running"
    if name not in ("", ".hidden") and "/" not in name:  # of a path the last part counts
        assert attacked.submit("lr: 1\n", source=f"/somewhere/{name}").status in (400, 422)


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
        assert attacked.commit(token, files).status == 200
        attacked.append(token, "events.jsonl", content + b"\n")
        done = attacked.finish(token, {"outcome": "succeeded", "files": files})
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
    command = [sys.executable, "-m", "fulltilt", "train", tmp_path / "one.yaml", "run.device=cpu", "--resume"]
    command += ["--out", out]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    assert (out / "checkpoint.pt").is_file()
    for content in build_hostile_checkpoints(canary):
        for name in ("checkpoint.pt", "checkpoint.previous.pt"):
            (out / name).write_bytes(content)
        done = subprocess.run([*command, "epochs=2"], capture_output=True, text=True, timeout=600)
        assert "checkpoint" in done.stdout + done.stderr
        assert not canary.exists()


# A10: YAML and JSON that explode

LAUGHS = f"a0: &a0 [{', '.join(['lol'] * 9)}]\n"
LAUGHS += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
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
        assert attacked.append(token, "events.jsonl", data).status == 200
        for path in ("/", "/queue", "/api/experiments", "/export.csv", f"/experiments/{attempt.experiment}"):
            assert attacked.wire("GET", path).status == 200, (line[:40], path)
        attacked.finish(token, {"outcome": "user_error"})
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


CODE_NAMES = ["().__class__.__bases__", "__import__('os').system('ls')", "lambda: 0", "{_target_: os.system}"]
CODE_NAMES += ["a;b", "`ls`"]


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
        attacked.finish(token, {"outcome": "user_error", "reason": url})
        for method, path, role in attacked.routes():
            at = fill(path, id=quote(url, safe=""), name=quote(url, safe=""), digest=quote(url, safe=""))
            attacked.wire(method, f"{at}?url={url}&path={url}&uri={url}", token="owner" if role != "runner" else token)
        for header in ("referer", "x_forwarded_host", "x_original_url", "x_forwarded_for", "forwarded"):
            attacked.wire("GET", "/", **{header: url})
        stop.set()
        thread.join()
    assert heard == []
    fetchers = re.compile(r"^\s*(import|from) (httpx2?|fsspec|urllib\.request|requests|aiohttp|http\.client)\b", re.M)
    assert [str(path) for path in (LAB / "server").rglob("*.py") if fetchers.search(path.read_text())] == []
