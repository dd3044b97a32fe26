"""What the trial processes of the chaos run do. Standard library only: a thousand of them have to be light."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 16384, 1 << 18
MIB = 2**20
FOREVER_S = 3600


def do(request: Mapping[str, Any], answer: Callable[[Mapping[str, Any]], None]) -> None:
    """The schedule says what happens to the plan's number, which travels as its batch size."""
    config = request["source"]["config"]
    fault = json.loads(Path(config["schedule"]).read_text())[request["plan"]["batch_size"] - 1]
    Child(answer, Path(config["notes"]), request).act(fault["act"], fault["details"])


class Child:
    """One trial process. ``note`` writes down what it is about to leave behind, for whoever looks afterwards."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], None], notes: Path, request: Mapping[str, Any]):
        self.answer, self.notes, self.request = answer, notes, request

    def act(self, names: str, details: Mapping[str, Any]) -> None:
        """Acts in turn, with commas between them; ``details`` are for the last one."""
        *before, last = names.split(", ")
        for name in before:
            getattr(self, name)()
        getattr(self, last)(**details)

    def note(self, path: str) -> str:
        with self.notes.open("a") as stream:
            stream.write(path + "\n")
        return path

    def begin(self) -> None:
        self.answer({"progress": {"stage": "measuring"}})

    def finish(self, rate: float = 1000.0) -> None:
        plan = self.request["plan"]
        step_ms = 1000 * plan["batch_size"] * plan.get("accumulate", 1) / rate  # a row is held against itself
        phases = dict.fromkeys(("data_wait", "forward", "backward", "optimizer"), step_ms / 4)
        measurement = {
            "phases_ms": {**phases, "h2d": None, "other": 0.0, "step": step_ms}, "samples_per_s": rate,
            "samples_per_s_ci95": [rate - 1, rate + 1], "block_samples_per_s": [rate - 1, rate, rate + 1],
            "n_steps": 12, "n_warmup_steps": 4, "memory_rss_peak_gib": 0.1, "null_reasons": {},
            "observed": {"batch_size": plan["batch_size"]},  # a row is kept only where levers were read back
        }  # fmt: skip
        self.begin()
        self.answer({"measurement": measurement})

    def raise_error(self, type: str = "RuntimeError", message: str = "") -> None:
        raise (getattr(builtins, type, None) or builtins.type(type, (RuntimeError,), {}))(message)

    def raise_from_memory(self) -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise RuntimeError("step 3 failed") from error

    def raise_unprintable(self) -> None:
        class MuteError(Exception):
            def __str__(self) -> str:
                raise ValueError("no words")

        raise MuteError

    def raise_with_undecodable_name(self) -> None:
        Path(os.fsdecode(b"/nowhere/\xff\xfe.bin")).read_bytes()

    def recurse(self) -> None:
        self.recurse()

    def call_exit(self, code: int) -> None:
        sys.exit(code)

    def ask_for_too_much(self) -> None:
        limit_data(64 * MIB)
        bytearray(1024 * MIB)

    def fill_memory(self) -> None:
        """In small pieces, so that nothing is left to tell of it with."""
        limit_data(48 * MIB)
        pieces = []
        while True:
            pieces.append(bytes(500))

    def abort_with(self, words: str) -> None:
        for _ in range(30):
            threading.Thread(target=time.sleep, args=(FOREVER_S,), daemon=True).start()
        os.write(2, words.encode())
        os.abort()

    def die_of_kernel(self, counter: str, is_worker: bool = False) -> None:
        """The counter stands for the kernel's; that it moved is all the evidence that there is."""
        Path(counter).write_text(str(int(Path(counter).read_text()) + 1))
        if is_worker:
            raise RuntimeError("DataLoader worker (pid 4242) is killed by signal: Killed. ")
        os.kill(os.getpid(), signal.SIGKILL)

    def fill_shared_memory(self) -> None:
        """As torch does: a name in /dev/shm, room for it, and the kernel's answer in torch's words."""
        if not mount_small_shm():
            raise OSError(28, "No space left on device", "/dev/shm/torch_1_1_0")
        file = os.open(f"/dev/shm/torch_{os.getpid()}_1_0", os.O_CREAT | os.O_RDWR)
        try:
            os.posix_fallocate(file, 0, 8 * MIB)
        except OSError as error:
            raise RuntimeError(
                f"unable to allocate shared memory(shm) for file </torch_1_1_0>: {error.strerror} ({error.errno})"
            ) from None

    def send(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(FOREVER_S)

    def kill_own_group(self) -> None:
        os.killpg(0, signal.SIGKILL)

    def segfault(self) -> None:
        ctypes.string_at(0)

    def bus_error(self) -> None:
        read_cut_file()

    def leave_at_once(self, code: int) -> None:
        os._exit(code)

    def hang(self, ignoring: list[int] | None = None) -> None:
        for number in ignoring or ():
            signal.signal(number, signal.SIG_IGN)
        time.sleep(FOREVER_S)

    def spin(self) -> None:
        while True:
            pass

    # What it leaves behind.

    def leave_tracked_memory(self) -> None:
        from multiprocessing import shared_memory

        segment = shared_memory.SharedMemory(create=True, size=4096)
        self.note(f"/dev/shm/{segment.name}")

    def start_family(self) -> None:
        """Children by fork and by exec, in this session and out of it, and one that had a parent."""
        for is_loner in (False, True):
            subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=is_loner)
            if os.fork() == 0:
                if is_loner:
                    os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if os.fork() == 0 or is_loner:
                    time.sleep(FOREVER_S)
                os._exit(0)

    def leave_names(self) -> None:
        Path(self.note(f"/dev/shm/torch_{os.getpid()}_{self.request['id']}_0")).write_bytes(b"x" * 4096)
        deep = Path(tempfile.mkdtemp(prefix="pymp-")) / "a" / "b"
        deep.mkdir(parents=True)
        (deep / "file").write_bytes(b"x")
        handle, _ = tempfile.mkstemp()
        os.write(handle, b"x")

    # The socket that answers go through.

    def close_link(self) -> None:
        os.closerange(3, 256)

    def write_garbage(self, lines: list[str], *, finishes: bool = True) -> None:
        for line in lines:
            os.write(_find_link(), line.encode("latin-1"))
        self.finish() if finishes else os._exit(0)

    def flood(self, n_mib: int) -> None:
        with open(_find_link(), "wb", closefd=False) as link:
            for _ in range(n_mib):
                link.write(b"{" * MIB)
            link.write(b"\n")
        self.finish()

    def print_and_finish(self, words: str) -> None:
        print(words, flush=True)
        print(words, file=sys.stderr, flush=True)
        self.finish()

    def print_buffered_and_finish(self, words: str) -> None:
        """Standard output of a trial is a file: it goes out at the end, unless PYTHONUNBUFFERED says otherwise."""
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        print(words)
        self.finish()

    def kill_zygote(self, has_family: bool = False, marker: str | None = None) -> None:
        """With a marker, the first time only."""
        if marker is not None:
            try:
                Path(f"{marker}-{self.request['id']}").touch(exist_ok=False)
            except FileExistsError:
                return self.finish()
        if has_family:
            self.start_family()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(FOREVER_S)
        return None


def read_cut_file() -> None:
    """Read a page of a mapped file that is cut meanwhile: SIGBUS."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        view = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        view[0]


def limit_data(more_bytes: int) -> None:
    status = Path("/proc/self/status").read_text()
    used_bytes = int(status.partition("VmData:")[2].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + more_bytes, hard))


def mount_small_shm() -> bool:
    """A /dev/shm of 1 MiB that only this process and its children see; False where that is not allowed."""
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0
    )


def _find_link() -> int:
    """The socket for answers, as code finds it that writes to a descriptor by mistake."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
                return number
    raise LookupError("no socket is open")
