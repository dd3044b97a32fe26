"""Start, find again and end this machine's part of a Ray cluster, by Ray's own command.

This process never imports Ray. What Ray starts carries a mark in its environment, so that all of it can be ended: Ray
leaves processes behind when one of its own was killed.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.hardware.proctree import find_marked, kill_marked
from fulltilt.records.run_folder import write_secret
from fulltilt.web.listening import WILDCARDS

HEAD, SECRET, LOG = "ray.json", "ray-token", "ray.txt"  # in the folder of a lab, the latter two in a machine's too
MARK = "FULLTILT_RAY"  # in the environment of Ray's own processes
PYTHON = "FULLTILT_PYTHON"  # what runs attempts
RESOURCE = "fulltilt:"  # a device of a machine is Ray's resource ``fulltilt:MACHINE:DEVICE``, of which there is one
OBJECT_STORE_BYTES = 80_000_000  # about the least that Ray takes; attempts keep nothing there
KEPT_BACK = ("FULLTILT_LAB_TOKEN", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "CUDA_VISIBLE_DEVICES")  # of our own environment


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The head of a lab's cluster: where machines join, where jobs are sent, and the secret of both.

    Attributes:
        mark: In the environment of its processes; another one after each start.
        started_s: Unix time.
    """

    address: str
    dashboard: str
    token: str
    mark: str
    started_s: float

    def is_running(self) -> bool:
        return bool(find_marked(f"{MARK}={self.mark}"))

    def end(self) -> None:
        kill_marked(f"{MARK}={self.mark}")


def read_head(folder: Path) -> Head | None:
    """Return the head that belongs to a lab, running or not; None: it never had one."""
    try:
        return Head(**json.loads((folder / HEAD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def start_head(folder: Path, *, host: str, now_s: float) -> tuple[Head, subprocess.Popen[bytes]]:
    """Start a head, without waiting for it, in place of the one before.

    Its ports are new ones: Ray does not start where machines of a head that has died still look for it.
    """
    if (old := read_head(folder)) is not None:
        old.end()
    head = Head(
        address=f"{find_ip(host)}:{find_free_port()}",
        dashboard=f"http://127.0.0.1:{find_free_port()}",
        token=secrets.token_urlsafe(32),
        mark=secrets.token_hex(8),
        started_s=now_s,
    )
    write_secret(folder / HEAD, json.dumps(dataclasses.asdict(head)))
    ip, _, port = head.address.rpartition(":")
    words = ["--head", f"--node-ip-address={ip}", f"--port={port}", "--num-gpus=0", "--no-monitor"]
    words += [f"--ray-client-server-port={find_free_port()}", "--include-dashboard=true"]
    words += ["--dashboard-host=127.0.0.1", f"--dashboard-port={head.dashboard.rpartition(':')[2]}"]
    return head, start_ray(words, folder=folder, token=head.token, mark=head.mark)


def start_ray(
    words: Sequence[str], *, folder: Path, token: str, mark: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start Ray's processes of this machine → the one that lasts as long as they do.

    Raises:
        UsageError: Ray is not installed.
    """
    require_ray()
    write_secret(folder / SECRET, token)
    environ = {name: value for name, value in os.environ.items() if name not in KEPT_BACK}
    environ |= {MARK: mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str((folder / SECRET).resolve())}
    environ |= {"RAY_enable_metrics_collection": "0", "DASHBOARD_METRIC_PORT": "-1"}  # these ports ask for no token
    environ["SPT_NOENV"] = "1"  # Ray's agents would write their title over their environment, and the mark in it
    environ |= {PYTHON: sys.executable, **(environment or {})}
    common = ["--block", "--disable-usage-stats", "--num-cpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    common += [f"--dashboard-agent-listen-port={find_free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
            umask=0o077,  # Ray's logs are nobody else's business
        )


def require_ray() -> None:
    """Raise UsageError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("several machines need Ray, which is not installed; pip install 'fulltilt[ray]'")


def read_end_of_log(folder: Path) -> str:
    """Return the last line that Ray's command printed."""
    with contextlib.suppress(OSError):
        lines = (folder / LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[-300:] if lines else ""
    return ""


def find_ip(host: str) -> str:
    """Return the address of this machine under which others reach it, for an address that a server listens at."""
    if host not in ("", *WILDCARDS):
        return socket.gethostbyname(host)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect(("198.51.100.1", 9))  # sends nothing: it says which interface leads outside
        return trial.getsockname()[0]
    return "127.0.0.1"


def find_free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]
