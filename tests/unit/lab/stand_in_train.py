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
STEPS_PER_EPOCH = 50  # where events are asked for; then run.epochs says how long it trains


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


def compute_loss(step: int, lr: float) -> float:
    return 2.0 / (1 + 0.05 * step) + lr


def log_event(out: Path, step: int, lr: float) -> None:
    """Log what a training would, for pages to draw."""
    events = []
    if step == 0:
        events = [{"event": "RunStarted", "name": "grid", "device": "cpu", "n_parameters": 7, "plan": {}}]
        events[0] |= {"steps_per_epoch": STEPS_PER_EPOCH, "report": ["CPU: a stand-in, 1 thread"]}
    elif step % 5 == 0:
        loss, epoch = compute_loss(step, lr), -(-step // STEPS_PER_EPOCH)
        phases = {"data_wait": 1.0, "forward": 6.0, "backward": 12.0, "optimizer": 1.0, "step": 20.0}
        same = {"epoch": epoch, "step": step, "lr": lr}
        done = {"n_samples": 320, "seconds": 5 * STEP_S, "samples_per_s": 3200.0, "loss": loss, "phases_ms": phases}
        events = [{"event": "StepsDone", **same, **done}]
        if step % STEPS_PER_EPOCH == 0:
            seen = {"training_seconds": step * STEP_S, "metrics": {"loss": loss, "accuracy": 1 - loss / 3}}
            events.append({"event": "Evaluated", **same, **seen})
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
    with (out / "events.jsonl").open("a") as stream:
        stream.writelines(json.dumps(event) + "\n" for event in events)


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
    has_events, n_steps = "STAND_IN_EVENTS" in os.environ, N_STEPS
    if has_events:
        values = dict(word.split("=", 1) for word in words if "=" in word)
        lr, n_steps = float(values["optim.lr"]), STEPS_PER_EPOCH * int(values["run.epochs"])
        if step == 0:
            log_event(out, 0, lr)
    while step < n_steps:
        time.sleep(STEP_S)
        step += 1
        if trace:
            print(f"step {step}", flush=True)
            with trace.open("a") as stream:
                print(time.clock_gettime(time.CLOCK_BOOTTIME), file=stream)
        if has_events:
            log_event(out, step, lr)
        write_atomic(checkpoint, str(step))
        if stop:
            write_atomic(result, json.dumps({"error": "interrupted", "rc": 128 + stop[0]}))
            return 128 + stop[0]
    loss = compute_loss(step, lr) if has_events else 1.0 / step
    write_atomic(result, json.dumps({"reason": "finished", "metrics": {"loss": loss, "steps": step}}))
    return 0


sys.exit(main())
