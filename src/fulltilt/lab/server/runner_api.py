"""The routes of runners: each call is made for one attempt, which its token names."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, FiniteFloat
from starlette.concurrency import run_in_threadpool

from fulltilt.lab import reception
from fulltilt.lab.records import Artefact
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.server.access import Runner, get_lab
from fulltilt.lab.server.bodies import MOST_FILE_BYTES, Digest, stream_file, write_body

router = APIRouter(prefix="/runner")
MOST_STREAM_BYTES = 4 << 20  # of a log at a time
LOOK_S = 0.25

Name = Annotated[str, Field(max_length=200)]


class Hello(BaseModel):
    pid: int = Field(ge=0, lt=2**31)
    versions: dict[Name, Name] = Field(default={}, max_length=10)


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


@router.post("/hello", response_model=None)
def hello(request: Request, attempt: Runner, body: Hello) -> dict[str, Any]:
    return reception.greet(get_lab(request), attempt, pid=body.pid, versions=body.versions)


@router.post("/renew", response_model=None)
async def renew(request: Request, attempt: Runner, body: Renewal) -> dict[str, str | None]:
    """Renew the lease at once, and answer when somebody wants something of the attempt, or after ``wait_s``."""
    lab, until_s = get_lab(request), time.monotonic() + body.wait_s
    wish = await run_in_threadpool(reception.renew, lab, attempt)
    while wish is None and time.monotonic() < until_s and not request.app.state.is_closing:
        await asyncio.sleep(min(LOOK_S, until_s - time.monotonic()))
        wish = lab.wishes.get(attempt)
    return {"wish": wish}


@router.put("/streams/{name}", response_model=None, max_body_size=MOST_STREAM_BYTES)
async def append(
    request: Request, attempt: Runner, name: str, offset: Annotated[int, Query(ge=0, lt=2**62)]
) -> dict[str, int]:
    data = await request.body()
    return {"size": await run_in_threadpool(reception.append, get_lab(request), attempt, name, offset, data)}


@router.head("/files/{digest}")
def has_file(request: Request, attempt: Runner, digest: Digest) -> Response:
    return Response(status_code=200 if get_lab(request).depot.claim(digest) else 404)


@router.put("/files/{digest}", max_body_size=MOST_FILE_BYTES)
async def put_file(request: Request, attempt: Runner, digest: Digest) -> dict[str, int]:
    lab = get_lab(request)
    await run_in_threadpool(reception.require_live, lab, attempt)
    await run_in_threadpool(reception.require_room, lab, digest)
    return {"size": await write_body(request, lab.depot, digest)}


@router.get("/files/{digest}")
def get_file(request: Request, attempt: Runner, digest: Digest) -> StreamingResponse:
    lab = get_lab(request)
    reception.require_readable(lab, attempt, digest)
    if not lab.depot.has(digest):
        raise HTTPException(404, f"there is no file {digest}")
    return stream_file(lab.depot, digest)


@router.post("/checkpoint", response_model=None)
def commit_checkpoint(request: Request, attempt: Runner, body: Checkpoint) -> dict[str, Any]:
    reception.commit_checkpoint(get_lab(request), attempt, _read_files(body))
    return {}


@router.post("/finish", response_model=None)
def finish(request: Request, attempt: Runner, body: Finish) -> dict[str, str]:
    end = End(outcome=body.outcome, reason=body.reason, metrics=body.metrics)
    return {"state": reception.finish(get_lab(request), attempt, end, _read_files(body))}


def _read_files(body: Checkpoint | Finish) -> list[Artefact]:
    return [Artefact(**file.model_dump()) for file in body.files]
