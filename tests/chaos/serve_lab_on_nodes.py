"""Serve a lab whose nodes are network namespaces: serve_lab_on_nodes.py LAB TTL_S N_DEVICES HOST NODE…

A node has a folder of its own for what its attempts write, and reaches nothing but the server. While its line is cut,
its engine can neither be asked nor told anything.
"""

import contextlib
import dataclasses
import os
import platform
import sys
import time
from pathlib import Path
from unittest import mock

from fulltilt.engine.interrupt import catch_signals
from fulltilt.lab.executors import Place, RefusedError, local
from fulltilt.lab.scheduling.leases import Term
from fulltilt.lab.serving import open_lab, serve
from fulltilt.records.run_folder import hold_folder

TRAIN = [sys.executable, "-S", str(Path(__file__).parents[1] / "unit" / "lab" / "stand_in_train.py")]


def is_reached(node: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/sys/class/net/{node}/operstate").read_text() == "up\n"
    return False


class NodesExecutor(local.LocalExecutor):
    """Starts guards in the network namespaces of its nodes."""

    def __init__(self, nodes: list[str], n_devices: int, *, folder: Path):
        super().__init__(list(range(n_devices)), logs=folder / "runners", is_lasting=True)
        self._nodes, self._folder = nodes, folder

    def read_places(self):
        devices = [slot.name for slot in self.slots]
        return [Place(node=node, devices=devices) for node in self._nodes if is_reached(node)]

    def submit(self, attempt, order, node, devices):
        if not is_reached(node):
            raise RefusedError(f"{node} cannot be reached")
        order = dataclasses.replace(order, root=str(self._folder / "nodes" / node), depot=None)
        guard = (sys.executable, os.environ["STAND_IN_GUARD"]) if "STAND_IN_GUARD" in os.environ else local.GUARD
        with mock.patch.object(local, "GUARD", ("nsenter", f"--net=/run/netns/{node}", *guard)):
            return super().submit(attempt, order, node, devices)

    def poll(self, experiments):
        reached = [dataclasses.replace(each, node=platform.node()) for each in experiments if is_reached(each.node)]
        return dict.fromkeys((each.id for each in experiments), "unknown") | super().poll(reached)

    def cancel(self, experiment, *, is_urgent):
        if is_reached(experiment.node):
            super().cancel(experiment, is_urgent=is_urgent)


def main() -> None:
    folder, ttl_s, n_devices, host, *nodes = sys.argv[1:]
    term = Term(ttl_s=float(ttl_s), grace_s=0.1 * float(ttl_s))
    executor = NodesExecutor(nodes, int(n_devices), folder=Path(folder))
    with (
        hold_folder(Path(folder)),
        open_lab(Path(folder), create=True, term=term) as lab,
        serve(lab, [executor], host=host, command=TRAIN),
        catch_signals() as stop,
    ):
        while not stop:
            time.sleep(0.1)


main()
