"""Read the bodies of requests as they arrive, within limits, and never whole where they may be large."""

import asyncio
import queue
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import quote

from fastapi import HTTPException, Path, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from fulltilt.lab.depot import PIECE_BYTES, Depot

MOST_FILE_BYTES = 64 << 30
MOST_BODY_BYTES = 4 << 20  # where a route says nothing else
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
PIECES_AHEAD = 4  # between the network and the disk


async def write_body(request: Request, depot: Depot, digest: str) -> int:
    """Store the body in the depot under its digest, and return its size in bytes."""
    pieces: queue.Queue[bytes | BaseException] = queue.Queue(PIECES_AHEAD)

    def take() -> Iterator[bytes]:
        while piece := pieces.get():
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    writing = asyncio.ensure_future(run_in_threadpool(depot.put_pieces, take(), digest))
    try:
        async for piece in request.stream():
            while piece and not writing.done():
                try:
                    pieces.put_nowait(piece)
                    break
                except queue.Full:
                    await asyncio.sleep(0.005)
    except (ClientDisconnect, HTTPException) as error:
        if not writing.done():
            await run_in_threadpool(pieces.put, error)
            await asyncio.wait([writing])
        raise
    if not writing.done():
        await run_in_threadpool(pieces.put, b"")
    return await writing


def stream_file(depot: Depot, digest: str, *, name: str | None = None) -> StreamingResponse:
    """Answer with a stored file, a piece at a time; with a name as an attachment, which no browser opens as a page."""
    stream = depot.open(digest)
    headers = {"Content-Length": str(depot.measure(digest))}
    headers |= {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}"} if name else {}

    def read() -> Iterator[bytes]:
        with stream:  # also where the client goes away
            yield from iter(lambda: stream.read(PIECE_BYTES), b"")

    return StreamingResponse(
        read(), media_type="application/octet-stream", headers=headers, background=BackgroundTask(stream.close)
    )
