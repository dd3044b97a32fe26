"""A client of HTTP/1.1 that costs little: prepared bytes out, a status and a length in, connections kept open.

A request takes 45 µs of this process, as with plain asyncio streams; one of httpx2 takes 550 µs, which a server on the
same cores would feel.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from ssl import SSLContext

from fulltilt.infer.load.outcome import BROKEN

MAX_CONNECTIONS = 400  # select takes 1,024 files
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)


class Exchange:
    """One request and what became of it; ``on_done`` takes its status and how many samples came from a cache."""

    def __init__(self, request: bytes, on_done: Callable[[int, int], None]):
        self.request = request
        self._on_done: Callable[[int, int], None] | None = on_done
        self.connection: Connection | None = None

    def finish(self, status: int, n_cached: int = 0) -> None:
        """Tell what became of it, once."""
        tell, self._on_done = self._on_done, None
        if tell is not None:
            tell(status, n_cached)

    def give_up(self, status: int) -> None:
        self.finish(status)
        if self.connection is not None:
            self.connection.abort()

    @property
    def is_over(self) -> bool:
        return self._on_done is None


class Connection(asyncio.Protocol):
    """Sends one request at a time."""

    def __init__(self, client: "Client"):
        self._client = client
        self._exchange: Exchange | None = None
        self._answer = b""
        self._end: int | None = None  # of the answer, once its head is read
        self._n_sent = 0
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, exchange: Exchange) -> None:
        self._exchange, self._answer, self._end = exchange, b"", None
        self._n_sent += 1
        exchange.connection = self
        self._transport.write(exchange.request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if self._end is None:
            head = self._answer.find(b"\r\n\r\n")
            if head < 0:
                return
            found = LENGTH.search(self._answer, 0, head + 2)
            self._end = head + 4 + int(found[1]) if found else -1
        is_whole = len(self._answer) >= self._end if self._end >= 0 else self._answer.endswith(b"0\r\n\r\n")
        if is_whole and self._exchange is not None:
            self._finish(self._exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.is_over:
            if self._n_sent > 1 and not self._answer:  # it was idle, and the server closed it as this was sent
                self._client.send(exchange)
            else:
                exchange.finish(BROKEN)
        self._client.release(self)

    def abort(self) -> None:
        self._transport.abort()

    def _finish(self, exchange: Exchange) -> None:
        status, where = self._answer[9:12], self._answer.rfind(b'"cached"')
        self._exchange = exchange.connection = None
        n_cached = self._answer.count(b"true", where) if where > 0 else 0
        exchange.finish(int(status) if status.isdigit() else BROKEN, n_cached)
        if b"connection: close" in self._answer[:1000].lower():
            self.abort()
        else:
            self._client.release(self)


class Client:
    """Sends requests over as many connections as are needed at once; what is beyond 400 waits for one."""

    def __init__(self, host: str, port: int, context: SSLContext | None = None):
        self._address = (host, port)
        self._context = context
        self._idle: list[Connection] = []
        self._waiting: deque[Exchange] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._n_connections = 0

    def send(self, exchange: Exchange) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                connection.send(exchange)
                return
        self._waiting.append(exchange)
        self._open_another()

    def release(self, connection: Connection) -> None:
        """Take a connection back that is free, or gone."""
        if not connection.is_open:
            self._n_connections -= 1
            if self._waiting:
                self._open_another()
        elif exchange := self._next_waiting():
            connection.send(exchange)
        else:
            self._idle.append(connection)

    def _open_another(self) -> None:
        if self._n_connections < MAX_CONNECTIONS:
            self._n_connections += 1
            task = asyncio.get_running_loop().create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: Connection(self), *self._address, ssl=self._context)
        except OSError:
            self._n_connections -= 1
            if exchange := self._next_waiting():
                exchange.finish(BROKEN)
            return
        self.release(connection)

    def _next_waiting(self) -> Exchange | None:
        while self._waiting:
            exchange = self._waiting.popleft()
            if not exchange.is_over:
                return exchange
        return None
