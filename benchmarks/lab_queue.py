"""How fast the lab's queue is: a large grid, claims, ends, renewals, cancels, a list of 100,000, and decisions."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx2 as httpx

from benchmarks._runner import Context, Findings
from benchmarks._schema import build_arm, judge, judge_median
from fulltilt.config import Config
from fulltilt.hardware.proctree import find_marked
from fulltilt.lab.executors import name_mark
from fulltilt.lab.executors.local import LocalExecutor
from fulltilt.lab.executors.ray import RayExecutor
from fulltilt.lab.executors.ray_node import RayNode, build_simulated_slots
from fulltilt.lab.lab import Lab
from fulltilt.lab.operations import keep_text
from fulltilt.lab.records import Experiment, Point
from fulltilt.lab.runner.order import MARK
from fulltilt.lab.scheduling.order import Room, plan_starts
from fulltilt.lab.serving import open_lab, serve
from fulltilt.lab.store import DATABASE

CLAIM = "The lab's queue takes 10,000 points in 2 s, and claims and ends 130 experiments a second on two cores."
NEEDS_PEERS = False
DEVICES = ("cpu",)

N_AXIS = 100  # values of each of the two axes of the grid
N_CLIENTS, N_ENDED = 8, 2400
N_RENEWING, RENEWAL_S, N_RENEWALS = 500, 15.0, 2
N_CANCELLED, N_SLOTS = 20, 4
STAND_IN = (sys.executable, "-S", "-c", "import time; time.sleep(600)")  # saves nothing when told to end
SAVER = """
import os, signal, sys, time
out, said = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--out", "--json"))
def save(number, frame):
    with open(out + "/.partial", "wb") as file:
        file.write(os.urandom(64 << 20))
        os.fsync(file.fileno())
    os.replace(out + "/.partial", out + "/checkpoint.pt")
    open(said, "w").write('{"error": "interrupted", "rc": 143}')
    os._exit(143)
