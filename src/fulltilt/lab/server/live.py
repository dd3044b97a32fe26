"""Tell browsers that something changed, by server-sent events; what changed they ask for."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from fulltilt.lab.lab import Lab
from fulltilt.lab.records import Token
from fulltilt.lab.server.access import allow

router = APIRouter()
LOOK_S = 0.5
ALIVE_S = 15.0  # between signs of life, so that proxies and browsers keep the line
MOST_LISTENERS = 200


@router.get("/live")
async def listen(request: Request, token: Annotated[Token, Depends(allow("read"))]) -> StreamingResponse:
    if request.app.state.n_listeners >= MOST_LISTENERS:
        raise HTTPException(503, f"{MOST_LISTENERS} pages are open already; close some")
    return StreamingResponse(_tell(request), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _tell(request: Request) -> AsyncIterator[bytes]:
    lab: Lab = request.app.state.lab
    if request.app.state.n_listeners >= MOST_LISTENERS:  # many came at once
        yield b"retry: 60000\n\n"
        return
    request.app.state.n_listeners += 1
    try:
        seen, quiet_s = await run_in_threadpool(lab.store.read_last_event), 0.0
        yield b"retry: 2000\n\n"
        while not request.app.state.is_closing:
            await asyncio.sleep(LOOK_S)
            newest = await run_in_threadpool(lab.store.read_last_event)
            if newest != seen:
                seen, quiet_s = newest, 0.0
                yield f"event: change\nid: {newest}\ndata: {newest}\n\n".encode()
            elif (quiet_s := quiet_s + LOOK_S) >= ALIVE_S:
                quiet_s = 0.0
                yield b": still here\n\n"
    finally:
        request.app.state.n_listeners -= 1
