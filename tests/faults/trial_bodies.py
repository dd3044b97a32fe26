"""What the trial processes of the fault tests do: each is called as a trial body with (request, answer)."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEASUREMENT = {
    "phases_ms": {
        "data_wait": 1.0,
        "h2d": None,
        "forward": 2.0,
        "backward": 3.0,
        "optimizer": 1.0,
        "other": 0.1,
        "step": 7.1,
    },
    "samples_per_s": 1000.0,
    "samples_per_s_ci95": [990.0, 1010.0],
    "block_samples_per_s": [990.0, 1000.0, 1010.0],
    "n_steps": 24,
    "n_warmup_steps": 8,
    "memory_rss_peak_gib": 0.5,
    "null_reasons": {},
    "observed": {},
}


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


def do(request, answer):
    """The source's configuration says what happens: ``{"act": name, …}``."""
    act = request["source"]["config"]
    ACTS[act["act"]]({**act, "plan": request["plan"], "id": request["id"]}, answer)


def finish(act, answer):
    answer({"progress": {"stage": "measuring"}})
    answer({"measurement": MEASUREMENT})


def _raise_error(act, answer):
    kinds = {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "OutOfMemoryError": OutOfMemoryError}
    raise kinds[act.get("type", "RuntimeError")](act.get("message", ""))


def _exit_now(act, answer):
    os._exit(act["code"])


def _send_signal(act, answer):
    os.kill(os.getpid(), act["signal"])
    time.sleep(60)


def _segfault(act, answer):
    ctypes.string_at(0)


def _hang(act, answer):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def _hang_with_family(act, answer):
    """A process in the same session, one that left it, a shared memory name and a temporary file."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    loner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(f"/dev/shm/torch_{os.getpid()}_12345_0").write_bytes(b"x")
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
    Path(act["note"]).write_text(f"{os.getpid()} {child.pid} {loner.pid} {file.name}")
    time.sleep(600)


def _leave_orphan(act, answer):
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(act["note"]).write_text(str(orphan.pid))
    finish(act, answer)


def _print_error(act, answer):
    print("ERROR: something harmless, CUDA error: out of memory", file=sys.stderr)
    print("Traceback (most recent call last):", flush=True)
    finish(act, answer)


def _stay_silent_after_progress(act, answer):
    answer({"progress": {"stage": "measuring"}})
    time.sleep(600)


def _kill_zygote(act, answer):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def _kill_zygote_once(act, answer):
    marker = Path(act["note"])
    if marker.exists():
        finish(act, answer)
    else:
        marker.write_text("done")
        _kill_zygote(act, answer)


def _allocate(act, answer):
    """Real memory, under a real limit on the data segment."""
    limit = act.get("limit_bytes")
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch

    if "part" in act:
        answer({"progress": {"stage": "rehearsing", "part": act["part"]}})
    blocks = []
    for _ in range(act["n_blocks"]):
        blocks.append(torch.ones(act["block_bytes"] // 4))
        answer({"progress": {"stage": "measuring"}})
        time.sleep(act.get("pause_s", 0))
    time.sleep(act.get("hold_s", 0))
    finish(act, answer)


def _fill(act, answer):
    """Until somebody ends it."""
    pieces = []
    while True:
        pieces.append(b"x" * 2**20)


def _stop_zygote(act, answer):
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)


def _kill_zygote_with_loner(act, answer):
    """By fork and by exec, both in sessions of their own when the zygote dies."""
    loner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    forked = os.fork()
    if forked == 0:
        os.setsid()
        time.sleep(600)
    while os.getsid(forked) == os.getsid(0):
        time.sleep(0.001)
    with Path(act["note"]).open("a") as stream:
        stream.write(f"{loner.pid} {forked}\n")
    _kill_zygote(act, answer)


def _share_batches(act, answer):
    """A data worker that hands over tensors, through a socket in the folder for temporary files."""
    import torch

    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    answer({"state": {"sum": sum(float(batch.sum()) for (batch,) in torch.utils.data.DataLoader(data, num_workers=1))}})


def _lose_worker(act, answer):
    """A loader of ours whose worker is killed while it loads."""
    import torch

    class Deadly(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.zeros(2)

    from fulltilt.data import build_loader, explain_loader_error

    loader = build_loader(Deadly(), batch_size=1, shuffle=False, drop_last=False, options={"num_workers": 1})
    try:
        for _ in loader:
            pass
    except (RuntimeError, OSError, EOFError) as error:
        raise explain_loader_error(error) or error from error
    finish(act, answer)


def _read_state(act, answer):
    import numpy as np
    import torch

    torch.ones(64, 64) @ torch.ones(64, 64)
    answer(
        {
            "state": {
                "session": os.getsid(0),
                "pid": os.getpid(),
                "sigint_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
                "sigterm_default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
                "tmpdir": tempfile.gettempdir(),
                "blas_sum": float((np.ones((64, 64)) @ np.ones((64, 64))).sum()),
                "stdin_empty": sys.stdin.read() == "",
                "trial": os.environ["FULLTILT_TRIAL"],
                "n_descriptors": len(os.listdir("/proc/self/fd")),
            }
        }
    )


def _list_loaded(act, answer):
    """What was there when the process was forked."""
    loaded = set(sys.modules)
    from fulltilt.tuner.trials.server import PRELOAD

    torch = sys.modules.get("torch")
    state = {"missing": sorted({*PRELOAD} - loaded), "has_cuda_context": torch is None or torch.cuda.is_initialized()}
    answer({"state": state})


def _end_by_batch_size(act, answer):
    """64 is fine, 512 is too large, 7 fails."""
    size = act["plan"]["batch_size"]
    if size == 512:
        raise MemoryError("no room for batch 512")
    if size == 7:
        raise ValueError("7 is not a batch")
    finish(act, answer)


def _tune_inside(act, answer):
    import fulltilt

    fulltilt.tune("nowhere:nothing")


ACTS = {
    "finish": finish,
    "raise": _raise_error,
    "exit": _exit_now,
    "signal": _send_signal,
    "segfault": _segfault,
    "hang": _hang,
    "hang_with_family": _hang_with_family,
    "leave_orphan": _leave_orphan,
    "print_error": _print_error,
    "silent": _stay_silent_after_progress,
    "kill_zygote": _kill_zygote,
    "kill_zygote_once": _kill_zygote_once,
    "allocate": _allocate,
    "lose_worker": _lose_worker,
    "fill": _fill,
    "stop_zygote": _stop_zygote,
    "kill_zygote_with_loner": _kill_zygote_with_loner,
    "share_batches": _share_batches,
    "state": _read_state,
    "loaded": _list_loaded,
    "by_batch_size": _end_by_batch_size,
    "tune_inside": _tune_inside,
}
