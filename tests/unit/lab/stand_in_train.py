"""Stands in for ``fulltilt train`` where a test starts it a hundred times: a counter as checkpoint, no torch.

It keeps what the lab relies on: one process a folder (a lock), --resume, an atomic result, a checkpoint on SIGINT and
SIGTERM. Beside it a worker is left that ends only a while after its parent, as data workers do.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

N_STEPS = int(os.environ.get("STAND_IN_STEPS", "30"))
STEP_S = 0.02


def write_atomic(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def start_worker() -> None:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.05)
        time.sleep(1.0)
        os._exit(0)


def main() -> int:
    words = sys.argv[1:]
    out, result = (Path(words[words.index(flag) + 1]) for flag in ("--out", "--json"))
    lock = (out / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        write_atomic(result, json.dumps({"error": "the folder is in use", "rc": 2}))
        return 2
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        is_deaf = "STAND_IN_DEAF" in os.environ
        signal.signal(number, signal.SIG_IGN if is_deaf else lambda number, frame: stop.append(number))
    if "STAND_IN_ALONE" not in os.environ:
        start_worker()
    checkpoint = out / os.environ.get("STAND_IN_CHECKPOINT", "counter")
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print(f"from step {step}: {' '.join(word for word in words if word.startswith('optim.lr='))}", flush=True)
    if blob := os.environ.get("STAND_IN_PRINTS"):
        sys.stdout.buffer.write(Path(blob).read_bytes())
        sys.stdout.flush()
    if error := os.environ.get("STAND_IN_ERROR"):
        write_atomic(result, json.dumps({"error": error, "rc": 2}))
        return 2
    if "optim.lr=0.666" in words:
        write_atomic(result, json.dumps({"error": "diverged; use a smaller lr", "rc": 1}))
        return 1
    ticks = os.environ.get("STAND_IN_TICKS")
    trace = Path(ticks, os.environ["FULLTILT_ATTEMPT"].replace("/", "-")) if ticks else None
    while step < N_STEPS:
        time.sleep(STEP_S)
        step += 1
        if trace:
            print(f"step {step}", flush=True)
            with trace.open("a") as stream:
                print(time.clock_gettime(time.CLOCK_BOOTTIME), file=stream)
        write_atomic(checkpoint, str(step))
        if stop:
            write_atomic(result, json.dumps({"error": "interrupted", "rc": 128 + stop[0]}))
            return 128 + stop[0]
    write_atomic(result, json.dumps({"reason": "finished", "metrics": {"loss": 1.0 / step, "steps": step}}))
    return 0


sys.exit(main())
