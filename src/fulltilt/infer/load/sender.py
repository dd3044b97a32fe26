"""Send requests in an open loop, in a process that does nothing else: ``python -m fulltilt.infer.load.sender``.

All arrival times are drawn before the first request is sent, and nothing that the server does delays the next one. The
plan comes as a line of JSON on stdin. The process answers with a line of JSON now and then: the rows of requests that
have ended since the last, and of all that are open. Nobody waits for it: the clock of a response starts when it was
due, and how late the process itself was is in its row.
"""

import asyncio
import gc
import itertools
import json
import selectors
import ssl
import sys
from array import array
from collections.abc import Awaitable
from typing import Any

from fulltilt.infer.load.arrivals import plan_arrivals
from fulltilt.infer.load.outcome import BROKEN, CUT_OFF, N_COLUMNS, OPEN, TIMED_OUT
from fulltilt.web.client import Client, Received

TELL_EVERY_S = 0.2
MAX_TOLD = 500  # open requests, the oldest: telling costs time
GONE_S, GONE_N = 1.5, 3  # without any answer, all connections broken: the server is gone
IN_FLIGHT = {"server": sys.maxsize, "single": 1, "multi": 1, "offline": 64}


class Sender:
    """Sends the requests of a plan and keeps a row of each."""

    def __init__(self, plan: dict[str, Any]):
        self._plan = plan
        self._client = Client(plan["host"], plan["port"], ssl.create_default_context() if plan["is_tls"] else None)
        self._slots = asyncio.Semaphore(IN_FLIGHT[plan["scenario"]])
        self._rows = array("d")
        self._open: dict[int, tuple[float, float]] = {}
        self._n_broken, self._heard_s = 0, 0.0
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()

    async def send_all(self) -> None:
        """Send every request when it is due, and wait for the last answer."""
        plan, requests = self._plan, [request.encode() for request in self._plan["requests"]]
        arrivals_s = plan_arrivals(plan["scenario"], plan["n_requests"], plan["requests_per_s"], seed=plan["seed"])
        self._begin_s = self._loop.time()
        async with asyncio.TaskGroup() as tasks:
            for number, arrival_s in enumerate(arrivals_s):
                await self._slots.acquire()
                due_s = arrival_s if arrival_s and plan["scenario"] == "server" else self._now_s()
                if due_s > plan["seconds"]:
                    break
                if due_s > self._now_s():
                    await asyncio.sleep(due_s - self._now_s())
                self._open[number] = due_s, self._now_s()
                tasks.create_task(self._receive(number, self._client.send(requests[number % len(requests)])))
        self.write("schedule")

    async def tell(self) -> None:
        """Tell the parent now and then what is over, until the server is gone."""
        while self._n_broken < GONE_N or self._now_s() - self._heard_s < GONE_S:
            await asyncio.sleep(TELL_EVERY_S)
            self.write()
        self.write("the server was gone")

    def write(self, ended: str | None = None) -> None:
        now_s, still = self._now_s(), array("d")
        for due_s, handled_s in itertools.islice(self._open.values(), None if ended else MAX_TOLD):
            still.extend((due_s, handled_s, now_s, OPEN, 0, 0, 0))
        if len(still) < N_COLUMNS * len(self._open):
            still[-5] = still[-7]  # as if it had just come, so that nothing behind it counts
        # as bytes: a thousand rows in JSON are 5 ms in which no request is sent
        rows, self._rows = {"rows": self._rows.tobytes().hex(), "open": still.tobytes().hex()}, array("d")
        print(json.dumps(rows | {"now_s": now_s, "ended": ended}), flush=True)

    async def _receive(self, number: int, answer: Awaitable[Received]) -> None:
        due_s, handled_s = self._open[number]
        try:
            async with asyncio.timeout_at(self._begin_s + due_s + self._plan["timeout_s"]):
                received = await answer
        except TimeoutError:
            received = Received(TIMED_OUT, b"", 0.0)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            received = Received(BROKEN, b"", 0.0)
        now_s, (status, *counted) = self._now_s(), count_answer(received)
        del self._open[number]
        self._rows.extend((due_s, handled_s, now_s, status, *counted, max(0.0, received.first_s - self._begin_s)))
        self._n_broken, self._heard_s = (self._n_broken + 1, self._heard_s) if status == BROKEN else (0, now_s)
        self._slots.release()

    def _now_s(self) -> float:
        return self._loop.time() - self._begin_s


def count_answer(received: Received) -> tuple[int, int, int]:
    """Return the status, the samples that came from a cache, and the words that were written."""
    status, body, first_s = received
    if first_s:
        return CUT_OFF if b'data: {"error"' in body else status, 0, body.count(b'data: {"token"')
    where = body.rfind(b'"cached"')
    return status, body.count(b"true", where) if where > 0 else 0, 0


async def run(plan: dict[str, Any]) -> None:
    """Run a plan until all of it is sent and answered, or the server is gone."""
    sender = Sender(plan)
    tasks = [asyncio.create_task(sender.send_all()), asyncio.create_task(sender.tell())]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await next(iter(done))  # raises what went wrong in it


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    gc.freeze()
    gc.disable()  # nothing that is allocated here is a cycle that matters; a collection would delay requests
    # select wakes to the microsecond, the default epoll to the next millisecond
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(run(plan))


if __name__ == "__main__":
    main()
