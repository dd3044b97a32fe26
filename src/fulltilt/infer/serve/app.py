"""Build the application of a service: the HTTP contract, who may use it, health, metrics and the page."""

import base64
import hmac
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from fulltilt.infer.generate import may_write_text
from fulltilt.infer.serve.batcher import FullError
from fulltilt.infer.serve.crew import LateError
from fulltilt.infer.serve.page import render_page
from fulltilt.infer.serve.service import GoneError, Service, TooManyError
from fulltilt.infer.serve.wire import MalformedError, UnfitError, read_samples, write_samples
from fulltilt.records import encode
from fulltilt.web.assets import answer_asset
from fulltilt.web.gate import Gate
from fulltilt.web.listening import LOOPBACK

MOST_BODY_BYTES = 16 << 20
LARGE_BYTES = 1 << 18  # a body beyond it is read in a thread, so that others are answered meanwhile
MOST_OPEN = 2000  # requests whose bodies are held at a time
GONE = 499  # what logs know of a client that went away; nobody reads it
OPEN_PATHS = ("/healthz", "/readyz")
STATIC = Path(__file__).parent / "static"
Reply = tuple[int, dict[str, Any], dict[str, str]]


def build_app(service: Service, *, token: str | None = None, hosts: Iterable[str] = LOOPBACK) -> FastAPI:
    """Build the application.

    Args:
        token: What clients have to show; None: nothing, for a server that only this machine reaches.
        hosts: Names under which the server is reached.
    """
    nothing: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))
    app = FastAPI(title="fulltilt infer", max_body_size=MOST_BODY_BYTES, **nothing)

    async def predict(request: Request) -> Response:
        began_s = time.monotonic()
        service.n_open += 1
        try:
            status, document, headers = await _predict(service, request, began_s)
        finally:
            service.n_open -= 1
        service.figures.note_request(status, time.monotonic() - began_s)
        if service.is_draining:
            headers["Connection"] = "close"
        return Response(json.dumps(document, ensure_ascii=False), status, headers, "application/json")

    app.router.add_route("/v1/predict", predict, methods=["POST"])  # FastAPI's own way costs 0.1 ms more

    if service.folder is not None and may_write_text(service.manifest):
        from fulltilt.infer.generate.endpoint import build_router, find_text_service

        text = find_text_service(service.folder, service.manifest)
        if text is not None:
            app.include_router(build_router(text, service))

    @app.get("/v1/manifest")
    async def read_manifest() -> JSONResponse:
        return JSONResponse(encode(service.manifest) | {"notes": list(service.notes)})

    @app.get("/v1/samples")
    async def read_some_samples(n: Annotated[int, Query(ge=1, le=256)] = 1) -> JSONResponse:
        return JSONResponse({"inputs": write_samples(service.samples[:n])})

    @app.get("/healthz")
    async def read_health() -> JSONResponse:
        return JSONResponse({"status": "ok", "process": os.getpid()})  # of several replicas each has its own

    @app.get("/readyz")
    async def read_readiness() -> JSONResponse:
        if service.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "draining" if service.is_draining else "not ready"}, 503)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(generate_latest(service.figures.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    def show_page() -> Response:
        return Response(render_page(service), media_type="text/html")

    @app.get("/static/{name:path}")
    def read_asset(name: str) -> Response:
        return answer_asset(name, own=STATIC)

    app.add_exception_handler(HTTPException, _answer_refusal)
    if token is not None:
        app.add_middleware(Door, token=token)
    app.add_middleware(Gate, hosts=frozenset(host.lower() for host in hosts))
    return app


async def _predict(service: Service, request: Request, began_s: float) -> Reply:
    """Answer a request → status, document, headers."""
    if not service.is_ready:
        return _refuse(503, f"the service is {'draining' if service.is_draining else 'not ready'}", retry_s=1)
    if service.n_open > MOST_OPEN:
        return _refuse(429, f"{MOST_OPEN:,} requests are open already", retry_s=service.compute_retry_s())
    try:
        deadline_s = _read_deadline_s(request, service, began_s)
        body = await request.body()
        given = (body, service.manifest, service.word_table)
        read = run_in_threadpool(read_samples, *given) if len(body) > LARGE_BYTES else None
        samples = read_samples(*given) if read is None else await read
        found = await service.answer(samples, deadline_s=deadline_s, is_gone=request.is_disconnected)
    except MalformedError as error:
        return _refuse(400, str(error))
    except TooManyError as error:
        return _refuse(413, str(error))
    except HTTPException as error:
        return _refuse(error.status_code, f"the body is beyond {MOST_BODY_BYTES >> 20} MiB; send fewer samples")
    except UnfitError as error:
        return _refuse(422, str(error))
    except FullError:
        return _refuse(429, f"{service.crew.n_waiting} samples wait already", retry_s=service.compute_retry_s())
    except LateError:
        return _refuse(504, "the deadline passed before the model began")
    except (GoneError, ClientDisconnect):
        return _refuse(GONE, "the client went away")
    for n, (outputs, _) in enumerate(found):
        if isinstance(outputs, LateError):
            return _refuse(504, "the deadline passed before the model began")
        if isinstance(outputs, Exception):
            return _refuse(500, f"inputs[{n}]: {outputs}")
    outputs = write_samples([outputs for outputs, _ in found if not isinstance(outputs, Exception)])
    return 200, {"outputs": outputs, "cached": [source in ("memory", "disk") for _, source in found]}, {}


def _read_deadline_s(request: Request, service: Service, began_s: float) -> float | None:
    given = request.headers.get("x-deadline-ms")
    if given is None:
        seconds = service.settings.deadline_s
    else:
        try:
            seconds = int(given) / 1000
        except ValueError:
            raise MalformedError(f"X-Deadline-Ms {given!r} is no whole number of milliseconds") from None
    return None if seconds is None else began_s + seconds


def _refuse(status: int, said: str, *, retry_s: int | None = None) -> Reply:
    return status, {"error": said}, {} if retry_s is None else {"Retry-After": str(retry_s)}


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


class Door:
    """Asks for the token, which programs send as a bearer, and browsers as a password."""

    def __init__(self, app: ASGIApp, *, token: str):
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(_read_token(given), self._token):
                headers = {"WWW-Authenticate": 'Basic realm="fulltilt: the token is the password"'}
                said = {"error": "a token is needed: Authorization: Bearer …"}
                await JSONResponse(said, 401, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _read_token(given: bytes) -> bytes:
    kind, _, value = given.partition(b" ")
    if kind.lower() != b"basic":
        return value.strip()
    try:
        return base64.b64decode(value).partition(b":")[2]
    except ValueError:
        return b""
