"""Speak to the lab's server for one attempt: the only file of the runner that knows HTTP."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from fulltilt.errors import StorageError, UsageError
from fulltilt.lab.depot import PIECE_BYTES, Depot, write_verified
from fulltilt.lab.records import Artefact
from fulltilt.lab.runner.order import Order
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.versions import read_versions

CONNECT_S = 5.0
ANSWER_S = 30.0  # beyond what the server was asked to wait
FENCED = (401, 403, 409)  # the token is not known any more, or the attempt is over
REJECTED = (400, 413, 422)


class FencedError(Exception):
    """The server says that the attempt is not ours any more."""


class UnreachableError(Exception):
    """The server cannot be reached, or cannot answer now; that says nothing about the attempt."""


class RejectedError(UnreachableError):
    """The server does not take what was sent, and will hardly take the same later."""


def trust(authority: str | None) -> ssl.SSLContext | bool:
    """Return whom to trust: the authority of a PEM file and nobody else; None: whom the machine trusts.

    Raises:
        UsageError: it is no such file.
    """
    try:
        return True if authority is None else ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise UsageError(f"{authority} cannot be used ({error}); name the PEM file of a certificate") from None


def read_error(answer: httpx.Response) -> str:
    """Return the words in which a server refused something."""
    with contextlib.suppress(ValueError, AttributeError):
        if said := answer.json().get("error") or answer.json().get("detail"):
            return said if isinstance(said, str) else json.dumps(said)
    return f"the server answered {answer.status_code}: {answer.text[:200]}"


class Link:
    """One attempt's line to the server. Each thread has its own."""

    def __init__(self, order: Order):
        self._client = httpx.Client(
            base_url=order.url,
            headers={"Authorization": f"Bearer {order.token}"},
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            verify=trust(order.authority),
            trust_env=False,  # a proxy of the environment must not see the token
        )
        self._depot = Depot(order.depot) if order.depot else None

    def greet(self, *, pid: int) -> dict[str, Any]:
        return self._post("hello", {"pid": pid, "versions": dict(read_versions())})

    def renew(self, *, wait_s: float) -> str | None:
        """Renew the lease; the answer comes when somebody wants something of the attempt, or after ``wait_s``."""
        return self._post("renew", {"wait_s": wait_s}, timeout=wait_s + ANSWER_S)["wish"]

    def append(self, name: str, offset: int, data: bytes) -> int:
        """Append to a stream and return its size at the server."""
        with _explain():
            answer = self._client.put(f"/runner/streams/{name}", params={"offset": offset}, content=data)
        return _read(answer)["size"]

    def send(self, path: Path) -> Artefact:
        """Bring a file to the depot."""
        if self._depot is not None:
            try:
                digest = self._depot.put(path)
            except StorageError as error:
                raise UnreachableError(str(error)) from error
            return Artefact(name=path.name, digest=digest, n_bytes=path.stat().st_size)
        return self._upload(path)

    def fetch(self, digest: str, target: Path) -> None:
        """Bring a file of the depot to ``target``. Raises StorageError if it is damaged or gone."""
        if self._depot is not None:
            self._depot.get(digest, target)
            return
        with _explain(), self._client.stream("GET", f"/runner/files/{digest}") as answer:
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise StorageError(f"the server holds no file {digest}")
            if answer.is_error:
                answer.read()
                _read(answer)
            write_verified(answer.iter_bytes(PIECE_BYTES), digest, target)

    def commit_checkpoint(self, files: Sequence[Artefact]) -> None:
        self._post("checkpoint", {"files": list(map(dataclasses.asdict, files))})

    def finish(self, end: End, files: Sequence[Artefact]) -> str:
        """Say how the attempt ended and return the state of its experiment."""
        metrics = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN
            for name, value in end.metrics.items()
        }
        said = {"outcome": end.outcome, "reason": end.reason, "metrics": metrics}
        return self._post("finish", said | {"files": list(map(dataclasses.asdict, files))})["state"]

    def _upload(self, path: Path) -> Artefact:
        with path.open("rb") as stream, _explain():
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if self._client.head(f"/runner/files/{digest}").status_code != httpx.codes.OK:
                stream.seek(0)
                _read(self._client.put(f"/runner/files/{digest}", content=iter(lambda: stream.read(PIECE_BYTES), b"")))
            return Artefact(name=path.name, digest=digest, n_bytes=os.fstat(stream.fileno()).st_size)

    def _post(self, what: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        with _explain():
            return _read(self._client.post(f"/runner/{what}", json=body, **options))


def _read(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        kind = FencedError if answer.status_code in FENCED else UnreachableError
        raise (RejectedError if answer.status_code in REJECTED else kind)(read_error(answer))
    return answer.json()


@contextlib.contextmanager
def _explain() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise UnreachableError(f"{type(error).__name__}: {error}") from error
