"""Server, runners and trainings killed at random: nothing is lost, counts twice, lives twice or for ever."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from fulltilt.errors import UsageError
from fulltilt.lab.client import Client
from fulltilt.lab.serving import find_server
from fulltilt.lab.states import ARROWS
from fulltilt.lab.store import open_store

SERVER = Path(__file__).parents[1] / "unit" / "lab" / "run_stand_in_server.py"
TTL_S, N_DEVICES = 3.0, 3
N_STEPS = 600  # of 20 ms: the twelve of the grid keep three devices busy for a minute
PATIENCE_S = 120
SECONDS, N_KILLS = 60.0, 50  # at least
GRID = f"lr: {[round(0.1 + 0.01 * n, 2) for n in range(12)]}\n"


def start_server(folder: Path, ticks: Path) -> subprocess.Popen:
    environment = {**os.environ, "STAND_IN_TICKS": str(ticks), "STAND_IN_CHECKPOINT": "checkpoint.pt"}
    command = [sys.executable, str(SERVER), str(folder), str(TTL_S), str(N_DEVICES)]
    return subprocess.Popen(command, env=environment | {"STAND_IN_STEPS": str(N_STEPS)}, start_new_session=True)


def ask(folder: Path, what):
    """What a command gets that asks until the server answers."""
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(UsageError):
            if (address := find_server(folder)) is not None:
                return what(Client(None, address))
        assert time.monotonic() < end
        time.sleep(0.1)


def find_parts(ticks: Path) -> list[int]:
    """Guards, runners and trainings of this lab, by what is in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            is_part = b"lab.runner.guard" in command or b"stand_in_train" in command
            if is_part and str(ticks).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def kill_at_random(folder: Path, ticks: Path, seed: int, *, seconds: float, least: int) -> Counter:
    """Kill the server or a part of an attempt again and again → how often which; then let the lab end its queue."""
    generator, kills = random.Random(seed), Counter()
    server = start_server(folder, ticks)
    grid = folder.parent / "grid.yaml"
    grid.write_text(GRID)
    ask(folder, lambda client: client.submit(grid, []))
    end = time.monotonic() + seconds
    while time.monotonic() < end or kills.total() < least:
        time.sleep(generator.uniform(0.1, 1.2))
        if generator.random() < 0.4:
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            kills["server"] += 1
            time.sleep(generator.choice((0.0, 0.3, TTL_S)))
            server = start_server(folder, ticks)
        elif parts := find_parts(ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(generator.choice(parts), signal.SIGKILL)
                kills["part"] += 1
        for entry in ask(folder, lambda client: client.get("/api/experiments"))["experiments"]:
            if entry["state"] == "held":  # lost too often, as it should be: somebody looked, and lets it go on
                ask(folder, lambda client, id=entry["id"]: client.post(f"/api/experiments/{id}/resume"))
    end = time.monotonic() + PATIENCE_S
    while set(states := ask(folder, lambda client: client.get("/api/status"))["states"]) != {"succeeded"}:
        if states.get("held"):
            for entry in ask(folder, lambda client: client.get("/api/experiments", state="held"))["experiments"]:
                ask(folder, lambda client, id=entry["id"]: client.post(f"/api/experiments/{id}/resume"))
        assert time.monotonic() < end, states
        time.sleep(0.2)
    server.terminate()
    server.wait()
    return kills


def assert_whole(folder: Path, ticks: Path, n: int) -> None:
    with contextlib.closing(open_store(folder)) as store:
        states, accepted = {}, Counter()
        for event in store.read_events():
            if event.arrow != "submit":
                assert states[event.experiment] in ARROWS[event.arrow].sources
            states[event.experiment] = event.state
            accepted[event.experiment] += event.arrow == "commit"
        newest = {each.id: each.attempt for each in store.read_experiments()}
    assert list(states.values()) == ["succeeded"] * n
    assert set(accepted.values()) == {1}
    lives = defaultdict(list)  # experiment → (first tick, last tick) of each attempt
    for path in ticks.iterdir():
        experiment, number = path.name.split("-")[:2]
        seen = [float(line) for line in path.read_text().split()]
        lives[experiment].append((min(seen), max(seen), int(number)))
    for experiment, spans in lives.items():
        spans.sort()
        for (_, ended, before), (began, _, after) in itertools.pairwise(spans):
            assert ended < began, f"{experiment}: attempts {before} and {after} lived at once"
    for experiment, attempt in newest.items():
        log = (folder / experiment / f"log-{attempt}.txt").read_text()
        (first,) = re.findall(r"^from step (\d+): ", log, re.MULTILINE)
        steps = re.findall(r"^step (\d+)$", log, re.MULTILINE)
        assert steps == [str(step) for step in range(int(first) + 1, N_STEPS + 1)], f"{experiment}: every line, once"
    assert find_parts(ticks) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_nothing_is_lost_or_counts_twice_or_lives_twice(tmp_path):
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    folder, ticks = tmp_path / "lab", tmp_path / "ticks"
    ticks.mkdir()
    kills = kill_at_random(folder, ticks, seed, seconds=SECONDS, least=N_KILLS)
    print(f"seed {seed}: {dict(kills)}")
    assert kills.total() >= N_KILLS
    assert_whole(folder, ticks, 12)
