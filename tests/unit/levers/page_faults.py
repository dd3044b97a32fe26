"""Trains in processes of its own and counts the pages that steps take anew: how memory is taken is the process' own."""

import contextlib
import functools
import json
import os
import subprocess
import sys

FEW = 30  # pages of a block of 80 MB that lies a little beside where the last one lay; in pages of 2 MiB it has 38
PROGRAM = """
import json, os, resource, sys
import torch, torch._dynamo  # which loads with the first optimizer
from torch.utils.data import TensorDataset
from fulltilt import Workload
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.levers import default_plan, load_catalogue
from fulltilt.measure import NullTimer

faults = []  # a step each

class Large(torch.nn.Linear):
    def forward(self, x):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(n)  # of 80 MB: 19,531 pages of 4 KiB, fewer where the system joins them
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return super().forward(x)

def limit(room_bytes):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    limit_bytes = int(status["VmData"].split()[0]) * 1024 + room_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))

def train(plan):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 5), torch.arange(24) % 3)
    workload = Workload(model=lambda: Large(5, 3), dataset=lambda: data, loss=torch.nn.CrossEntropyLoss())
    losses = []
    faults.clear()
    with build_run(None, default_plan({"batch_size": 8, "threads": 1} | plan), device="cpu", workload=workload) as run:
        step = TrainStep(run)
        if room_bytes:
            limit(room_bytes)
        for epoch in range(2):
            batches = run.start_epoch(epoch)
            while (outcome := step(batches, NullTimer())) is not None:
                losses.append(outcome.loss.item())
                load_catalogue()["retain_freed_memory"].observe(run.setup)
        observed = load_catalogue()["retain_freed_memory"].observe(run.setup)
        return {"losses": losses, "faults": min(faults[3:]), "observed": observed, "notes": run.setup.notes}

for line in sys.stdin:
    values, room_bytes, n = json.loads(line)
    if os.fork() == 0:
        print(json.dumps([train({"retain_freed_memory": value}) for value in values]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Each line is answered by a child of its own, whose memory is as it is once torch is loaded."""


@contextlib.contextmanager
def start(**environment: str):
    """Yield what trains in processes with more environment."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        @functools.cache
        def train(*values: bool, room_bytes: int = 0, n: int = 20_000_000) -> list[dict]:
            """What runs saw that followed each other in one process, one a value of the lever.

            Faults are the least of the second epoch's three steps. A small block that outlives its step may lie where
            the large one was, which then is put elsewhere, on new pages: in up to three of six steps, in 211 processes.
            Blocks that are given back are on new pages in every step.

            Args:
                room_bytes: That the process may map beside what it has as the steps begin; 0: as much as there is.
                n: Elements of 4 bytes that each step takes and frees.
            """
            process.stdin.write(json.dumps((values, room_bytes, n)) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield train
