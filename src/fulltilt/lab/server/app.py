"""Build the application of a lab: its routes, who may use them, and how errors are answered."""

import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from fulltilt.errors import FulltiltError, StorageError, UsageError
from fulltilt.hardware.sampler import Sampler
from fulltilt.lab.lab import Lab
from fulltilt.lab.reception import FencedError
from fulltilt.lab.scheduling.order import Room
from fulltilt.lab.server import api, live, metrics, pages, runner_api, worker_api
from fulltilt.lab.server.access import Guesses
from fulltilt.lab.server.bodies import MOST_BODY_BYTES
from fulltilt.lab.store import StaleAttemptError
from fulltilt.web.gate import Gate
from fulltilt.web.listening import LOOPBACK

MOST_PROBLEMS, MOST_SAID = 10, 2000  # problems, characters


def build_app(
    lab: Lab,
    *,
    token: str,
    hosts: Iterable[str] = LOOPBACK,
    read_rooms: Callable[[], Sequence[Room] | None] = lambda: None,
    sampler: Sampler | None = None,
    invite: Callable[[], dict[str, str]] | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        token: Of the lab's owner; others are in the store.
        hosts: Names under which the server is reached.
        read_rooms: Returns the machines there are, for the check of what is submitted and waits; None: it is not known.
        sampler: Reads this machine, for the page of machines.
        invite: Returns what another machine needs to join the cluster; None: there is none.
    """
    nothing: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))
    app = FastAPI(title="fulltilt lab", max_body_size=MOST_BODY_BYTES, **nothing)
    app.state.lab, app.state.token, app.state.read_rooms, app.state.is_closing = lab, token, read_rooms, False
    app.state.sampler, app.state.here, app.state.invite = sampler, platform.node(), invite
    app.state.guesses, app.state.n_listeners, app.state.n_priorities = Guesses(), 0, 0
    for part in (runner_api, api, pages, live, metrics, worker_api):  # the most frequent calls come first
        app.include_router(part.router)
    for kind, status in ((FencedError, 409), (StaleAttemptError, 409), (UsageError, 422), (StorageError, 507)):
        app.add_exception_handler(kind, _build_handler(status))
    app.add_exception_handler(ClientDisconnect, _build_handler(400))  # a runner was killed: that is no fault here
    app.add_exception_handler(HTTPException, _answer_refusal)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_middleware(Gate, hosts=frozenset(host.lower() for host in hosts))
    app.add_middleware(metrics.Watch, lab=lab)
    return app


def _build_handler(status: int) -> Callable[[Request, Exception], JSONResponse]:
    def handle(request: Request, error: Exception) -> JSONResponse:
        remedy = error.remedy if isinstance(error, FulltiltError) else None
        return JSONResponse({"error": str(error), "remedy": remedy}, status)

    return handle


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """Say what is wrong with a request, and nothing of what it held, which may be a secret."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:MOST_PROBLEMS]]
    return JSONResponse({"error": "; ".join(problems).encode(errors="replace").decode()[:MOST_SAID]}, 422)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    """Lead a browser without a token to where it can give one."""
    assert isinstance(error, HTTPException)
    is_page = request.method == "GET" and not request.url.path.startswith(("/api/", "/runner/", "/live"))
    if error.status_code == 401 and is_page and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("/login", 303)
    return await http_exception_handler(request, error)
