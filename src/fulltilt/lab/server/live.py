"""Tell browsers that something changed, by server-sent events; what changed they ask for."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from fulltilt.lab.server.access import Reader, get_lab

router = APIRouter()
LOOK_S = 0.5
ALIVE_S = 15.0  # between signs of life, so that proxies and browsers keep the line
MOST_LISTENERS = 200


def read_mark(request: Request, experiment: str | None = None) -> str:
    """Return what changes whenever the lab does, or one experiment of it. A page is told from its mark on."""
    store = get_lab(request).store
    if experiment is None:
        newest = store.read_last_event()
    else:
        newest = max((event.seq for event in store.read_events(experiment=experiment)), default=0)
    return f"{newest}.{request.app.state.n_priorities}"


@router.get("/live")
async def listen(
    request: Request,
    token: Reader,
    after: str = "",
    experiment: Annotated[str | None, Query(pattern=r"^e\d{1,9}$")] = None,
) -> StreamingResponse:
    if request.app.state.n_listeners >= MOST_LISTENERS:
        raise HTTPException(503, f"{MOST_LISTENERS} pages are open already; close some")
    seen = request.headers.get("last-event-id") or after  # a browser that lost the line says what it heard last
    told = _tell(request, seen, experiment)
    return StreamingResponse(told, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _tell(request: Request, seen: str, experiment: str | None = None) -> AsyncIterator[bytes]:
    if request.app.state.n_listeners >= MOST_LISTENERS:  # many came at once
        yield b"retry: 60000\n\n"
        return
    request.app.state.n_listeners += 1
    try:
        quiet_s = 0.0
        yield b"retry: 2000\n\n"
        while not request.app.state.is_closing:
            newest = await run_in_threadpool(read_mark, request, experiment)
            if newest != seen:
                seen, quiet_s = newest, 0.0
                yield f"event: change\nid: {newest}\ndata: {newest}\n\n".encode()
            elif (quiet_s := quiet_s + LOOK_S) >= ALIVE_S:
                quiet_s = 0.0
                yield b": still here\n\n"
            await asyncio.sleep(LOOK_S)
    finally:
        request.app.state.n_listeners -= 1
