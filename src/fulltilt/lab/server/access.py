"""Decide who may do what: every route has a role, and no other site makes a request.

A route says its role by ``Depends(allow("read"))``; a test refuses one that does not. A browser has the token in a
cookie that no other site can send along; everything else sends it in the Authorization header.
"""

import collections
import hmac
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from starlette.concurrency import run_in_threadpool

from fulltilt.lab.lab import Lab
from fulltilt.lab.records import Attempt, Token

COOKIE = "fulltilt_lab"
ROLES = {"read": ("read", "submit", "admin"), "submit": ("submit", "admin"), "admin": ("admin",)}
ROLES |= {"join": ("join", "worker", "admin"), "worker": ("worker",), "runner": ("runner",), "anyone": ()}
UNKNOWN = "the token is not known, or has expired; fulltilt lab token create makes one on the server"
MOST_FAILURES, PAUSE_S = 10, 60.0  # wrong tokens typed into the page in so many seconds, from one address
MOST_ADDRESSES = 1000  # whose guesses are remembered


def allow(role: str) -> Callable[..., Token | None]:
    """Return the dependency of a route that needs ``role``; ``anyone`` needs no token."""

    def check(request: Request) -> Token | None:
        if role == "anyone":
            return None
        token = read_token(request)
        if token is None:
            raise HTTPException(401, "a token is needed: Authorization: Bearer …", {"WWW-Authenticate": "Bearer"})
        found = find_token(request, token)
        if found is None:
            raise HTTPException(401, UNKNOWN, {"WWW-Authenticate": "Bearer"})
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


def read_most(request: Request) -> int | None:
    """Return how many devices the largest machine has; None: it is not known, since nothing is served."""
    rooms = request.app.state.read_rooms()
    return None if rooms is None else max((room.n_devices for room in rooms), default=0)


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
    token, store = read_token(request) or "", get_lab(request).store
    found = store.known.get(token) or await run_in_threadpool(store.find_attempt, token)
    if found is None:
        raise HTTPException(401, "the token is no attempt's", {"WWW-Authenticate": "Bearer"})
    store.remember(token, found)
    return found


find_attempt.role = "runner"  # type: ignore[attr-defined]
Runner = Annotated[Attempt, Depends(find_attempt)]


def read_token(request: Request) -> str | None:
    """Return the token that a request shows."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return request.cookies.get(COOKIE)
