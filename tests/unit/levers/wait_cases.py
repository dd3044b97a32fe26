"""Trains in processes of its own and looks at how threads wait: OpenMP reads the policy once, when it is loaded."""

import functools
import json
import os
import subprocess
import sys

N_WAITS = 20
PROGRAM = """
import json, os, sys, time
from fulltilt.levers import default_plan, list_environment, load_catalogue, set_before_torch

value, n_waits = json.loads(sys.argv[1])
plan = default_plan({"batch_size": 8, "threads": 2, "wait_policy": value})
set_before_torch(list_environment(plan))
import torch
from torch.utils.data import TensorDataset
from fulltilt import Workload
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.levers.thread_affinity import _run_in_team
from fulltilt.measure import NullTimer

torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 5), torch.arange(24) % 3)
workload = Workload(model=lambda: torch.nn.Linear(5, 3), dataset=lambda: data, loss=torch.nn.CrossEntropyLoss())
losses, threads = [], {}
with build_run(None, plan, device="cpu", workload=workload) as run:
    step, batches = TrainStep(run), run.start_epoch(0)
    while (outcome := step(batches, NullTimer())) is not None:
        losses.append(outcome.loss.item())
    observed = load_catalogue()["wait_policy"].observe(run.setup)
    _run_in_team(lambda number: threads.update({number: os.readlink("/proc/thread-self")}))
folder = f"/proc/{threads[1]}"

def look():
    status = dict(line.split(":", 1) for line in open(f"{folder}/status") if ":" in line)
    return int(status["voluntary_ctxt_switches"]), int(open(f"{folder}/schedstat").read().split()[0])

tensor = torch.zeros(2**20)
tensor.add_(1)
sleeps, busy_ns = look()
for _ in range(n_waits):  # between two operators the second thread waits
    tensor.add_(1)
    time.sleep(0.02)
after = look()
print(json.dumps({
    "losses": losses, "observed": observed, "notes": run.setup.notes,
    "n_sleeps": after[0] - sleeps, "busy_ms": (after[1] - busy_ns) / 1e6,
}))
"""


def clean_environment() -> dict[str, str]:
    """Without what the shell says of OpenMP."""
    return {name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}


@functools.cache
def wait(value: str | None) -> dict:
    """What a process saw whose plan has this value."""
    command = [sys.executable, "-c", PROGRAM, json.dumps((value, N_WAITS))]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
