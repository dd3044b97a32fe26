"""Guard a server that browsers reach: its names, no request that another site made, and the owner's token."""

import base64
import contextlib
import hmac
import re
import secrets
import stat
from collections.abc import Collection
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fulltilt.errors import UsageError
from fulltilt.records.run_folder import write_atomic

TOKEN_FILE = "token"
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]@/]*))(?::\d*)?", re.ASCII)
SAFE_METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # without any, a browser says of our own forms that they come from nowhere
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HOW = {"WWW-Authenticate": 'Basic realm="fulltilt: the token is the password"'}
_ENCODED = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


def read_or_make_token(folder: Path) -> str:
    """Return the owner's token, from a file that only they can read. The first call makes it.

    Raises:
        UsageError: others can read it too.
    """
    path = folder / TOKEN_FILE
    path.touch(mode=0o600)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UsageError(f"{path} has mode {mode:o}, so others can read it; remove it, and another token is made")
    if token := path.read_text().strip():
        return token
    token = secrets.token_urlsafe(24)
    write_atomic(path, token + "\n")
    return token


class Gate:
    """Refuses what a browser sends for another site, or to another name, before any route is looked up.

    Args:
        hosts: Names under which the server is reached, lower case, without ports.
    """

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._find_refusal(scope)
        if refusal is not None:
            await _answer(send, *refusal)
            return

        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_ENCODED]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        found = HOST.fullmatch(host := headers.get("host", "").lower())
        if found is None or (found[1] or found[2]) not in self._hosts:
            return 421, f"this server is not {host!r}; add the name with --allow-host"
        if scope["method"] in SAFE_METHODS:
            return None
        site = headers.get("sec-fetch-site")
        if site not in (None, "same-origin", "none"):
            return 403, "another site made this request"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != headers["host"].lower():
            return 403, f"the request comes from {origin!r}"
        return None


class Door:
    """Asks for the token.

    Args:
        token: What clients have to show; None: nothing.
        open_paths: Where it is not asked for.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, open_paths: Collection[str]):
        self._app, self._token, self._open_paths = app, token, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, is_open = self._app, scope["type"] != "http" or scope["path"] in self._open_paths
        if self._token and not is_open and not _is_token(dict(scope["headers"]), self._token):
            answer = JSONResponse({"error": "a token is needed: Authorization: Bearer …"}, 401, HOW)
        await answer(scope, receive, send)


def _is_token(headers: dict[bytes, bytes], token: str) -> bool:
    """Say whether the token is given: by programs as a bearer, by browsers as a password."""
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"basic":
        with contextlib.suppress(ValueError):
            value = base64.b64decode(value).partition(b":")[2]
    return hmac.compare_digest(value.strip(), token.encode())


async def _answer(send: Send, status: int, text: str) -> None:
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *_ENCODED]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
