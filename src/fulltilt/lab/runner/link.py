"""Speak to the lab's server for one attempt: the only file of the runner that knows HTTP."""

import contextlib
import hashlib
import os
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from fulltilt.errors import StorageError
from fulltilt.lab.depot import PIECE_BYTES, Depot, write_verified
from fulltilt.lab.records import Artefact
from fulltilt.lab.runner.order import Order
from fulltilt.lab.scheduling.ends import End

CONNECT_S = 5.0
ANSWER_S = 30.0  # beyond what the server was asked to wait
FENCED = 409
NO_ROOM = 507


class FencedError(Exception):
    """The server says that the attempt is not ours any more."""


class UnreachableError(Exception):
    """The server cannot be reached, or cannot answer now; that says nothing about the attempt."""


def trust(authority: str | None) -> ssl.SSLContext | bool:
    """Return whom to trust: the authority of a PEM file and nobody else; None: whom the machine trusts."""
    return True if authority is None else ssl.create_default_context(cafile=authority)


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

    def close(self) -> None:
        self._client.close()

    def greet(self, *, node: str, pid: int) -> dict[str, Any]:
        return self._post("hello", {"node": node, "pid": pid})

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
            answer.raise_for_status()
            write_verified(answer.iter_bytes(PIECE_BYTES), digest, target)

    def commit_checkpoint(self, files: Sequence[Artefact]) -> None:
        self._post("checkpoint", {"files": _list(files)})

    def finish(self, end: End, files: Sequence[Artefact]) -> str:
        """Say how the attempt ended and return the state of its experiment."""
        said = {"outcome": end.outcome, "reason": end.reason, "metrics": dict(end.metrics), "files": _list(files)}
        return self._post("finish", said)["state"]

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


def _list(files: Sequence[Artefact]) -> list[dict[str, Any]]:
    return [{"name": file.name, "digest": file.digest, "n_bytes": file.n_bytes} for file in files]


def _read(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code == FENCED:
        raise FencedError(answer.json().get("error", ""))
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise FencedError("the token is not known any more")
    if answer.is_error:
        raise UnreachableError(f"the server answered {answer.status_code}: {answer.text[:200]}")
    return answer.json()


@contextlib.contextmanager
def _explain() -> Iterator[None]:
    try:
        yield
    except (httpx.TransportError, httpx.HTTPStatusError) as error:
        raise UnreachableError(f"{type(error).__name__}: {error}") from error
