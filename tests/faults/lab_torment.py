"""Torments a served lab: what the loops of kills, stalls and partitions share, and what must hold at their end."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.lab.client import Client
from fulltilt.lab.executors.local import GUARD_MARK
from fulltilt.lab.records import Experiment
from fulltilt.lab.scheduling.retries import MOST_BAD
from fulltilt.lab.serving import find_server
from fulltilt.lab.states import ARROWS, OWNED, STATES
from fulltilt.lab.store import open_store

SERVER = (sys.executable, str(Path(__file__).parents[1] / "unit" / "lab" / "run_stand_in_server.py"))
N_STEPS = 600  # of 20 ms
N_POINTS = 12  # of one grid
FEW = 4  # unfinished experiments, before more are submitted
PATIENCE_S, DRAIN_S = 120, 300
IDLE_S = 180.0  # the longest wait between two attempts is 96 s
ORPHAN_S = 5.0  # a training may be seen for so long after its attempt is over
UNFINISHED = [state for state in STATES if state != "succeeded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A guard, a runner or a training of the lab: a process that may be killed or stopped."""

    pid: int
    kind: str
    attempt: tuple[str, int]


class Torment:
    """A served lab with the stand-in for the training, and what is done to it.

    Args:
        words: More of the server's command line.
    """

    def __init__(
        self,
        folder: Path,
        ttl_s: float,
        n_devices: int,
        *words: str,
        server: Sequence[str] = SERVER,
        **environment: str,
    ):
        seed = random.SystemRandom().randrange(10_000)
        print(f"seed {seed}")
        self.folder, self.ticks, self.ttl_s = folder, folder.parent / "ticks", ttl_s
        self.ticks.mkdir()
        self.random, self.done, self.n_experiments = random.Random(seed), Counter[str](), 0
        self._command = [*server, str(folder), str(ttl_s), str(n_devices), *words]
        self._environ = {**os.environ, "STAND_IN_TICKS": str(self.ticks), "STAND_IN_CHECKPOINT": "checkpoint.pt"}
        self._environ |= {"STAND_IN_STEPS": str(N_STEPS), **environment}
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._overdue_s: dict[int, float] = {}
        self._moved_s = time.monotonic()
        self.start()

    def start(self) -> None:
        self.server = subprocess.Popen(self._command, env=self._environ, start_new_session=True)

    def end(self) -> None:
        """Leave nothing running, however the test ended."""
        for part in self.find_parts():
            signal_if_there(part.pid, signal.SIGKILL)
        self.server.kill()
        self.server.wait()

    def ask(self, what: Callable[[Client], object]):
        """Return what a command gets that asks until the server answers."""
        end = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(UsageError):
                if (address := find_server(self.folder)) is not None:
                    return what(Client(None, address))
            assert time.monotonic() < end
            time.sleep(0.1)

    def submit(self, n_points: int = N_POINTS) -> None:
        grid = self.folder.parent / f"grid{self.n_experiments}.yaml"
        grid.write_text(f"lr: {[round(0.1 + 0.01 * n, 2) for n in range(n_points)]}\n")
        self.ask(lambda client: client.submit(grid, []))
        self.n_experiments += n_points

    def find_parts(self) -> list[Part]:
        """Find guards, runners and trainings of this lab, by what is in their environment."""
        found, parents = {}, {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pairs = (pair.partition("=") for pair in (entry / "environ").read_text(errors="replace").split("\0"))
                environ = {name: value for name, _, value in pairs}
                if environ.get("STAND_IN_TICKS") == str(self.ticks) and GUARD_MARK in environ:
                    name = "training" if b"stand_in_train" in (entry / "cmdline").read_bytes() else "guard"
                    pid, (experiment, number, _) = int(entry.name), environ[GUARD_MARK].split("/")
                    found[pid] = Part(pid=pid, kind=name, attempt=(experiment, int(number)))
                    parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        for pid, part in found.items():
            if part.kind == "guard" and parents[pid] in found:
                found[pid] = dataclasses.replace(part, kind="runner")
        return list(found.values())

    # What is done to it

    def kill_server(self) -> None:
        self.server.kill()
        self.server.wait()
        self.done["server killed"] += 1
        time.sleep(self.random.choice((0.0, 0.3, self.ttl_s)))
        self.start()

    def kill_part(self) -> None:
        if parts := self.find_parts():
            part = self.random.choice(parts)
            if signal_if_there(part.pid, signal.SIGKILL):
                self.done[f"{part.kind} killed"] += 1

    def later(self, seconds: float, take_back: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, take_back))

    def take_back(self, *, is_all: bool = False) -> None:
        now_s = time.monotonic()
        due, self._due = self._due, []
        for at_s, take_back in due:
            if is_all or at_s <= now_s:
                take_back()
            else:
                self._due.append((at_s, take_back))

    def run(
        self, faults: Mapping[Callable[[], None], float], *, seconds: float, least: int = 0, tell=lambda: None
    ) -> None:
        """Do one fault after the other, chosen by weight, while new experiments keep coming; then let all end."""
        end, each_of_them, weights = time.monotonic() + seconds, list(faults), list(faults.values())
        self.submit()
        while time.monotonic() < end or self.done.total() < least:
            time.sleep(self.random.uniform(0.1, 1.2))
            self.take_back()
            self.random.choices(each_of_them, weights)[0]()
            if self.look() < FEW:
                self.submit()
            tell()
        self.take_back(is_all=True)
        end = time.monotonic() + DRAIN_S
        while self.look():
            assert time.monotonic() < end, "it does not come to its end"
            time.sleep(0.5)
        self.server.terminate()
        self.server.wait()

    def look(self) -> int:
        """Do what an operator does, refuse orphans, and return how many experiments have not succeeded."""
        parts = self.find_parts()
        found = self.ask(lambda client: client.get("/api/experiments", state=UNFINISHED))["experiments"]
        for entry in found:
            assert entry["state"] not in ("failed", "cancelled"), entry
            if entry["state"] == "held":  # lost too often, as it should be: somebody looked, and lets it go on
                self.ask(lambda client, id=entry["id"]: client.post(f"/api/experiments/{id}/resume"))
        for node in self.ask(lambda client: client.get("/api/nodes"))["nodes"]:
            if node["n_bad"] >= MOST_BAD:
                self.ask(lambda client, name=node["name"]: client.post(f"/api/nodes/{name}/release"))
        live = {(entry["id"], entry["attempt"]) for entry in found if entry["state"] in OWNED}
        over = {part.pid for part in parts if part.kind == "training" and part.attempt not in live}
        now_s = time.monotonic()
        self._moved_s = now_s if parts or not found else self._moved_s
        assert now_s - self._moved_s < IDLE_S, f"{len(found)} experiments wait, and none is begun"
        self._overdue_s = {pid: self._overdue_s.get(pid, now_s) for pid in over}
        for part in parts:
            assert now_s - self._overdue_s.get(part.pid, now_s) < ORPHAN_S, f"orphan: {part}"
        return len(found)


