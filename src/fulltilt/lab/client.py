"""Speak to a lab, over HTTP where it is served, else to the same application in this process."""

import asyncio
import contextlib
import getpass
import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from fulltilt._version import __version__
from fulltilt.errors import RunFolderError, UsageError
from fulltilt.lab.coordinator import Coordinator
from fulltilt.lab.executors.local import LocalExecutor
from fulltilt.lab.lab import RUNNER_LOGS
from fulltilt.lab.runner.link import read_error, trust
from fulltilt.lab.runner.order import Order
from fulltilt.lab.server.app import build_app
from fulltilt.lab.serving import ADDRESS, Address, find_server, open_lab
from fulltilt.lab.snapshot import find_root, pack_code
from fulltilt.records import VERSION
from fulltilt.records.run_folder import hold_folder

N_TRIES, RETRY_S = 100, 0.1
TIMEOUT = httpx.Timeout(60.0, connect=5.0)


class NoAnswerError(UsageError):
    """The server of a lab does not answer."""


class Client:
    """One lab, as its commands see it. Errors of the lab are raised as UsageError, with its words."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None, address: Address):
        self._transport, self._address = transport, address

    @property
    def is_served(self) -> bool:
        """Whether a server is there, and not this process alone."""
        return self._transport is None

    def get(self, path: str, **params: Any) -> Any:
        return self._call("GET", path, params=params).json()

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, json=body or {}).json()

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path).json()

    def read(self, path: str, **params: Any) -> bytes:
        return self._call("GET", path, params=params).content

    def submit(
        self, source: Path, overrides: Sequence[str], *, priority: int = 0, retry: bool = False
    ) -> dict[str, Any]:
        """Send a configuration and the code beside it → ids, how many are new or run again, the grid's axes."""
        source = source.resolve()
        root = find_root(source)
        archive = pack_code(root, source)
        digest = hashlib.sha256(archive).hexdigest()
        if self._call("HEAD", f"/api/files/{digest}", is_checked=False).status_code != httpx.codes.OK:
            self._call("PUT", f"/api/files/{digest}", content=archive)
        code = {"digest": digest, "root": str(root), "entry": str(source.relative_to(root))}
        body = {"source": str(source), "text": source.read_text(), "overrides": list(overrides), "code": code}
        return self.post("/api/sweeps", body | {"owner": _read_user(), "priority": priority, "retry": retry})

    def _call(self, method: str, path: str, *, is_checked: bool = True, **options: Any) -> httpx.Response:
        try:
            answer = asyncio.run(self._send(method, path, **options))
        except httpx.TransportError as error:
            raise NoAnswerError(
                f"the lab at {self._address.url} does not answer ({error}); is its server running?"
            ) from None
        if is_checked and answer.is_error:
            raise UsageError(read_error(answer))
        return answer

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._address.token}"}
        async with httpx.AsyncClient(
            transport=self._transport,
            base_url=self._address.url,
            headers=headers,
            timeout=TIMEOUT,
            trust_env=False,
            verify=trust(self._address.authority),
        ) as client:
            return await client.request(method, path, **options)


@contextlib.contextmanager
def connect(folder: Path, *, address: Address | None = None) -> Iterator[Client]:
    """Connect to the lab at an address, or to the one in a folder, served or not.

    Raises:
        UsageError: there is no lab, or it does not answer.
    """
    with contextlib.ExitStack() as stack:
        if address is None and folder.exists():
            address = _hold_or_find(folder, stack)
        if address is not None:
            client = Client(None, address)
            _check_version(client, address)
            yield client
            return
        lab = stack.enter_context(open_lab(folder))
        here = LocalExecutor("cpu", logs=lab.folder / RUNNER_LOGS)
        coordinator = Coordinator(lab, [here], Order)
        coordinator.is_draining = True  # nothing starts without a server
        coordinator.knows_depot = False  # only a server is told where it is
        coordinator.turn()  # what ran under a server that is gone is settled first
        token = "of this process"
        app = build_app(lab, token=token)
        yield Client(httpx.ASGITransport(app), Address(url="http://localhost", token=token))


def _check_version(client: Client, address: Address) -> None:
    """Refuse a server whose documents have another version: what is in them would be misread."""
    found = client.get("/api/status")
    if found["version"] != VERSION:
        raise UsageError(
            f"the lab at {address.url} speaks version {found['version']} (fulltilt {found['fulltilt']}), and this is "
            f"version {VERSION} (fulltilt {__version__}); install the same fulltilt on both"
        )


def _hold_or_find(folder: Path, stack: contextlib.ExitStack) -> Address | None:
    """Hold a lab's folder for the length of ``stack``, or return where its server is."""
    for _ in range(N_TRIES):
        try:
            stack.enter_context(hold_folder(folder))
        except RunFolderError:  # a server, or another command for a moment
            if (address := find_server(folder)) is not None:
                return address
            time.sleep(RETRY_S)
        else:
            (folder / ADDRESS).unlink(missing_ok=True)  # of a server that was killed
            return None
    raise UsageError(f"{folder} is in use, and its server says nowhere how it is reached; try again in a moment")


def _read_user() -> str:
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return ""
