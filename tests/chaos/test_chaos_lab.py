"""A lab on several nodes, killed, stalled and cut off for half an hour: nothing is lost, nothing lives twice.

``CHAOS_RESULT=benchmarks/results/chaos_lab-cpu.json make chaos`` keeps what it saw as a result file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks._runner import Context, Findings, run_benchmark
from benchmarks._schema import build_arm, judge
from tests.faults.lab_torment import (
    Torment,
    assert_lived_one_after_the_other,
    assert_whole,
    signal_if_there,
)
from tests.lab_cases import wait_for

from fulltilt.records import dumps
from fulltilt.records.run_folder import write_atomic

pytestmark = pytest.mark.chaos
MINUTES = float(os.environ.get("CHAOS_MINUTES", "30"))
TTL_S, N_DEVICES, N_NODES = 6.0, 2, 3
SHORT_S, LONG_S = TTL_S / 3, 1.5 * TTL_S  # than the lease
SERVER = (sys.executable, str(Path(__file__).with_name("serve_lab_on_nodes.py")))
WITHOUT_DEADLINE = Path(__file__).parents[1] / "faults" / "guard_without_deadline.py"
TELL_S = 60.0
CLAIM = "Of a lab that is killed, stalled and cut off for half an hour nothing is lost, counts twice or lives twice."
REFUSED = (
    "experiments lost",
    "results accepted twice",
    "attempts that lived at once",
    "orphans of 5 s",
    "inexact logs",
)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Network:
    """Nodes that are network namespaces, each joined to one bridge, at which the server listens."""

    def __init__(self):
        number = os.getpid() % 10_000
        self.bridge, self.subnet = f"ft{number}", f"10.93.{number % 250}"
        self.host, self.nodes = f"{self.subnet}.1", [f"ft{number}n{k}" for k in range(N_NODES)]

    def build(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("address", "add", f"{self.host}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for k, node in enumerate(self.nodes):
            ip("netns", "add", node)
            ip("link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", node)
            ip("link", "set", node, "master", self.bridge, "up")
            ip("-n", node, "address", "add", f"{self.subnet}.{k + 2}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")

    def remove(self) -> None:
        words = [["link", "delete", name] for name in (*self.nodes, self.bridge)]
        for each in [*words, *(["netns", "delete", node] for node in self.nodes)]:
            subprocess.run(["ip", *each], capture_output=True, check=False)


class Faults(Torment):
    """Beside kills: parts that stand still, and lines that are cut, for less than a lease and for more."""

    def __init__(self, folder: Path, network: Network, **environment: str):
        self._network, self._stopped, self._cut = network, set(), set()
        super().__init__(folder, TTL_S, N_DEVICES, network.host, *network.nodes, server=SERVER, **environment)

    def stall_server(self) -> None:
        seconds = self.random.choice((SHORT_S, LONG_S))
        self.server.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.server.send_signal(signal.SIGCONT)
        self._note("server stopped", seconds)

    def stall_part(self) -> None:
        """Stop one part of an attempt. A node that stands still as a whole is not told apart from a lost one."""
        parts = [part for part in self.find_parts() if part.attempt not in self._stopped]
        if not parts:
            return
        part, seconds = self.random.choice(parts), self.random.choice((SHORT_S, LONG_S))
        if signal_if_there(part.pid, signal.SIGSTOP):
            self._stopped.add(part.attempt)
            self._note(f"{part.kind} stopped", seconds)

            def go_on() -> None:
                signal_if_there(part.pid, signal.SIGCONT)
                self._stopped.discard(part.attempt)

            self.later(seconds, go_on)

    def cut_off(self) -> None:
        nodes = [node for node in self._network.nodes if node not in self._cut]
        if not nodes:
            return
        self.cut(self.random.choice(nodes), self.random.choice((SHORT_S, LONG_S)))

    def cut(self, node: str, seconds: float) -> None:
        ip("link", "set", node, "down")
        self._cut.add(node)
        self._note("node cut off", seconds)

        def join() -> None:
            ip("link", "set", node, "up")
            self._cut.discard(node)

        self.later(seconds, join)

    def _note(self, what: str, seconds: float) -> None:
        self.done[f"{what} for {'less' if seconds < self.ttl_s else 'more'} than a lease"] += 1


@pytest.fixture
def network():
    network = Network()
    try:
        network.build()
    except OSError as error:
        network.remove()
        pytest.skip(f"no network namespaces here ({error})")
    yield network
    network.remove()


@pytest.mark.timeout(60 * MINUTES + 900)
def test_killed_stalled_and_cut_off_nothing_is_lost_or_counts_twice_or_lives_twice(tmp_path, network, say):
    def run(_: Context) -> Findings:
        return torment(Faults(tmp_path / "lab", network), say)

    result = run_benchmark("chaos_lab", SimpleNamespace(CLAIM=CLAIM, run=run), Context(device="cpu", quick=False))
    if path := os.environ.get("CHAOS_RESULT"):
        write_atomic(Path(path), dumps(dataclasses.replace(result, command="make chaos"), indent=1) + "\n")


def torment(faults: Faults, say) -> Findings:
    """Do to it what is done for ``MINUTES``, and return what was counted: only where all checks hold."""
    began_s = told_s = time.monotonic()

    def tell() -> None:
        nonlocal told_s
        if time.monotonic() - told_s > TELL_S:
            told_s = time.monotonic()
            say(f"{(told_s - began_s) / 60:.0f} min: {dict(faults.done)}, {faults.n_experiments} experiments")

    weights = {faults.kill_server: 0.2, faults.kill_part: 0.5, faults.cut_off: 0.15, faults.stall_part: 0.12}
    try:
        faults.run(weights | {faults.stall_server: 0.03}, seconds=60 * MINUTES, tell=tell)
        assert_whole(faults)
    finally:
        faults.end()
    n_attempts = len(list(faults.ticks.iterdir()))
    say(
        f"{dict(faults.done)}: {faults.n_experiments} experiments succeeded once, in {n_attempts} attempts that trained"
    )
    counted = {**faults.done, "experiments": faults.n_experiments, "attempts that trained": n_attempts}
    same = {"case": f"{MINUTES:g} minutes", "metric": "count", "unit_of_replication": "run"}
    return Findings(
        arms=tuple(build_arm([float(n)], arm=what, **same) for what, n in counted.items()),
        targets=(
            judge(f"kills, stops and cuts in {MINUTES:g} minutes", float(faults.done.total()), None, at_least=50.0),
            *(judge(what, 0.0, None, at_most=0.0) for what in REFUSED),
        ),
        notes=("the file is written only where every check held: one that fails ends the run",),
    )


@pytest.mark.parametrize("guard", ["guard", "guard without deadline"])
def test_a_node_that_is_cut_off_ends_its_training_in_time_and_one_that_does_not_is_seen(tmp_path, network, guard):
    broken = {"STAND_IN_GUARD": str(WITHOUT_DEADLINE)} if guard == "guard without deadline" else {}
    faults = Faults(tmp_path / "lab", network, STAND_IN_STEPS="1000000", **broken)
    try:
        faults.submit(1)
        training = wait_for(lambda: [part for part in faults.find_parts() if part.kind == "training"])[0]
        experiment, _ = training.attempt
        faults.cut(faults.ask(lambda client: client.get(f"/api/experiments/{experiment}"))["experiment"]["node"], 60.0)
        wait_for(lambda: len(list(faults.ticks.glob(f"{experiment}-*"))) > 1)  # it goes on elsewhere
        time.sleep(1.0)
    finally:
        faults.end()
    with pytest.raises(AssertionError, match="lived at once") if broken else contextlib.nullcontext():
        assert_lived_one_after_the_other(faults.ticks)
