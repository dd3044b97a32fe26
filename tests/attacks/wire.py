"""Speak to a lab's server in bytes of our own choice: what no client library would send."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import socket
import urllib.parse
import uuid
from pathlib import Path

from tests.lab_cases import lease

from fulltilt.config import Config
from fulltilt.lab.lab import Lab
from fulltilt.lab.records import Attempt, Point
from fulltilt.lab.server.access import ROLES
from fulltilt.lab.server.app import build_app

PATIENCE_S = 60
ROOT = Path(__file__).parents[2]
LAB = ROOT / "src" / "fulltilt" / "lab"
WEB = ROOT / "src" / "fulltilt" / "web" / "static"
CANARY = b"THE-CANARY-OF-THE-HOST"  # in a file beside the folder of a lab
SHELL = "$(touch pwned);`touch pwned`|touch pwned&.yaml"


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self):
        return json.loads(self.body)


class Wire:
    """Sends requests to a served lab; headers that are None are left out."""

    def __init__(self, url: str, token: str):
        self.token, self.netloc = token, urllib.parse.urlsplit(url).netloc
        self.host, _, port = self.netloc.rpartition(":")
        self.port = int(port)

    def open(self, *, source: str | None = None) -> socket.socket:
        bound = None if source is None else (source, 0)
        return socket.create_connection((self.host, self.port), PATIENCE_S, source_address=bound)

    def raw(self, *pieces: bytes, source: str | None = None) -> bytes:
        """Send bytes and return all that comes until the server hangs up; of events without end the beginning."""
        answer = bytearray()
        with self.open(source=source) as line, contextlib.suppress(ConnectionError):
            try:
                for piece in pieces:
                    line.sendall(piece)
            except ConnectionError:  # refused before all of it was sent
                pass
            while b"text/event-stream" not in answer[:2000] and (piece := line.recv(1 << 16)):
                answer += piece
        return bytes(answer)

    def __call__(self, method, path, body=b"", *, token="owner", source=None, **headers) -> Answer:
        if isinstance(body, dict | list):
            body = json.dumps(body).encode()
            headers = {"content-type": "application/json", **headers}
        given = {"host": self.netloc, "connection": "close", "content-length": str(len(body)) if body else None}
        if token is not None:
            given["authorization"] = f"Bearer {self.token if token == 'owner' else token}"
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in given.items() if value is not None),
        ]
        return parse(self.raw("\r\n".join([*lines, "", ""]).encode(), body, source=source))


def parse(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(re.findall(rb"[0-9a-f]+\r\n(.*?)\r\n(?=[0-9a-f]+\r\n|$)", body, re.S))
    return Answer(int((first.split() or ["", "0"])[1]), headers, body)


class Attacked:
    """A served lab, what is in it, and a line to it."""

    def __init__(self, lab: Lab, url: str, token: str):
        self.lab, self.url, self.wire = lab, url, Wire(url, token)
        self.listening: set[tuple[str, int]] = set()  # sockets of the server
        for role in ("read", "submit", "worker", "join"):
            lab.store.add_token(role, role=role, label=role, lasts_s=None, is_single_use=False)

    def add(self, *, name: str | None = None, overrides=(), owner="", **values) -> str:
        """Queue one experiment and return its id."""
        source, digest = f"/somewhere/{name or uuid.uuid4().hex}.yaml", uuid.uuid4().hex
        point = Point(values=values or {"optim.lr": 0.1}, config=Config().to_values(), digest=digest)
        self.lab.store.add(source, [point], list(overrides), owner=owner)
        return self.lab.store.read_ids(source, {digest})[digest]

    def read(self, id: str):
        return self.lab.store.read_experiments(id=id)[0]

    def lease(self, id: str | None = None, *, node: str = "n1") -> tuple[Attempt, str]:
        """Begin an attempt whose runner is the test."""
        attempt, token = lease(self.lab.store, self.read(id or self.add()), node=node)
        self.lab.leases.renew(attempt)
        assert self.wire("POST", "/runner/hello", {"pid": 1}, token=token).status == 200
        return attempt, token

    def send(self, token: str, content: bytes, name: str) -> dict:
        """Bring a file as a runner does, and return how it is named in a checkpoint or a result."""
        digest = hashlib.sha256(content).hexdigest()
        assert self.wire("PUT", f"/runner/files/{digest}", content, token=token).status == 200
        return {"name": name, "digest": digest, "n_bytes": len(content)}

    def append(self, token: str, name: str, data: bytes) -> Answer:
        return self.wire("PUT", f"/runner/streams/{name}?offset=0", data, token=token)

    def commit(self, token: str, files: list[dict]) -> Answer:
        return self.wire("POST", "/runner/checkpoint", {"files": files}, token=token)

    def finish(self, token: str, body: dict) -> Answer:
        return self.wire("POST", "/runner/finish", body, token=token)

    def submit(self, text: str, **given) -> Answer:
        body = {"source": f"/somewhere/{uuid.uuid4().hex}.yaml", "text": text, **given}
        return self.wire("POST", "/api/sweeps", body, token="submit")

    def routes(self) -> list[tuple[str, str, str | None]]:
        return list_routes(build_app(self.lab, token="t"))

    def take_stock(self) -> dict[str, str]:
        return {each.id: each.state for each in self.lab.store.read_experiments()}


def list_routes(app) -> list[tuple[str, str, str | None]]:
    """All that answers, also of routers and mounts that are added later: method, path, the role that it names."""
    from fastapi.routing import iter_route_contexts

    found = []
    for route in iter_route_contexts(app.routes):
        dependant = getattr(route, "dependant", None)
        role = None if dependant is None else next(_find_roles(dependant), None)
        found += [(method, route.path or "", role) for method in sorted(route.methods or {"ANY"})]
    return found


def _find_roles(dependant):
    for each in dependant.dependencies:
        if getattr(each.call, "role", None) in ROLES:
            yield each.call.role
        yield from _find_roles(each)


def fill(path: str, **values: str) -> str:
    """Put values into the places of a path; those that are not said become something that could be there."""
    usual = {"id": "e1", "name": "log.txt", "digest": "0" * 64, "action": "cancel"}
    return re.sub(r"{(\w+)(?::\w+)?}", lambda found: (usual | values).get(found[1], "x"), path)
