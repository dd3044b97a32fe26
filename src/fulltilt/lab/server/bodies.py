"""Read the bodies of requests as they arrive, within limits, and never whole where they may be large."""

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import quote

from fastapi import Path, Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from fulltilt.lab.depot import Depot

MOST_FILE_BYTES = 64 << 30
MOST_BODY_BYTES = 4 << 20  # where a route says nothing else
SENT_BYTES = 1 << 18  # at a time: so much is held for each reader that is slow
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]


async def write_body(request: Request, depot: Depot, digest: str) -> int:
    """Store the body in the depot under its digest, and return its size in bytes.

    A thread is held for each piece only: forty slow senders must not keep the leases from being renewed.
    """
    n_bytes = 0
    async with contextmanager_in_threadpool(depot.receive(digest)) as take:
        async for piece in request.stream():
            n_bytes += len(piece)
            await run_in_threadpool(take, piece)
    return n_bytes


def stream_file(depot: Depot, digest: str, *, name: str | None = None) -> StreamingResponse:
    """Answer with a stored file, by pieces; with a name no browser opens it as a page."""
    stream = depot.open(digest)
    headers = {"Content-Length": str(depot.measure(digest))}
    headers |= {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}"} if name else {}

    def read() -> Iterator[bytes]:
        with stream:  # also where the client goes away
            yield from iter(lambda: stream.read(SENT_BYTES), b"")

    return StreamingResponse(
        read(), media_type="application/octet-stream", headers=headers, background=BackgroundTask(stream.close)
    )
