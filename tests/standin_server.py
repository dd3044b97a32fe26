"""A server of the shape of ``fulltilt infer serve`` whose every answer a test decides; it ends with its block."""

import asyncio
import contextlib
import json
import threading
from typing import NamedTuple


class Events(NamedTuple):
    """Documents that are sent one after the other, with a pause behind each."""

    documents: list
    pause_s: float


class StandIn:
    """Answers ``POST`` by ``answer(number, body) -> (status, document)``; GET by a document a path.

    Args:
        pause_s: How long it takes for the request of that number; a worker answers one after the other.
        die_after: So many answers it gives, then it is gone.
    """

    def __init__(self, *, answer=None, pause_s=lambda number: 0.0, documents=None, die_after=None, closes=False):
        self._answer = answer or (lambda number, body: (200, {"outputs": [0], "cached": [False]}))
        self._pause_s, self._die_after, self._closes = pause_s, die_after, closes
        self._documents = {"/v1/samples": {"inputs": [[0.5, 1.5], [2.5, 3.5]]}, **(documents or {})}
        self.heads, self.bodies, self.n_connections = [], [], 0

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self._thread.start()
        assert started.wait(30)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        with contextlib.suppress(RuntimeError):  # it died by itself
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    async def _serve(self, started):
        self._loop, self._end, self._worker = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.port, self._writers = server.sockets[0].getsockname()[1], set()
        started.set()
        await self._end.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _talk(self, reader, writer):
        self.n_connections += 1
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while not self._end.is_set():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = next(
                    (int(x.split(":")[1]) for x in head.lower().split("\r\n") if x.startswith("content-l")), 0
                )
                body = await reader.readexactly(length)
                status, document = 404, {}
                if method == "POST":
                    number = len(self.bodies)
                    self.heads.append(head)
                    self.bodies.append(json.loads(body))
                    async with self._worker:
                        await asyncio.sleep(self._pause_s(number))
                    status, document = self._answer(number, self.bodies[number])
                    if self._die_after is not None and number >= self._die_after:
                        self._end.set()
                        return
                elif (name := path.partition("?")[0]) in self._documents:
                    status, document = 200, self._documents[name]
                if isinstance(document, Events):
                    kinds = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
                    writer.write(f"HTTP/1.1 {status} X\r\n{kinds}\r\n\r\n".encode())
                    for each in document.documents:
                        data = f"data: {json.dumps(each)}\n\n".encode()
                        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                        await asyncio.sleep(document.pause_s)
                    writer.write(b"0\r\n\r\n")
                    continue
                data = document if isinstance(document, bytes) else json.dumps(document).encode()
                close = "Connection: close\r\n" if self._closes else ""
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n{close}\r\n".encode() + data)
                if self._closes:
                    break
        writer.close()
