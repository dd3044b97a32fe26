"""Build the application of a service: the HTTP contract, who may use it, health, metrics and the page."""

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fulltilt.infer.serve.page import render_page
from fulltilt.infer.serve.service import GONE, Service
from fulltilt.infer.serve.wire import STATUS, UNFIT, read_deadline_s, read_samples, write_samples
from fulltilt.records import encode
from fulltilt.web.assets import answer_asset
from fulltilt.web.gate import Door, Gate
from fulltilt.web.listening import LOOPBACK

MOST_BODY_BYTES, MOST_BODY_S = 16 << 20, 60.0  # until its last byte: who stalls takes the room of others
SILENCE_S = 1.0  # in which nothing of a body came: a server that drains waits no longer
TOO_LARGE = f"the body is beyond {MOST_BODY_BYTES >> 20} MiB; send fewer samples in a request"
DRAINS = "the service is draining; come again later"
LARGE_BYTES = 1 << 18  # a body beyond it is read in a thread, so that others are answered meanwhile
MOST_TOLD = 1 << 20  # numbers in the samples that are offered, 20 MB of JSON
MOST_OPEN, MOST_HELD_BYTES = 2000, 256 << 20  # requests that are open at a time, and their bodies
OPEN_PATHS, COUNTED_PATHS = ("/healthz", "/readyz"), ("/v1/predict", "/v1/generate")
STATIC, CLOSE = Path(__file__).parent / "static", {"Connection": "close"}

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
    app = FastAPI(title="fulltilt infer", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.router.add_route("/v1/predict", predict, methods=["POST"])  # FastAPI's own way costs 0.1 ms more
    app.include_router(router)
    if service.manifest.writes_text:
        from fulltilt.infer.generate.endpoint import build_router, open_text_service

        app.include_router(build_router(open_text_service(service.artefact, service.word_table), service.settings))
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(ClientDisconnect, lambda request, error: Response(status_code=GONE))
    app.add_middleware(Counter, service=service)
    app.add_middleware(Door, token=token, open_paths=OPEN_PATHS)
    app.add_middleware(Gate, hosts=frozenset(host.lower() for host in hosts))
    return app


async def predict(request: Request) -> Response:
    service = find_service(request)
    deadline_s = read_deadline_s(request, service.settings.deadline_s)
    body = await request.body()
    given = (body, service.manifest, service.word_table, service.settings.n_waiting)
    samples = await run_in_threadpool(read_samples, *given) if len(body) > LARGE_BYTES else read_samples(*given)
    found = await service.answer(samples, deadline_s=deadline_s, is_gone=request.is_disconnected)
    answered = []
    for n, (outputs, _) in enumerate(found):
        if isinstance(outputs, Exception):
            raise HTTPException(500, f"inputs[{n}]: {outputs}")
        answered.append(outputs)
    cached = [source in ("memory", "disk") for _, source in found]
    return JSONResponse({"outputs": write_samples(answered), "cached": cached})


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
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


class Counter:
    """Counts requests to predict and generate until their answers have ended, and bounds their number and bodies."""

    def __init__(self, app: ASGIApp, *, service: Service):
        self._app, self._service, self._n_bytes = app, service, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in COUNTED_PATHS:
            await self._app(scope, receive, send)
            return
        service, began_s, status, n_bytes = self._service, time.monotonic(), GONE, 0
        now_s = asyncio.get_running_loop().time
        end_s: float | None = now_s() + MOST_BODY_S

        async def take() -> Message:
            nonlocal n_bytes, end_s
            try:
                async with asyncio.timeout_at(end_s and min(end_s, now_s() + SILENCE_S)):
                    message = await receive()
            except TimeoutError:
                if service.is_draining:
                    raise service.build_refusal(503, DRAINS) from None
                if end_s and now_s() >= end_s:
                    raise HTTPException(408, f"the body took over {MOST_BODY_S:g} s; send it faster", CLOSE) from None
                return await take()
            end_s = end_s if message.get("more_body") else None
            n_bytes += (n_more := len(message.get("body", b"")))
            self._n_bytes += n_more
            if n_bytes > MOST_BODY_BYTES:
                raise HTTPException(413, TOO_LARGE, CLOSE)
            if n_more and self._n_bytes > MOST_HELD_BYTES:
                raise service.build_refusal(429, f"bodies of {MOST_HELD_BYTES >> 20} MiB are held; come again later")
            return message

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                scope[STATUS] = message["status"]
                message["headers"] += [(b"connection", b"close")] * service.is_draining
            elif not message.get("more_body"):
                status = scope[STATUS]
            await send(message)

        refusal = None
        if service.is_draining:
            refusal = service.build_refusal(503, DRAINS)
        elif service.n_open >= MOST_OPEN:
            refusal = service.build_refusal(429, f"{MOST_OPEN:,} requests are open already; come again later")
        elif int(dict(scope["headers"]).get(b"content-length", 0)) > MOST_BODY_BYTES:
            refusal = HTTPException(413, TOO_LARGE)
        answer = self._app if refusal is None else await _refuse(Request(scope), refusal)
        service.n_open += 1
        try:
            await answer(scope, take, tell)
        except Exception:
            status = 500  # it is answered outside
            raise
        finally:
            service.n_open -= 1
            self._n_bytes -= n_bytes
            service.figures.note_request(status, time.monotonic() - began_s)
