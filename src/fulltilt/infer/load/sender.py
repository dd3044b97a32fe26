"""Send requests in an open loop, in a process that does nothing else: ``python -m fulltilt.infer.load.sender``.

All arrival times are drawn before the first request is sent, and nothing that the server does delays the next one. The
plan comes as a line of JSON on stdin; the process stops when stdin ends. It answers with a line of JSON now and then:
the rows of requests that are over, and since when one is open. Nobody waits for it: the clock of a response starts when
it was due, and how late the process itself was is in its row.
"""

import asyncio
import gc
import json
import selectors
import ssl
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from fulltilt.infer.load.arrivals import plan_arrivals
from fulltilt.infer.load.client import Client, Exchange
from fulltilt.infer.load.outcome import BROKEN, OPEN, TIMED_OUT

TELL_EVERY_S = 0.2
GONE_S, GONE_N = 1.5, 3  # without any answer, all connections broken: the server is gone
IN_FLIGHT = {"single": 1, "multi": 1, "offline": 64}


class Sender:
    """Sends the requests of a plan and keeps a row of each."""

    def __init__(self, client: Client, requests: Sequence[bytes], timeout_s: float, in_flight: int | None):
        self._client, self._requests, self._timeout_s = client, requests, timeout_s
        self._slots = asyncio.Semaphore(in_flight) if in_flight else None
        self._rows = array("d")
        self._open: dict[int, tuple[float, float, Exchange]] = {}  # in the order they were due
        self._broken_since_s: float | None = None
        self._n_broken = 0
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()
        self.ended: str | None = None

    async def run(self, arrivals_s: Sequence[float | None], until_s: float) -> None:
        """Send every request when it is due, and end the load when the last is over."""
        try:
            await self._send_in_turn(arrivals_s, until_s)
        finally:
            self.ended = self.ended or "schedule"

    async def _send_in_turn(self, arrivals_s: Sequence[float | None], until_s: float) -> None:
        self._begin_s = self._loop.time()
        for number, arrival_s in enumerate(arrivals_s):
            if self._slots is not None:
                await self._slots.acquire()
            due_s = self._now_s() if self._slots is not None or arrival_s is None else arrival_s
            if due_s > self._now_s():
                await asyncio.sleep(due_s - self._now_s())
            if due_s > until_s or self.ended is not None:
                break
            self._send(number, due_s)
        while self._open and self.ended is None:
            await asyncio.sleep(TELL_EVERY_S / 4)

    async def tell(self) -> None:
        """Tell the parent what is over, until the end, and give up what takes too long."""
        while self.ended is None:
            await asyncio.sleep(TELL_EVERY_S)
            now_s = self._now_s()
            for due_s, _, exchange in list(self._open.values()):
                if now_s - due_s < self._timeout_s:
                    break
                exchange.give_up(TIMED_OUT)
            if self._broken_since_s is not None and self._n_broken >= GONE_N and now_s - self._broken_since_s > GONE_S:
                self.ended = "the server was gone"
            self.write()

    def write(self, *, is_last: bool = False) -> None:
        rows, self._rows = self._rows, array("d")
        now_s = self._now_s()
        if is_last:
            for due_s, handled_s, _ in self._open.values():
                rows.extend((due_s, handled_s, now_s, OPEN, 0))
        oldest_s = next((due_s for due_s, *_ in self._open.values()), now_s)
        # as bytes: a thousand rows in JSON are 5 ms in which no request is sent
        print(json.dumps({"rows": rows.tobytes().hex(), "known_until_s": oldest_s, "now_s": now_s}), flush=True)

    def _send(self, number: int, due_s: float) -> None:
        handled_s = self._now_s()

        def take(status: int, n_cached: int) -> None:
            now_s = self._now_s()
            del self._open[number]
            self._rows.extend((due_s, handled_s, now_s, status, n_cached))
            is_broken = status == BROKEN
            self._broken_since_s = (self._broken_since_s or now_s) if is_broken else None
            self._n_broken = self._n_broken + 1 if is_broken else 0
            if self._slots is not None:
                self._slots.release()

        exchange = Exchange(self._requests[number % len(self._requests)], take)
        self._open[number] = (due_s, handled_s, exchange)
        self._client.send(exchange)

    def _now_s(self) -> float:
        return self._loop.time() - self._begin_s


async def send_all(plan: dict[str, Any]) -> str:
    """Run a plan to its end, or to that of stdin, and return how it ended."""
    context = ssl.create_default_context() if plan["is_tls"] else None
    requests = [(plan["head"] + f"Content-Length: {len(body)}\r\n\r\n" + body).encode() for body in plan["bodies"]]
    scenario = plan["scenario"]
    arrivals_s = plan_arrivals(scenario, plan["n_requests"], plan["requests_per_s"], seed=plan["seed"])
    client = Client(plan["host"], plan["port"], context)
    sender = Sender(client, requests, plan["timeout_s"], IN_FLIGHT.get(scenario))

    def stop() -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin)
        sender.ended = sender.ended or "stopped"

    asyncio.get_running_loop().add_reader(sys.stdin, stop)
    telling = asyncio.create_task(sender.tell())
    sending = asyncio.create_task(sender.run(arrivals_s, plan["seconds"]))
    await telling  # until anything has ended the load
    sender.write(is_last=True)
    if sending.done():
        sending.result()
    sending.cancel()
    return sender.ended or ""


def main() -> int:
    plan = json.loads(sys.stdin.readline())
    gc.freeze()
    gc.disable()  # nothing that is allocated here is a cycle that matters; a collection would delay requests
    # select wakes to the microsecond, the default epoll to the next millisecond
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        ended = runner.run(send_all(plan))
    print(json.dumps({"ended": ended}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