def signal_if_there(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def assert_whole(torment: Torment) -> None:
    """Check that each experiment succeeded once, by legal arrows, with a whole log, and never lived twice."""
    folder = torment.folder
    with contextlib.closing(open_store(folder)) as store:
        states, accepted = {}, Counter()
        for event in store.read_events():
            if event.arrow != "submit":
                assert states[event.experiment] in ARROWS[event.arrow].sources, f"no arrow allows {event}"
            states[event.experiment] = event.state
            accepted[event.experiment] += event.arrow == "commit"
        attempts = [(each, row) for each in store.read_experiments() for row in store.read_attempts(each.id)]
    assert list(states.values()) == ["succeeded"] * torment.n_experiments, "lost"
    assert set(accepted.values()) == {1}, "accepted twice"
    assert_lived_one_after_the_other(torment.ticks)
    for experiment, row in attempts:
        assert_logged(folder, experiment, row["number"], row["devices"])
    assert torment.find_parts() == []
    with contextlib.closing(sqlite3.connect(folder / "lab.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def assert_logged(folder: Path, experiment: Experiment, number: int, devices: Sequence[str]) -> None:
    """Check each byte of an attempt's log: that of the accepted one is whole, an earlier one's breaks off somewhere."""
    path = folder / experiment.id / f"log-{number}.txt"
    log = path.read_text() if number == experiment.attempt or path.exists() else ""  # it was killed before it began
    point = f"optim.lr={experiment.point['optim.lr']}"
    title = f"== {experiment.id}, attempt {number} on {', '.join(devices)}: {experiment.sweep}.yaml {point}"
    began = re.match(r"from step (\d+)", log.removeprefix(f"{title}\n")) if number > 1 else None
    first = int(began[1]) if began else 0  # which checkpoint it found is its own affair
    steps = (f"step {step}" for step in range(first + 1, N_STEPS + 1))
    wanted = "\n".join([title, f"from step {first}: {point}", *steps, ""])
    is_whole = log == wanted if number == experiment.attempt else wanted.startswith(log)
    assert is_whole, f"{path}: every line, once"


def assert_lived_one_after_the_other(ticks: Path) -> None:
    lives = defaultdict(list)  # experiment → (first tick, last tick) of each attempt
    for path in ticks.iterdir():
        experiment, number = path.name.split("-")[:2]
        if seen := [float(line) for line in path.read_text().split()]:
            lives[experiment].append((min(seen), max(seen), int(number)))
    for experiment, spans in lives.items():
        spans.sort()
        for (_, ended, before), (began, _, after) in itertools.pairwise(spans):
            assert ended < began, f"{experiment}: attempts {before} and {after} lived at once"
