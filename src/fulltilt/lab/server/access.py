"""Decide who may do what: every route has a role, and no other site makes a request.

A route says its role by ``Depends(allow("read"))``; a test refuses one that does not. A browser has the token in a
cookie that no other site can send along; everything else sends it in the Authorization header.
"""

import collections
import hmac
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from fulltilt.errors import UsageError
from fulltilt.lab.lab import Lab
from fulltilt.lab.records import Attempt, Token
from fulltilt.records.run_folder import write_atomic

COOKIE = "fulltilt_lab"
ROLES = {"read": ("read", "submit", "admin"), "submit": ("submit", "admin"), "admin": ("admin",)}
ROLES |= {"join": ("join", "worker", "admin"), "worker": ("worker",), "runner": ("runner",), "anyone": ()}
TOKEN_FILE = "token"
MOST_FAILURES, PAUSE_S = 10, 60.0  # wrong tokens typed into the page in so many seconds, from one address
MOST_ADDRESSES = 1000  # whose guesses are remembered
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
_ENCODED = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


def read_or_make_token(lab: Path) -> str:
    """Return the token of the lab's owner, from a file that only they can read. The first call makes it.

    Raises:
        UsageError: others can read it too.
    """
    path = lab / TOKEN_FILE
    path.touch(mode=0o600)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UsageError(f"{path} has mode {mode:o}, so others can read it; remove it, and the lab gets another token")
    if token := path.read_text().strip():
        return token
    token = secrets.token_urlsafe(24)
    write_atomic(path, token + "\n")
    return token


def allow(role: str) -> Callable[..., Token | None]:
    """Return the dependency of a route that needs ``role``; ``anyone`` needs no token."""

    def check(request: Request) -> Token | None:
        if role == "anyone":
            return None
        token = _read_token(request)
        if token is None:
            raise HTTPException(401, "a token is needed: Authorization: Bearer …", {"WWW-Authenticate": "Bearer"})
        found = find_token(request, token)
        if found is None:
            raise HTTPException(401, "the token is not known, or has expired", {"WWW-Authenticate": "Bearer"})
        if found.role not in ROLES[role]:
            raise HTTPException(403, f"a token for {found.role!r} may not do this; it takes one for {role!r}")
        return found

    check.role = role  # type: ignore[attr-defined]
    return check


Reader = Annotated[Token, Depends(allow("read"))]
Submitter = Annotated[Token, Depends(allow("submit"))]
Owner = Annotated[Token, Depends(allow("admin"))]


def get_lab(request: Request) -> Lab:
    return request.app.state.lab


def find_token(request: Request, token: str) -> Token | None:
    """Return what a token allows; None: it is not known."""
    if hmac.compare_digest(token.encode(), request.app.state.token.encode()):
        return Token(role="admin", label="owner")
    return get_lab(request).store.find_token(token)


class Guesses:
    """Counts wrong tokens of each address, and asks for a pause when there are many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._failed_s = clock, dict[str, collections.deque[float]]()

    def may_try(self, address: str) -> bool:
        failed_s = self._failed_s.get(address)
        return failed_s is None or len(failed_s) < MOST_FAILURES or self._clock() - failed_s[0] > PAUSE_S

    def note_failure(self, address: str) -> None:
        failed_s = self._failed_s.pop(address, None) or collections.deque(maxlen=MOST_FAILURES)
        failed_s.append(self._clock())
        self._failed_s[address] = failed_s  # the last one now
        while len(self._failed_s) > MOST_ADDRESSES:
            del self._failed_s[next(iter(self._failed_s))]


async def find_attempt(request: Request) -> Attempt:
    """Return the attempt whose runner asks. Raises HTTPException where the token is nobody's."""
    token, store = _read_token(request) or "", get_lab(request).store
    found = store.known.get(token) or await run_in_threadpool(store.find_attempt, token)
    if found is None:
        raise HTTPException(401, "the token is no attempt's", {"WWW-Authenticate": "Bearer"})
    store.remember(token, found)
    return found


find_attempt.role = "runner"  # type: ignore[attr-defined]
Runner = Annotated[Attempt, Depends(find_attempt)]


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


def _read_token(request: Request) -> str | None:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return request.cookies.get(COOKIE)


async def _answer(send: Send, status: int, text: str) -> None:
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *_ENCODED]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
