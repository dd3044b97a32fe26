"""The routes of runners: each call is made for one attempt, which its token names."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, FiniteFloat
from starlette.concurrency import run_in_threadpool

from fulltilt.lab import reception
from fulltilt.lab.lab import Lab
from fulltilt.lab.records import Artefact
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.server.access import Runner
from fulltilt.lab.server.bodies import MOST_FILE_BYTES, Digest, stream_file, write_body

router = APIRouter(prefix="/runner")
MOST_STREAM_BYTES = 4 << 20  # of a log at a time
LOOK_S = 0.25


Name = Annotated[str, Field(max_length=200)]


class Hello(BaseModel):
    node: str = Field(max_length=200)
    pid: int = Field(ge=0, lt=2**31)


class Renewal(BaseModel):
    wait_s: float = Field(ge=0, le=60)


class File(BaseModel):
    name: str = Field(max_length=200)
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    n_bytes: int = Field(ge=0, lt=2**62)


class Checkpoint(BaseModel):
    files: list[File] = Field(max_length=20)


class Finish(BaseModel):
    outcome: str = Field(pattern="^(succeeded|user_error|oom|lost|preempted|infra_refused)$")
    reason: str | None = Field(default=None, max_length=4000)
    metrics: dict[Name, FiniteFloat | None] = Field(default_factory=dict, max_length=1000)
    files: list[File] = Field(default_factory=list, max_length=1000)


@router.post("/hello")
def hello(request: Request, attempt: Runner, body: Hello) -> dict[str, Any]:
    return reception.greet(_get_lab(request), attempt, node=body.node, pid=body.pid)


@router.post("/renew")
async def renew(request: Request, attempt: Runner, body: Renewal) -> dict[str, str | None]:
    """Renew the lease at once, and answer when somebody wants something of the attempt, or after ``wait_s``."""
    lab, until_s = _get_lab(request), time.monotonic() + body.wait_s
    wish = await run_in_threadpool(reception.renew, lab, attempt)
    while wish is None and time.monotonic() < until_s and not request.app.state.is_closing:
        await asyncio.sleep(min(LOOK_S, until_s - time.monotonic()))
        wish = lab.wishes.get(attempt)
    return {"wish": wish}


@router.put("/streams/{name}", max_body_size=MOST_STREAM_BYTES)
async def append(
    request: Request, attempt: Runner, name: str, offset: Annotated[int, Query(ge=0, lt=2**62)]
) -> dict[str, int]:
    data = await request.body()
    return {"size": await run_in_threadpool(reception.append, _get_lab(request), attempt, name, offset, data)}


@router.head("/files/{digest}")
def has_file(request: Request, attempt: Runner, digest: Digest) -> Response:
    return Response(status_code=200 if _get_lab(request).depot.claim(digest) else 404)


@router.put("/files/{digest}", max_body_size=MOST_FILE_BYTES)
async def put_file(request: Request, attempt: Runner, digest: Digest) -> dict[str, int]:
    lab = _get_lab(request)
    await run_in_threadpool(reception.require_live, lab, attempt)
    await run_in_threadpool(reception.require_room, lab, digest)
    return {"size": await write_body(request, lab.depot, digest)}


@router.get("/files/{digest}")
def get_file(request: Request, attempt: Runner, digest: Digest) -> StreamingResponse:
    lab = _get_lab(request)
    reception.require_readable(lab, attempt, digest)
    if not lab.depot.has(digest):
        raise HTTPException(404, f"there is no file {digest}")
    return stream_file(lab.depot, digest)


@router.post("/checkpoint")
def commit_checkpoint(request: Request, attempt: Runner, body: Checkpoint) -> dict[str, Any]:
    reception.commit_checkpoint(_get_lab(request), attempt, [_read_file(file) for file in body.files])
    return {}


@router.post("/finish")
def finish(request: Request, attempt: Runner, body: Finish) -> dict[str, str]:
    end = End(outcome=body.outcome, reason=body.reason, metrics=body.metrics)
    files = [_read_file(file) for file in body.files]
    return {"state": reception.finish(_get_lab(request), attempt, end, files)}


def _read_file(file: File) -> Artefact:
    return Artefact(name=file.name, digest=file.digest, n_bytes=file.n_bytes)


def _get_lab(request: Request) -> Lab:
    return request.app.state.lab
