"""A server that answers in a few milliseconds and once stands still for a second: ``-m … SERVICE_S STALL_AT_S``.

It prints its port; its clock starts with the first request. It ends when stdin does.
"""

from __future__ import annotations

import asyncio
import sys

STALL_S = 1.0
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"outputs":[0]}'


class Stalling:
    """One worker that answers requests one after the other."""

    def __init__(self, service_s: float, stall_at_s: float):
        self._service_s, self._stall_at_s = service_s, stall_at_s
        self._worker, self._begin_s, self._has_stalled = asyncio.Lock(), 0.0, False

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                async with self._worker:
                    await asyncio.sleep(self._choose_pause_s())
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.close()

    def _choose_pause_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        self._begin_s = self._begin_s or now_s
        if not self._has_stalled and now_s - self._begin_s >= self._stall_at_s:
            self._has_stalled = True
            return STALL_S
        return self._service_s


async def main(service_s: float, stall_at_s: float) -> None:
    server = await asyncio.start_server(Stalling(service_s, stall_at_s).talk, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(*map(float, sys.argv[1:])))
