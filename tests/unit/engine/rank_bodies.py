"""What ranks run in the tests of starting and watching them. No torch here: a process starts in part of a second."""

import os
import signal
import time
from pathlib import Path

from fulltilt.engine.ranks.process import IS_WAITING, find_link
from fulltilt.errors import IN_EVALUATION, ConfigError
from fulltilt.records import CheckpointStarted, Noted, RunEnded, RunStarted, StepsDone

STARTED = {"name": "body", "out_dir": "", "device": "cpu", "plan": {}, "n_parameters": 1, "n_samples": 8}
STEP = {"epoch": 1, "step_in_epoch": 1, "n_steps": 1, "n_samples": 4, "seconds": 0.1, "lr": 0.1, "samples_per_s": 40.0}


def take_steps(link, n_steps):
    for phase in ("data_wait", "forward", "backward", "optimizer") * n_steps:
        link.lap(phase)


def read_environment(names):
    print("printed by a rank")
    return {name: os.environ[name] for name in names}, find_link().rank


def send_events(n_steps, stored):
    """Steps, then a checkpoint: what was told before it has to be stored when it begins."""
    link = find_link()
    if link.rank == 0:
        link.send_event(RunStarted(steps_per_epoch=4, n_epochs=1, **STARTED))
        for step in range(1, n_steps + 1):
            link.send_event(StepsDone(step=step, loss=1.0, **STEP))
        link.send_event(CheckpointStarted(epoch=0, step=n_steps))
    return Path(stored).read_text().split() if link.rank == 0 else None


def note_process(notes):
    with Path(notes).open("a") as stream:
        stream.write(f"{os.getpid()}\n")


def meet(notes):
    """Note this process, and wait until both ranks are here: they start at their own pace."""
    note_process(notes)
    while len(Path(notes).read_text().split()) < 2:
        time.sleep(0.01)


def fail(who, how, notes):
    """One rank fails in a way; the others wait for it, as in a collective."""
    link = find_link()
    if link.rank == 0:
        link.send_event(RunStarted(steps_per_epoch=4, n_epochs=1, first_step=10, **STARTED))
        link.send_event(StepsDone(step=12, loss=1.0, **STEP))
    meet(notes)
    link.set_step(10)
    take_steps(link, 3)
    link.lap("data_wait")
    if link.rank == who:
        HOWS[how]()
    link.lap("forward")
    hang()


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_early():
    print("about to leave", flush=True)
    os._exit(7)


def raise_own():
    raise ConfigError("lr is -1; give a positive one", key="optim.lr")


def raise_any():
    raise ValueError("a shape does not fit")


def raise_evaluating():
    error = ValueError("a shape does not fit")
    error.add_note(IN_EVALUATION)
    raise error


def raise_memory():
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


def hang():
    while True:
        time.sleep(1)


HOWS = {f.__name__: f for f in (kill_self, exit_early, raise_own, raise_any, raise_evaluating, raise_memory, hang)}


def break_off(cause_first_s, notes):
    """Rank 1 dies; rank 0 is told so by its connection, and may be heard before."""
    meet(notes)
    if find_link().rank == 0:
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    time.sleep(cause_first_s)
    kill_self()


def run_out(has_room, notes):
    """Rank 1 has no room; rank 0 is told so by its connection, tells it to the listeners, and is heard before."""
    meet(f"{notes}-{has_room}")
    link, reason = find_link(), "finished" if has_room else "failed: RuntimeError: Connection closed by peer"
    if link.rank == 0:
        link.send_event(RunStarted(steps_per_epoch=4, n_epochs=1, **STARTED))
        link.send_event(RunEnded(reason=reason, step=0, seconds=0.0, metrics={}))
        if not has_room:
            raise RuntimeError("Connection closed by peer")
    elif not has_room:
        time.sleep(0.3)
        raise_memory()
    return "done"


def count_attempts(folder, resume=False):
    """Rank 1 dies in the first two attempts; rank 0 says the same each time, and tells how the third was started."""
    attempts = Path(folder) / "attempts"
    if find_link().rank == 0:
        find_link().send_event(Noted(message="at the start"))
    if find_link().rank == 1:
        with attempts.open("a") as stream:
            stream.write("x")
        if len(attempts.read_text()) < 3:
            kill_self()
    while not attempts.exists() or len(attempts.read_text()) < 3:
        time.sleep(0.05)
    return {"attempts": len(attempts.read_text()), "resume": resume}


def wait_for_stop(pids):
    link = find_link()
    note_process(pids)
    while not link.is_stop_wanted:
        time.sleep(0.02)
    return "stopped"


def hang_at_start(notes):
    """Rank 1 never ends its first forward pass; rank 0 waits for it after its own."""
    link = find_link()
    meet(notes)
    link.lap("data_wait")
    if link.rank == 0:
        link.lap("forward")
    hang()


def stop_as_it_waits(notes):
    """Behind a step that both have done, each waits for what the other has to say, as at the end of an epoch."""
    link = find_link()
    meet(notes)
    take_steps(link, 3)
    with link.mark(IS_WAITING):
        if link.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        hang()
