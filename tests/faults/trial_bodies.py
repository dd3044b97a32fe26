"""What the trial processes of the fault tests do beside what those of the chaos run do (``chaos_bodies``)."""

import json
import os
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

    def start_company(self):
        """A process in the same session, one that left it, a shared memory name and a temporary file."""
        child, loner = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)
        Path(f"/dev/shm/torch_{os.getpid()}_12345_0").write_bytes(b"x")
        file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        return f"{child.pid} {loner.pid} {file.name}"

    def hang_with_company(self, note):
        Path(note).write_text(f"{os.getpid()} {self.start_company()}")
        time.sleep(600)

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

    def allocate(self, n_blocks, block_bytes, part=None, pause_s=0, hold_s=0):
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

    def tell_variables(self, names):
        """What the server that this process was forked from was started with, and which one that is."""
        started = dict(pair.split("=", 1) for pair in Path("/proc/self/environ").read_text().split("\0") if pair)
        with Path(self.request["source"]["base_dir"], "told").open("a") as stream:
            stream.write(json.dumps([os.getppid(), [started.get(name) for name in names]]) + "\n")
        self.finish()

    def end_by_batch_size(self):
        """64 is fine, 512 is too large, 7 fails."""
        size = self.request["plan"]["batch_size"]
        if size == 512:
            raise MemoryError("no room for batch 512")
        if size == 7:
            raise ValueError("7 is not a batch")
        if self.request["kind"] != "turns":
            return self.finish()
        self.answer({"blocks": 0})
        for number, order in enumerate(self.answer.take_orders(), start=1):
            if order == "end":
                break
            self.answer({"block": {"n_samples": 10, "seconds": 0.01, "stalled_s": 0.0002}, "blocks": number})
        return None

    def tune_inside(self):
        import fulltilt

        fulltilt.tune("nowhere:nothing")

    def take_turns(
        self, note, at=None, then="finish", details=None, has_company=False, rate=1000.0, linger_s=0.0, whole=None,
        stalled_pct=0.0,
    ):  # fmt: skip
        """Blocks of steps until told to end; ``then`` comes in block ``at``, where 0 is before all."""
        kind = self.request["kind"]
        words = self.start_company() if has_company and kind == "turns" else ""
        with Path(note).open("a") as stream:
            stream.write(f"{kind} {os.getpid()} {words}\n")
        if kind == "trial":
            return getattr(self, whole)(**details) if whole else self.finish(rate)
        if at == 0:
            getattr(self, then)(**details or {})
        self.answer({"blocks": 0})
        for number, order in enumerate(self.answer.take_orders(), start=1):
            if order == "end":
                return time.sleep(linger_s)
            if number == at:
                getattr(self, then)(**details or {})
            block = {"n_samples": 10, "seconds": 10 / rate, "stalled_s": stalled_pct / 100 * 10 / rate}
            self.answer({"block": block, "blocks": number})
        return None

    def wait_for(self, path):
        while not Path(path).exists():
            time.sleep(0.005)

    def rest(self, seconds):
        time.sleep(seconds)
        if self.request["kind"] == "trial":
            self.finish()

    def leave_orphan(self, note):
        """One in a session of its own, whose parent is gone."""
        if os.fork() == 0:
            loner = subprocess.Popen(SLEEP, start_new_session=True)
            Path(note).write_text(f"{loner.pid}")
            os._exit(0)
        os.wait()

    def note_and(self, path, act):
        Path(path).touch()
        getattr(self, act)()
