"""How fast the lab's queue is: a large grid, claims and ends, a list of 100,000, and decisions for 1,000 machines."""

from __future__ import annotations

import contextlib
import queue
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx2 as httpx

from benchmarks._runner import Context, Findings
from benchmarks._schema import build_arm, judge
from fulltilt.config import Config
from fulltilt.lab.records import Experiment, Point
from fulltilt.lab.scheduling.order import Room, plan_starts
from fulltilt.lab.serving import open_lab, serve

CLAIM = "The lab's queue takes a grid of 10,000 points in 2 s, and claims and ends 300 experiments a second."
NEEDS_PEERS = False
DEVICES = ("cpu",)

N_AXIS = 100  # values of each of the two axes of the grid
N_CLIENTS, N_ENDED = 8, 480
N_ROWS, N_PAGES = 100_000, 200
N_MACHINES, N_GPUS, N_QUEUED, N_OWNERS = 1000, 8, 1_000_000, 20
WINDOW = 8064  # queued experiments of an owner that a decision looks at: all devices, and 64 more
CALL = "request"
CONFIG = Config().to_values()


def run(context: Context) -> Findings:
    scale = 20 if context.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        grid_s, again_s, n_added = measure_grid(Path(folder) / "grid", n_axis=N_AXIS // scale, n=2 if scale > 1 else 7)
        rate, calls_s = measure_ends(Path(folder) / "ends", n=N_ENDED // scale)
        opened_s, pages_s = measure_pages(Path(folder) / "rows", n=N_ROWS // scale, n_pages=N_PAGES // scale)
    decision = simulate(n_queued=N_QUEUED // scale, n_machines=N_MACHINES // scale)
    arms = (
        build_arm(grid_s, case="10,000 points", arm="submit", metric="seconds", unit_of_replication="lab"),
        build_arm(again_s, case="10,000 points", arm="submit again", metric="seconds", unit_of_replication="lab"),
        build_arm(calls_s, case="8 clients", arm="hello and finish", metric="seconds", unit_of_replication=CALL),
        build_arm(pages_s, case="100,000 experiments", arm="queue page", metric="seconds", unit_of_replication=CALL),
        build_arm(opened_s, case="100,000 experiments", arm="start", metric="seconds", unit_of_replication="start"),
        build_arm(
            decision.seconds, case="1,000 machines of 8 GPUs, a million queued", arm="decision", metric="seconds",
            unit_of_replication="decision",
        ),
    )  # fmt: skip
    targets = (
        judge("10,000 points committed, s", arms[0].median, arms[0].ci95, at_most=2.0),
        judge("experiments that a second submission adds", float(n_added), None, at_most=0.0),
        judge("claimed and ended a second", rate, None, at_least=300.0),
        judge("p99 of a runner's call, s", percentile(calls_s, 0.99), None, at_most=0.1),
        judge("p95 of the page of the queue, s", percentile(pages_s, 0.95), None, at_most=0.15),
        judge("start with 100,000 experiments, s", arms[4].median, arms[4].ci95, at_most=5.0),
        judge(
            "longest wait of an owner with nothing running, decisions", float(decision.longest_wait), None, at_most=1.0
        ),
    )
    notes = (
        f"a decision for {N_MACHINES:,} machines starts up to {N_MACHINES * N_GPUS:,} experiments of {N_QUEUED:,}",
        f"it looks at the first {WINDOW:,} of each of {N_OWNERS} owners; experiments of 8 GPUs waited "
        f"{decision.wait_of_large:.1f} decisions in the mean, those of one {decision.wait_of_small:.1f}",
    )
    return Findings(arms=arms, targets=targets, notes=notes)


def measure_grid(folder: Path, *, n_axis: int, n: int) -> tuple[list[float], list[float], int]:
    """Submit a grid to new labs over HTTP, twice each → seconds, seconds again, rows that the second one added."""
    rates = [round(1e-4 * (k + 1), 6) for k in range(n_axis)]
    text = f"model: small_cnn\ndataset: digits\nlr: {rates}\nbatch_size: {list(range(1, n_axis + 1))}\n"
    seconds, again, n_added = [], [], 0
    for number in range(n):
        with serve_lab(folder / str(number)) as (lab, _, client):
            body = {"source": "/grid.yaml", "text": text}
            for kept in (seconds, again):
                started = time.perf_counter()
                client.post("/api/sweeps", json=body).raise_for_status()
                kept.append(time.perf_counter() - started)
                n_added = sum(lab.store.count_states().values()) - n_axis**2
    return seconds, again, n_added


def measure_ends(folder: Path, *, n: int) -> tuple[float, list[float]]:
    """Claim experiments as the scheduler does, and have eight clients begin and end them → a second, each call."""
    calls_s: list[float] = []
    tokens: queue.Queue[str | None] = queue.Queue(N_CLIENTS)
    with serve_lab(folder) as (lab, address, _):
        lab.store.add("/grid.yaml", build_points(n), [])
        waiting = lab.store.read_experiments()

        def work() -> None:
            with httpx.Client(base_url=address.url, timeout=60.0, trust_env=False) as client:
                while token := tokens.get():
                    headers = {"Authorization": f"Bearer {token}"}
                    for what, body in (("hello", {"node": "n1", "pid": 1}), ("finish", {"outcome": "succeeded"})):
                        started = time.perf_counter()
                        client.post(f"/runner/{what}", json=body, headers=headers).raise_for_status()
                        calls_s.append(time.perf_counter() - started)

        threads = [threading.Thread(target=work) for _ in range(N_CLIENTS)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for experiment in waiting:
            tokens.put(lab.store.lease(experiment, node="n1", devices=["d"], n_threads=None, engine="none")[1])
        for _ in threads:
            tokens.put(None)
        for thread in threads:
            thread.join()
        rate = n / (time.perf_counter() - began)
        assert lab.store.count_states() == {"succeeded": n}
    return rate, calls_s


def measure_pages(folder: Path, *, n: int, n_pages: int) -> tuple[list[float], list[float]]:
    """Start a server on a long queue, and ask for its first pages → seconds to start, seconds of each page."""
    folder.mkdir(parents=True)
    with open_lab(folder, create=True) as lab:
        lab.store.add("/grid.yaml", build_points(n), [])
    opened, pages = [], []
    for _ in range(5):
        started = time.perf_counter()
        with serve_lab(folder) as (_, _, client):
            client.get("/healthz").raise_for_status()
            opened.append(time.perf_counter() - started)
            for number in range(n_pages // 5):
                started = time.perf_counter()
                client.get("/queue", params={"offset": 100 * number}).raise_for_status()
                pages.append(time.perf_counter() - started)
    return opened, pages


class Simulation:
    """What a simulated cluster showed: each decision's seconds, and how long who waited."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.longest_wait, self.wait_of_large, self.wait_of_small = 0, 0.0, 0.0


def simulate(*, n_queued: int, n_machines: int, n_turns: int = 40) -> Simulation:
    """Decide turn after turn for a simulated cluster whose experiments end at random: nobody may starve."""
    generator, found = random.Random(0), Simulation()
    lines: dict[str, list[Experiment]] = {f"owner{k}": [] for k in range(N_OWNERS)}
    for number in range(n_queued):
        owner = f"owner{int(N_OWNERS * generator.random() ** 3)}"  # a few submit most
        size = generator.choices((1, 2, 4, 8), (80, 10, 6, 4))[0]
        lines[owner].append(build_row(number, owner, size))
    free = {f"m{k}": [f"gpu{n}" for n in range(N_GPUS)] for k in range(n_machines)}
    running: list[tuple[str, Experiment, tuple[str, ...]]] = []
    waits = Counter[str]()
    sizes: dict[int, list[int]] = {1: [], 8: []}
    for turn in range(n_turns):
        rooms = [Room(node=node, free=devices, n_devices=N_GPUS) for node, devices in free.items()]
        heads = [each for line in lines.values() for each in line[:WINDOW]]
        used = Counter[str]()
        for _, each, _ in running:
            used[each.owner] += each.n_devices
        started = time.perf_counter()
        starts = plan_starts(heads, rooms, in_use=used)
        found.seconds.append(time.perf_counter() - started)
        begun = {start.experiment.id for start in starts}
        for start in starts:
            free[start.node] = [device for device in free[start.node] if device not in start.devices]
            running.append((start.node, start.experiment, tuple(start.devices)))
            if start.experiment.n_devices in sizes:
                sizes[start.experiment.n_devices].append(turn)
        for owner, line in lines.items():
            lines[owner] = [each for each in line[:WINDOW] if each.id not in begun] + line[WINDOW:]
            has_begun = any(start.experiment.owner == owner for start in starts)
            is_served = has_begun or not line or not starts or used[owner] > 0
            waits[owner] = 0 if is_served else waits[owner] + 1
        found.longest_wait = max(found.longest_wait, *waits.values())
        generator.shuffle(running)
        for node, _, devices in running[: len(running) // 10]:
            free[node] += devices
        running = running[len(running) // 10 :]
    found.wait_of_large, found.wait_of_small = (sum(turns) / max(1, len(turns)) for turns in (sizes[8], sizes[1]))
    return found


@contextlib.contextmanager
def serve_lab(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    with open_lab(folder, create=True) as lab, serve(lab, []) as (address, _):
        headers = {"Authorization": f"Bearer {address.token}"}
        with httpx.Client(base_url=address.url, headers=headers, timeout=60.0, trust_env=False) as client:
            yield lab, address, client


def build_points(n: int) -> list[Point]:
    return [Point(values={"optim.lr": k}, config=CONFIG, digest=f"d{k}") for k in range(n)]


def build_row(number: int, owner: str, n_devices: int) -> Experiment:
    given = {"sweep": "s", "state": "queued", "attempt": 0, "priority": 0, "point": {}, "overrides": ()}
    return Experiment(id=f"e{number}", owner=owner, n_devices=n_devices, **given)


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]
