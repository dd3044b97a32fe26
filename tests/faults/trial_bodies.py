"""What the trial processes of the fault tests do beside what those of the chaos run do (``chaos_bodies``)."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chaos_bodies

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def do(request, answer):
    """The source's configuration says what happens: ``{"act": name, …}``."""
    details = dict(request["source"]["config"])
    Child(answer, Path(os.devnull), request).act(details.pop("act"), details)


class Child(chaos_bodies.Child):
    """One trial process; each method is an act."""

    def hang_with_company(self, note):
        """A process in the same session, one that left it, a shared memory name and a temporary file."""
        child, loner = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)
        Path(f"/dev/shm/torch_{os.getpid()}_12345_0").write_bytes(b"x")
        file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        Path(note).write_text(f"{os.getpid()} {child.pid} {loner.pid} {file.name}")
        time.sleep(600)

    def leave_orphan(self, note):
        Path(note).write_text(str(subprocess.Popen(SLEEP, start_new_session=True).pid))
        self.finish()

    def stay_silent(self):
        self.answer({"progress": {"stage": "measuring"}})
        time.sleep(600)

    def stop_zygote(self):
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(600)

    def kill_zygote_with_loner(self, note):
        """By fork and by exec, both in sessions of their own when the zygote dies."""
        loner = subprocess.Popen(SLEEP, start_new_session=True)
        forked = os.fork()
        if forked == 0:
            os.setsid()
            time.sleep(600)
        while os.getsid(forked) == os.getsid(0):
            time.sleep(0.001)
        with Path(note).open("a") as stream:
            stream.write(f"{loner.pid} {forked}\n")
        self.kill_zygote()

    def allocate(self, n_blocks, block_bytes, limit_bytes=None, part=None, pause_s=0, hold_s=0):
        """Real memory, under a real limit on the data segment."""
        if limit_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        import torch

        if part:
            self.answer({"progress": {"stage": "rehearsing", "part": part}})
        blocks = []
        for _ in range(n_blocks):
            blocks.append(torch.ones(block_bytes // 4))
            self.answer({"progress": {"stage": "measuring"}})
            time.sleep(pause_s)
        time.sleep(hold_s)
        self.finish()

    def fill(self):
        """Until somebody ends it."""
        pieces = []
        while True:
            pieces.append(b"x" * 2**20)

    def share_batches(self):
        """A data worker that hands over tensors, through a socket in the folder for temporary files."""
        import torch

        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), num_workers=1)
        self.answer({"state": {"sum": sum(float(batch.sum()) for (batch,) in loader)}})

    def lose_worker(self):
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
        self.finish()

    def tell_state(self):
        """What the process is like, and what was there when it was forked."""
        loaded = set(sys.modules)
        from fulltilt.tuner.trials.server import PRELOAD

        torch = sys.modules.get("torch")
        state = {
            "session": os.getsid(0),
            "pid": os.getpid(),
            "sigint_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "sigterm_default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            "tmpdir": tempfile.gettempdir(),
            "stdin_empty": sys.stdin.read() == "",
            "trial": os.environ["FULLTILT_TRIAL"],
            "n_descriptors": len(os.listdir("/proc/self/fd")),
            "missing": sorted({*PRELOAD} - loaded),
            "has_cuda_context": torch is None or torch.cuda.is_initialized(),
        }
        self.answer({"state": state})

    def end_by_batch_size(self):
        """64 is fine, 512 is too large, 7 fails."""
        size = self.request["plan"]["batch_size"]
        if size == 512:
            raise MemoryError("no room for batch 512")
        if size == 7:
            raise ValueError("7 is not a batch")
        self.finish()

    def tune_inside(self):
        import fulltilt

        fulltilt.tune("nowhere:nothing")
