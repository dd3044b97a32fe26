"""Join a lab's cluster as one machine, say what its sensors read, and leave nothing behind."""

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from fulltilt.errors import UsageError
from fulltilt.hardware import RealNvml
from fulltilt.hardware.proctree import find_marked, kill_marked, read_process
from fulltilt.hardware.sampler import Sampler
from fulltilt.lab.executors.cluster import MARK, RESOURCE, read_end_of_log, start_ray
from fulltilt.lab.executors.local import Slot, build_cpu_slots, find_busy
from fulltilt.lab.runner.link import read_error, trust
from fulltilt.lab.runner.order import Machine
from fulltilt.lab.versions import read_versions
from fulltilt.records.run_folder import write_atomic, write_secret
from fulltilt.report.readings import build_entry, list_lines

TOKEN = "token"  # in the machine's folder: with it the machine comes back without being asked in again
RAY = "ray-mark"  # in it too: what the processes of Ray carry that were started last
TELEMETRY_S, TURN_S = 2.0, 0.5
AGAIN_S = 5.0  # between tries to come back to a head that is away
JOIN_S = 150.0  # the head may have to be started first
STOP_S = 10.0  # for Ray to say goodbye
GUARD = b"fulltilt.lab.runner.guard"


def build_simulated_slots(n: int) -> list[Slot]:
    """Build what stands in for GPUs where a cluster is tried out. Each trains on a share of the CPU."""
    return [dataclasses.replace(slot, name=f"simulated:{k}") for k, slot in enumerate(build_cpu_slots(range(n)))]


class RayNode:
    """One machine: its folder, which it shares with nobody, and its part of the cluster.

    Args:
        url: How it reaches the server.
        boot: Changes when the machine starts again.
        authority: PEM file of who signed the server's certificate; None: who the machine trusts.
    """

    def __init__(
        self, *, url: str, name: str, boot: str, folder: Path, slots: Sequence[Slot], authority: Path | None = None
    ):
        self.name, self._boot, self._folder, self._slots = name, boot, folder, slots
        signer = authority and str(authority.resolve())
        self._client = httpx.Client(base_url=url, verify=trust(signer), trust_env=False)
        environs = {slot.name: slot.environ for slot in slots}
        root = str((folder / "attempts").resolve())
        self._machine = Machine(url=url, root=root, authority=signer, environs=environs)
        (self._mark,) = (f"{key}={value}" for key, value in self._machine.to_environment().items())
        self._nvml = RealNvml()
        self._sampler = Sampler(self._nvml, folder=folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._tried_s = self._told_s = float("-inf")

    def read_own_token(self) -> str | None:
        """Return the token that an earlier join has left."""
        with contextlib.suppress(OSError):
            return (self._folder / TOKEN).read_text()

    def join(self, token: str) -> None:
        """Join, and start this machine's part of the cluster; what an earlier part of it left is ended first.

        Raises:
            UsageError: the server refuses, with its words, or does not answer.
        """
        self._tried_s, devices = time.monotonic(), [slot.name for slot in self._slots]
        said = {"name": self.name, "boot": self._boot, "versions": read_versions(), "devices": devices}
        try:
            answer = self._post("/api/join", token, said, timeout_s=JOIN_S)
        except httpx.TransportError as error:
            raise UsageError(f"the lab at {self._machine.url} does not answer ({error}); is it running?") from None
        if answer.is_error:
            raise UsageError(f"the lab does not take this machine: {read_error(answer)}")
        found = answer.json()
        self._token = found["token"]
        write_secret(self._folder / TOKEN, self._token)
        self._start(found["address"], found["secret"])

    def turn(self) -> str | None:
        """Say what the sensors read, come back where Ray has ended; return what a person should know."""
        assert self._process is not None
        news, now_s = None, time.monotonic()
        if self._process.poll() is not None and now_s - self._tried_s > AGAIN_S:
            news = f"Ray has ended here ({read_end_of_log(self._folder) or 'it said nothing'}); joining again"
            try:
                self.join(self._token)
            except UsageError as error:
                news = str(error)
        if now_s - self._told_s > TELEMETRY_S:
            self._told_s = now_s
            self._tell(is_leaving=False)
        return news

    def leave(self, is_urgent: Callable[[], bool]) -> None:
        """Take nothing more, let what runs save and end, and end all that is here."""
        self._tell(is_leaving=True)
        asked = set[int]()
        while (guards := set(self._find_guards())) and not is_urgent():
            for pid in guards - asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            asked |= guards
            time.sleep(TURN_S)
            self._tell(is_leaving=True)
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)  # Ray's head hears of it at once then, and not after a quarter of a minute
        kill_marked(self._mark)
        if self._process is not None:
            self._process.wait()
        self._client.close()
        self._nvml.close()

    def _start(self, address: str, secret: str) -> None:
        note, mark = self._folder / RAY, secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):  # also of a process before this one, which was killed
            kill_marked(f"{MARK}={note.read_text()}")  # attempts go on: they do not carry it
        write_atomic(note, mark)
        resources = {f"{RESOURCE}{self.name}:{slot.name}": 1 for slot in self._slots}
        gpus = [slot for slot in self._slots if not slot.name.startswith("cpu")]
        words = [f"--address={address}", f"--num-gpus={len(gpus)}", f"--resources={json.dumps(resources)}"]
        visible = ",".join(filter(None, (slot.environ["CUDA_VISIBLE_DEVICES"] for slot in gpus)))
        environment = self._machine.to_environment() | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
        environment["RAY_worker_maximum_startup_concurrency"] = str(len(self._slots))
        self._process = start_ray(words, folder=self._folder, token=secret, mark=mark, environment=environment)

    def _find_guards(self) -> list[int]:
        """Find the guards of attempts here; a runner looks the same, and is the child of one."""
        found = []
        for pid in find_marked(self._mark):
            with contextlib.suppress(OSError):
                if GUARD in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
        return [pid for pid in found if (entry := read_process(pid)) and entry.parent_pid not in found]

    def _tell(self, *, is_leaving: bool) -> None:
        sample = self._sampler.read()
        said = {"lines": list_lines(sample), "sample": build_entry(sample), "is_leaving": is_leaving}
        said["busy"] = find_busy(self._slots, self._nvml)
        with contextlib.suppress(httpx.TransportError):  # the server may be away for a while
            self._post("/api/telemetry", self._token, said)

    def _post(self, path: str, token: str, body: dict[str, Any], *, timeout_s: float = TELEMETRY_S) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return self._client.post(path, json=body, headers=headers, timeout=timeout_s)
