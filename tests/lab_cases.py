"""What tests of the lab share: rows and leases, a caller of the application, attempts by hand, and patience."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx

from fulltilt.config import Config
from fulltilt.lab.executors.local import GUARD, GUARD_MARK
from fulltilt.lab.lab import Lab
from fulltilt.lab.records import Attempt, Experiment, Point
from fulltilt.lab.runner.order import MARK, Order
from fulltilt.lab.store import StaleAttemptError

PATIENCE_S = 600.0  # ends what hangs
OWNER = "the owner's token"
ON_A_SLOT = {"node": "n1", "devices": ["cpu:0"], "n_threads": 1, "engine": "by hand"}
STAND_IN = (sys.executable, "-S", str(Path(__file__).parent / "unit" / "lab" / "stand_in_train.py"))


def wait_for(look, process: subprocess.Popen | None = None, told=lambda: ""):
    """What ``look`` returns, as soon as it is something. A process that it needs must live as long."""
    end = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert process is None or process.poll() is None, "it ended before"
        assert time.monotonic() < end, told()
        time.sleep(0.05)
    return found


def build_points(n: int, name: str = "d") -> list[Point]:
    config = Config().to_values()
    return [Point(values={"optim.lr": i}, config=config, digest=f"{name}{i}") for i in range(n)]


def lease(store, experiment: Experiment, **place) -> tuple[Attempt, str]:
    """Begin the next attempt of a queued experiment → the attempt, and its token."""
    (found,) = store.lease_all([(experiment, ON_A_SLOT | place)])
    if found is None:
        raise StaleAttemptError
    return found


def ask(app, method: str, path: str, *, cookies: dict | None = None, **options) -> httpx.Response:
    """Send a request to an application, as a client on this machine does."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000", cookies=cookies) as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


class Clock:
    """Stands still until a test moves it."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A served lab without executors, and guards that a test starts by hand."""

    def __init__(self, lab: Lab, url: str, root: Path):
        self.lab, self.url, self.root = lab, url, root
        lab.store.add(root / "grid.yaml", [Point(values={}, config=Config().to_values(), digest="d")], [])

    def read(self) -> Experiment:
        return self.lab.store.read_experiments(id="e1")[0]

    def read_log(self, number: int) -> list[str]:
        return (self.lab.folder / "e1" / f"log-{number}.txt").read_text().splitlines()

    def start(self, *, id="e1", root: Path | None = None, command=STAND_IN, with_worker: bool = False, **environment):
        (found,) = self.lab.store.read_experiments(id=id)
        attempt, token = lease(self.lab.store, found)
        mark, root = f"{attempt.experiment}/{attempt.number}/{token[:8]}", root or self.root / "node"
        order = Order(url=self.url, token=token, mark=mark, node="n1", root=str(root), command=command)
        alone = {} if with_worker else {"STAND_IN_ALONE": "1"}
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment, **alone}
        environ |= {**order.to_environment(), GUARD_MARK: order.mark}
        guard = subprocess.Popen(GUARD, env=environ, start_new_session=True)
        return guard, f"{MARK}={order.mark}"
