"""Build the application of a service: the HTTP contract, who may use it, health, metrics and the page."""

import base64
import contextlib
import hmac
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from fulltilt.infer.serve.page import render_page
from fulltilt.infer.serve.service import GONE, Service
from fulltilt.infer.serve.wire import UNFIT, read_deadline_s, read_samples, write_samples
from fulltilt.records import encode
from fulltilt.web.assets import answer_asset
from fulltilt.web.gate import Gate
from fulltilt.web.listening import LOOPBACK

MOST_BODY_BYTES = 16 << 20
TOO_LARGE = {"error": f"the body is beyond {MOST_BODY_BYTES >> 20} MiB; send fewer samples in a request"}
LARGE_BYTES = 1 << 18  # a body beyond it is read in a thread, so that others are answered meanwhile
MOST_TOLD = 1 << 20  # numbers in the samples that are offered, 20 MB of JSON
MOST_OPEN = 2000  # requests whose bodies are held at a time
HOW = {"WWW-Authenticate": 'Basic realm="fulltilt: the token is the password"'}
OPEN_PATHS = ("/healthz", "/readyz")
STATIC = Path(__file__).parent / "static"

router = APIRouter()


def find_service(request: Request) -> Service:
    return request.app.state.service


Served = Annotated[Service, Depends(find_service)]


def build_app(service: Service, *, token: str | None = None, hosts: Iterable[str] = LOOPBACK) -> FastAPI:
    """Build the application.

    Args:
        token: What clients have to show; None: nothing, for a server that only this machine reaches.
        hosts: Names under which the server is reached.
    """
    nothing: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))
    app = FastAPI(title="fulltilt infer", **nothing)
    app.state.service = service
    app.router.add_route("/v1/predict", predict, methods=["POST"])  # FastAPI's own way costs 0.1 ms more
    app.include_router(router)
    if service.manifest.writes_text:
        from fulltilt.infer.generate.endpoint import build_router, open_text_service

        app.include_router(build_router(open_text_service(service.artefact, service.word_table), service))
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(ClientDisconnect, lambda request, error: Response(status_code=GONE))
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MOST_BODY_BYTES)
    app.add_middleware(Door, token=token)
    app.add_middleware(Gate, hosts=frozenset(host.lower() for host in hosts))
    return app


async def predict(request: Request) -> Response:
    service, began_s = find_service(request), time.monotonic()
    service.n_open += 1
    try:
        answer = JSONResponse(await _predict(service, request, began_s))
    except HTTPException as error:
        answer = await _refuse(request, error)
    except ClientDisconnect:
        answer = Response(status_code=GONE)
    finally:
        service.n_open -= 1
    service.figures.note_request(answer.status_code, time.monotonic() - began_s)
    if service.is_draining:
        answer.headers["Connection"] = "close"
    return answer


async def _predict(service: Service, request: Request, began_s: float) -> dict[str, Any]:
    if service.is_draining:
        raise service.build_refusal(503, "the service is draining; come again later")
    if service.n_open > MOST_OPEN:
        raise service.build_refusal(429, f"{MOST_OPEN:,} requests are open already; come again later")
    deadline_s = read_deadline_s(request, service.settings.deadline_s, began_s)
    body = await request.body()
    given = (body, service.manifest, service.word_table, service.settings.n_waiting)
    samples = await run_in_threadpool(read_samples, *given) if len(body) > LARGE_BYTES else read_samples(*given)
    found = await service.answer(samples, deadline_s=deadline_s, is_gone=request.is_disconnected)
    answered = []
    for n, (outputs, _) in enumerate(found):
        if isinstance(outputs, Exception):
            raise HTTPException(500, f"inputs[{n}]: {outputs}")
        answered.append(outputs)
    return {"outputs": write_samples(answered), "cached": [source in ("memory", "disk") for _, source in found]}


@router.get("/v1/manifest")
async def read_manifest(service: Served) -> JSONResponse:
    return JSONResponse(encode(service.manifest) | {"notes": list(service.notes)})


@router.get("/v1/samples")
async def read_some_samples(service: Served, n: Annotated[int, Query(ge=1, le=256)] = 1) -> JSONResponse:
    size = max(sum(array.size for array in sample) for sample in service.samples)
    return JSONResponse({"inputs": write_samples(service.samples[: min(n, max(1, MOST_TOLD // size))])})


@router.get("/healthz")
async def read_health() -> JSONResponse:
    return JSONResponse({"status": "ok", "process": os.getpid()})  # of several replicas each has its own


@router.get("/readyz")
async def read_readiness(service: Served) -> JSONResponse:
    status, said = (503, "draining") if service.is_draining else (200, "ready")
    return JSONResponse({"status": said}, status)


@router.get("/metrics")
async def read_metrics(service: Served) -> Response:
    return Response(generate_latest(service.figures.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/")
def show_page(service: Served) -> Response:
    return Response(render_page(service), media_type="text/html")


@router.get("/static/{name:path}")
def read_asset(name: str) -> Response:
    return answer_asset(name, own=STATIC)


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):  # what is wrong, but not repeated: NaN is there, and half a character
        said = "; ".join(": ".join([*map(str, each["loc"][1:]), each["msg"]]) for each in error.errors())
        return JSONResponse({"error": said.encode(errors="replace").decode()}, UNFIT)
    assert isinstance(error, HTTPException)
    is_large = error.status_code == 413 and error.detail == "Content Too Large"  # as Starlette has it
    return JSONResponse(TOO_LARGE if is_large else {"error": error.detail}, error.status_code, error.headers)


class Door:
    """Asks for the token, and refuses bodies that say they are too large."""

    def __init__(self, app: ASGIApp, *, token: str | None):
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if int(headers.get(b"content-length", 0)) > MOST_BODY_BYTES:
                answer = JSONResponse(TOO_LARGE, 413)
            if self._token and scope["path"] not in OPEN_PATHS and not _is_token(headers, self._token):
                answer = JSONResponse({"error": "a token is needed: Authorization: Bearer …"}, 401, HOW)
        await answer(scope, receive, send)


def _is_token(headers: dict[bytes, bytes], token: str) -> bool:
    """Say whether the token is given: by programs as a bearer, by browsers as a password."""
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"basic":
        with contextlib.suppress(ValueError):
            value = base64.b64decode(value).partition(b":")[2]
    return hmac.compare_digest(value.strip(), token.encode())
