"""Listen at an address, and build the server that answers there."""

import dataclasses
import platform
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import uvicorn
from starlette.types import ASGIApp

from fulltilt.errors import UsageError
from fulltilt.web.patience import PatientProtocol

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WILDCARDS = ("0.0.0.0", "::")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named: every answer took 40 ms with it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(f"{host}:{port} cannot be used ({error}); give another --port or --host") from None
    listener.listen(1024)
    listener.set_inheritable(False)
    return listener


def list_hosts(host: str, names: Sequence[str] = ()) -> set[str]:
    """Return the names and addresses under which a server at ``host`` is reached, beside ``names``."""
    own = {each.address.partition("%")[0] for many in psutil.net_if_addrs().values() for each in many}
    return {*LOOPBACK, platform.node(), *names, *(own if host in WILDCARDS else {host})}


def format_url(host: str, port: int, tls: Tls | None = None, names: Sequence[str] = ()) -> str:
    """Return the URL of a server at ``host``, by the first of the ``names`` that it has besides."""
    host = next(iter(names), LOOPBACK[0] if host in WILDCARDS else host)
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


def build_settings(app: ASGIApp, tls: Tls | None, *, grace_s: int = 5, keep_alive_s: int = 5) -> uvicorn.Config:
    """Build the settings of a server.

    Args:
        grace_s: For requests that run when it ends.
        keep_alive_s: For the next request of a connection.

    Raises:
        UsageError: certificate and key cannot be used.
    """
    settings = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        timeout_keep_alive=keep_alive_s,
        ssl_certfile=tls and tls.certificate,
        ssl_keyfile=tls and tls.key,
    )
    try:
        settings.load()
    except (OSError, ValueError) as error:
        place = f"{tls.certificate} and {tls.key}" if tls else "the server's settings"
        raise UsageError(f"{place} cannot be used ({error}); give the PEM files of a certificate and its key") from None
    return settings