signal.signal(signal.SIGTERM, save)
time.sleep(600)
"""
SAVING = (sys.executable, "-S", "-c", SAVER)  # a checkpoint of 64 MiB, which its runner then brings to the server
N_ROWS, N_STARTS, N_PAGES = 100_000, 7, 30  # experiments, starts of a server, pages of a kind from each
HISTORY = {"lease": "leased", "start": "running", "finish": "finalizing", "commit": "succeeded"}
PAGES = {"overview": "/", "queue": "/queue?offset={}", "queue of a sweep": "/queue?sweep=grid&offset={}"}
PAGES |= {"queue of a state": "/queue?state=succeeded&offset={}"}
N_MACHINES, N_GPUS, N_QUEUED, N_OWNERS = 1000, 8, 1_000_000, 20
WINDOW = 8064  # queued experiments of an owner that a decision looks at: all devices, and 64 more
# Of a wait for 8 GPUs: a machine is empty when all that ran there has ended, after 10 in the mean.
LONGEST_DECISIONS = 30
N_RAY, N_RAY_MACHINES, N_RAY_GPUS, N_CLUSTERS = 20, 2, 4, 6  # experiments, machines, simulated GPUs of each, clusters
ENDS_AT_ONCE = (
    "import json, sys; w = sys.argv; f = open(w[w.index('--json') + 1], 'w'); f.write('{\"reason\": \"finished\"}')"
)
CALL, LONG = "request", f"{N_ROWS:,} experiments"
CONFIG = Config().to_values()
SPAWN = multiprocessing.get_context("spawn")
PATIENCE_S = 300.0  # with a process of clients


def run(context: Context) -> Findings:
    scale = 20 if context.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        grid_s, again_s, n_added = measure_grid(Path(folder) / "grid", n_axis=N_AXIS // scale, n=2 if scale > 1 else 7)
        rate, calls_s = measure_ends(Path(folder) / "ends", n=N_ENDED // scale)
        late_s = measure_renewals(Path(folder) / "renewals", n=N_RENEWING // scale, wait_s=RENEWAL_S / scale)
        cancels_s = {
            name: measure_cancels(Path(folder) / name, command, n=N_CANCELLED // min(scale, 4))
            for name, command in (("cancel", STAND_IN), ("cancel, saving 64 MiB", SAVING))
        }
        opened_s, pages_s, whole_s = measure_pages(
            Path(folder) / "rows", n=N_ROWS // scale, n_starts=2 if scale > 1 else N_STARTS, n_pages=N_PAGES // scale
        )
        n_clusters = 1 if scale > 1 else N_CLUSTERS
        ray_s = [measure_ray(Path(folder) / f"ray{n}", n=N_RAY // min(scale, 5)) for n in range(n_clusters)]
    decision = simulate(n_queued=N_QUEUED // scale, n_machines=N_MACHINES // scale)
    arms = (
        build_arm(grid_s, case="10,000 points", arm="submit", metric="seconds", unit_of_replication="lab"),
        build_arm(again_s, case="10,000 points", arm="submit again", metric="seconds", unit_of_replication="lab"),
        build_arm(calls_s, case="8 clients", arm="hello and finish", metric="seconds", unit_of_replication=CALL),
        build_arm(late_s, case="500 runners", arm="renewal, late", metric="seconds", unit_of_replication=CALL),
        *(
            build_arm(each_s, case="4 at once", arm=name, metric="seconds", unit_of_replication="training")
            for name, each_s in cancels_s.items()
        ),
        *(
            build_arm(each_s, case=LONG, arm=name, metric="seconds", unit_of_replication=CALL)
            for name, each_s in (pages_s | {"all as JSON": whole_s}).items()
        ),
        build_arm(opened_s, case=LONG, arm="start", metric="seconds", unit_of_replication="start"),
        build_arm(
            decision.seconds, case="1,000 machines of 8 GPUs, a million queued", arm="decision", metric="seconds",
            unit_of_replication="decision",
        ),
        build_arm(
            ray_s, case=f"{N_RAY} experiments, {N_RAY_MACHINES} machines of {N_RAY_GPUS} simulated GPUs",
            arm="Ray, from a cold start", metric="seconds", unit_of_replication="cluster",
        ),
    )  # fmt: skip
    targets = (
        judge("10,000 points committed, s", arms[0].median, arms[0].ci95, at_most=2.0),
        judge("experiments that a second submission adds", float(n_added), None, at_most=0.0),
        judge(
            "requests a second of eight clients that claim and finish", 2 * rate, None, at_least=300.0,
            note="two requests an experiment, hello and finish; the 588 a second of the survey count claim and finish",
        ),
        judge("experiments claimed, begun and ended a second", rate, None, at_least=300.0),
        judge("p99 of a runner's call, s", percentile(calls_s, 0.99), None, at_most=0.1),
        judge(
            "p99 of how late a renewal is answered, s (a figure of the survey)", percentile(late_s, 0.99), None,
            at_most=0.05, note="the survey asks for it; the lab's own targets do not",
        ),
        *(
            judge(f"p95 from a {name}, to the end of the training, s", percentile(each_s, 0.95), None, at_most=5.0)
            for name, each_s in cancels_s.items()
        ),
        *(
            judge(f"p95 of the page: {name}, s", percentile(each_s, 0.95), None, at_most=0.15)
            for name, each_s in pages_s.items()
        ),
        judge_median("start with 100,000 experiments, s", opened_s, at_most=5.0),
        judge(
            "longest wait of an owner with nothing running, decisions", float(decision.longest_wait), None, at_most=1.0
        ),
        judge("Jain's index of the owners' device-turns", decision.fairness, None, at_least=0.95),
        judge(
            "longest wait of an experiment of 8 GPUs, decisions", float(decision.longest_wait_of_large), None,
            at_most=LONGEST_DECISIONS, note="since a younger one of its owner began",
        ),
    )  # fmt: skip
    targets += (judge("20 experiments through Ray from a cold start, s", arms[-1].median, arms[-1].ci95, at_most=60.0),)
    return Findings(arms=arms, targets=targets, notes=describe(decision, whole_s))


def describe(decision: Simulation, whole_s: Sequence[float]) -> tuple[str, ...]:
    """Say what was counted, and how."""
    return (
        "an experiment is claimed by the scheduler, eight at a time, and takes two requests of a client: hello and "
        "finish, with no files; the survey's prototype took two as well, claim and finish, and made 588 a second",
        f"of the {N_ROWS:,} experiments nine of ten have succeeded, with five events each; all of them as JSON took "
        f"{statistics.median(whole_s):.1f} s",
        f"a decision for {N_MACHINES:,} machines starts up to {N_MACHINES * N_GPUS:,} experiments of {N_QUEUED:,}",
        f"it looks at the first {WINDOW:,} of each of {N_OWNERS} owners; experiments of 8 GPUs waited "
        f"{decision.wait_of_large:.1f} decisions in the mean, those of one {decision.wait_of_small:.1f}",
        "through Ray: from no process of Ray to the last result; the training is a program that ends at once, since "
        "what is measured is the lab's and Ray's part",
    )


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
    with serve_lab(folder) as (lab, address, _):
        lab.store.add("/grid.yaml", build_points(n), [])
        waiting = lab.store.read_experiments()
        tokens, said = SPAWN.Queue(2 * N_CLIENTS), SPAWN.Queue()
        clients = SPAWN.Process(target=end_experiments, args=(address.url, tokens, said))
        clients.start()
        said.get(timeout=PATIENCE_S)
        began = time.perf_counter()
        for first in range(0, n, N_CLIENTS):
            for token in claim(lab, waiting[first : first + N_CLIENTS]):
                tokens.put(token)
        for _ in range(N_CLIENTS):
            tokens.put(None)
        calls_s = said.get(timeout=PATIENCE_S)
        rate = n / (time.perf_counter() - began)
        clients.join()
        assert lab.store.count_states() == {"succeeded": n}
    return rate, calls_s


def end_experiments(url: str, tokens, said) -> None:
    """Be eight clients, in a process of their own as runners are, until no token is left."""
    calls_s: list[float] = []

    def work(client: httpx.Client) -> None:
        while token := tokens.get():
            headers = {"Authorization": f"Bearer {token}"}
            for what, body in (("hello", {"node": "n1", "pid": 1}), ("finish", {"outcome": "succeeded"})):
                started = time.perf_counter()
                client.post(f"/runner/{what}", json=body, headers=headers).raise_for_status()
                calls_s.append(time.perf_counter() - started)

    clients = [httpx.Client(base_url=url, timeout=60.0, trust_env=False) for _ in range(N_CLIENTS)]
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    said.put("ready")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said.put(calls_s)


def measure_renewals(folder: Path, *, n: int, wait_s: float) -> list[float]:
    """Have runners renew their leases, each every ``wait_s`` → how much later than that each answer came."""
    with serve_lab(folder) as (lab, address, _):
        lab.store.add("/grid.yaml", build_points(n), [])
        said = SPAWN.Queue()
        given = (address.url, claim(lab, lab.store.read_experiments()), wait_s, said)
        runners = SPAWN.Process(target=renew_leases, args=given)
        runners.start()
        late_s = said.get(timeout=PATIENCE_S)
        runners.join()
    return late_s


def renew_leases(url: str, tokens: list[str], wait_s: float, said) -> None:
    """Be as many runners as there are tokens, which begin at random times of the first ``wait_s``."""
    late_s: list[float] = []

    async def renew(token: str) -> None:
        headers, body = {"Authorization": f"Bearer {token}"}, {"wait_s": wait_s}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0, trust_env=False, verify=False) as own:
            await asyncio.sleep(random.uniform(0.0, wait_s))
            for _ in range(N_RENEWALS):
                started = time.perf_counter()
                (await own.post("/runner/renew", json=body)).raise_for_status()
                late_s.append(time.perf_counter() - started - wait_s)

    async def work() -> None:
        await asyncio.gather(*map(renew, tokens))

    asyncio.run(work())
    said.put(late_s)


def measure_cancels(folder: Path, command: Sequence[str], *, n: int) -> list[float]:
    """Cancel trainings that run beside others → seconds from each request until the processes are gone."""
    executor, seconds = LocalExecutor(list(range(N_SLOTS)), logs=folder / "runners"), []
    with serve_lab(folder, [executor], command=command) as (lab, _, client):
        lab.store.add("/grid.yaml", build_points(n), [])
        lab.woken.set()
        for number in range(1, n + 1):
            while not is_training(experiment := lab.store.read_experiments(id=f"e{number}")[0]):
                time.sleep(0.05)
            time.sleep(0.5)  # until it hears a signal
            started = time.perf_counter()
            client.post(f"/api/experiments/{experiment.id}/cancel").raise_for_status()
            while find_marked(f"{MARK}={name_mark(experiment)}"):
                time.sleep(0.01)
            seconds.append(time.perf_counter() - started)
            while lab.store.read_experiments(id=experiment.id)[0].state == "cancelling":
                time.sleep(0.05)
            assert command is not SAVING or lab.store.read_artefacts(experiment.id), "it saved nothing"
    return seconds


def is_training(experiment: Experiment) -> bool:
    """Return whether the training itself has begun, beside its runner and its guard."""
    return experiment.state == "running" and bool(find_marked(f"{MARK}={name_mark(experiment)}"))


def claim(lab: Lab, waiting: Sequence[Experiment]) -> list[str]:
    """Claim experiments in one transaction, as the scheduler does → their tokens."""
    place = {"node": "n1", "devices": ["d"], "n_threads": None, "engine": "none"}
    return [token for _, token in filter(None, lab.store.lease_all([(each, place) for each in waiting]))]


def measure_pages(
    folder: Path, *, n: int, n_starts: int, n_pages: int
) -> tuple[list[float], dict[str, list[float]], list[float]]:
    """Start servers on a long queue with a history → seconds to start, of each kind of page, of all as JSON."""
    folder.mkdir(parents=True)
    with open_lab(folder, create=True) as lab:
        lab.store.add("/grid.yaml", build_points(n), [])
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as database, database:
        add_history(database)
    opened, pages, whole = [], {name: [] for name in PAGES}, []

    def ask(client: httpx.Client, path: str, seconds: list[float]) -> None:
        started = time.perf_counter()
        client.get(path).raise_for_status()
        seconds.append(time.perf_counter() - started)

    for _ in range(n_starts):
        started = time.perf_counter()
        with serve_lab(folder) as (_, _, client):
            client.get("/healthz").raise_for_status()
            opened.append(time.perf_counter() - started)
            for number in range(n_pages):
                for name, path in PAGES.items():
                    ask(client, path.format(100 * number), pages[name])
            ask(client, "/api/experiments", whole)
    return opened, pages, whole


def add_history(database: sqlite3.Connection) -> None:
    """Let nine of ten experiments have succeeded, an attempt and five events each."""
    database.execute("UPDATE experiment SET state = 'succeeded', attempt = 1 WHERE id % 10 > 0")
    over = "FROM experiment WHERE attempt = 1"
    database.execute(
        "INSERT INTO attempt (experiment, number, node, devices, started_s, ended_s, outcome, metrics, fence) "
        f"""SELECT id, 1, 'n1', '["cuda:0"]', 1.0, 61.0, 'succeeded', '{{"loss": 0.5}}', 'fence ' || id {over}"""
    )
    ids = [row[0] for row in database.execute(f"SELECT id {over} ORDER BY id")]
    events = ((id, arrow, state) for id in ids for arrow, state in HISTORY.items())
    columns = "experiment, attempt, arrow, state, time_s"
    database.executemany(f"INSERT INTO event ({columns}) VALUES (?, 1, ?, ?, 2.0)", events)


def measure_ray(folder: Path, *, n: int) -> float:
    """Start a cluster on this machine and run experiments through it → seconds until the last one succeeded."""
    folder.mkdir(parents=True)
    executor = RayExecutor(folder, host="127.0.0.1")
    command = (sys.executable, "-S", "-c", ENDS_AT_ONCE)
    began = time.perf_counter()
    with (
        contextlib.ExitStack() as stack,
        open_lab(folder, create=True) as lab,
        serve(lab, [executor], command=command) as (address, _),
    ):
        stack.callback(executor.end_head)
        for number in range(N_RAY_MACHINES):
            machine = folder / f"n{number}"
            machine.mkdir()
            slots = build_simulated_slots(N_RAY_GPUS)
            node = RayNode(url=address.url, name=machine.name, boot="one start", folder=machine, slots=slots)
            node.join(address.token)
            stack.callback(node.leave, lambda: True)
        lab.store.add("/grid.yaml", build_points(n), [], code=keep_text(lab, "grid.yaml", ""))
        while lab.store.count_states() != {"succeeded": n}:
            time.sleep(0.05)
        return time.perf_counter() - began


class Simulation:
    """What a simulated cluster showed: each decision's seconds, how long who waited, and how even the shares were."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.longest_wait, self.wait_of_large, self.wait_of_small = 0, 0.0, 0.0
        self.longest_wait_of_large, self.fairness = 0, 0.0


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
    waits, overtaken, device_turns = Counter[str](), Counter[str](), Counter[str]()
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
        youngest = {start.experiment.owner: int(start.experiment.id[1:]) for start in starts}  # in the order of age
        for owner, line in lines.items():
            left = (each for each in line[:WINDOW] if each.n_devices == N_GPUS and each.id not in begun)
            overtaken.update(
                each.id for each in left if each.id in overtaken or int(each.id[1:]) < youngest.get(owner, 0)
            )
            lines[owner] = [each for each in line[:WINDOW] if each.id not in begun] + line[WINDOW:]
            has_begun = any(start.experiment.owner == owner for start in starts)
            is_served = has_begun or not line or not starts or used[owner] > 0
            waits[owner] = 0 if is_served else waits[owner] + 1
        found.longest_wait = max(found.longest_wait, *waits.values())
        for _, each, _ in running:
            device_turns[each.owner] += each.n_devices
        generator.shuffle(running)
        for node, _, devices in running[: len(running) // 10]:
            free[node] += devices
        running = running[len(running) // 10 :]
    found.wait_of_large, found.wait_of_small = (sum(turns) / max(1, len(turns)) for turns in (sizes[8], sizes[1]))
    found.longest_wait_of_large = max(overtaken.values(), default=0)
    turns = [device_turns[owner] for owner, line in lines.items() if line]  # of those who always wanted more
    found.fairness = sum(turns) ** 2 / (len(turns) * sum(n * n for n in turns))  # Jain, Chiu and Hawe 1984
    return found


@contextlib.contextmanager
def serve_lab(folder: Path, executors: Sequence[LocalExecutor] = (), **given):
    folder.mkdir(parents=True, exist_ok=True)
    with open_lab(folder, create=True) as lab, serve(lab, executors, **given) as (address, _):
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
