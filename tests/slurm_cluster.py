"""A Slurm of our own for tests: a controller and two nodes on this machine, with two GPUs each that are none.

munged, slurmctld and a slurmd a node run as who runs the tests, with all they write in one folder, at ports of the
loopback address only. They end with the block, and with the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from fulltilt.hardware.proctree import build_death_wish

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2")
GPUS = ("/dev/null", "/dev/zero")  # of each node: Slurm looks whether they are devices
PATIENCE_S = 30
SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
KillWait=20
MessageTimeout=2
SlurmctldTimeout=5
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:2
PartitionName=main Nodes=n1,n2 Default=YES State=UP
"""


def find_missing() -> list[str]:
    return [name for name in NEEDED if shutil.which(name) is None]


class Slurm:
    """The processes of a cluster, and its configuration file, which SLURM_CONF names to Slurm's commands."""

    def __init__(self, folder: Path):
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        """Start one of its programs; it goes on in the foreground, as a child of this process."""
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "SLURM_CONF": str(self.conf)},
                start_new_session=True,
                preexec_fn=build_death_wish(os.getpid()),
            )

    def start_controller(self) -> None:
        self.start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))

    def end(self, name: str, *, by_force: bool = False) -> None:
        process = self._processes.pop(name)
        process.kill() if by_force else process.terminate()
        process.wait()

    def run(self, *command: str) -> list[str]:
        """Run one of Slurm's commands and return its lines."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.splitlines()

    def wait_for_nodes(self, *states: str) -> None:
        """Wait until all nodes are in these states."""
        self._wait(lambda: tuple(self.run("sinfo", "-h", "-N", "-o", "%t")) == states)

    def end_jobs(self) -> None:
        self.run("scancel", "--me", "--quiet", "--state=PENDING")
        self.run("scancel", "--me", "--quiet", "--signal=KILL", "--full")
        self._wait(lambda: not self.run("squeue", "-h"))

    def close(self) -> None:
        """End all jobs, and then the programs."""
        with contextlib.suppress(AssertionError):  # it never started
            self.end_jobs()
        for name in reversed(list(self._processes)):
            self.end(name)

    def _wait(self, is_so) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(AssertionError):
                if is_so():
                    return
            assert time.monotonic() < end, self.read_logs()
            time.sleep(0.1)

    def read_logs(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files)


@contextlib.contextmanager
def run_slurm(folder: Path) -> Iterator[Slurm]:
    slurm = Slurm(folder)
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(contextlib.closing(socket.socket())) for _ in range(1 + len(NODES))]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    host = socket.gethostname().partition(".")[0]
    slurm.conf.write_text(SETTINGS.format(host=host, ports=ports, user=os.geteuid(), folder=folder))
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in GPUS))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    (folder / "state").mkdir(mode=0o700)
    files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
    places = [f"--{option}={folder / name}" for option, name in files.items()]
    # By force: it would have everybody see its socket, and nobody else is to.
    try:
        slurm.start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *places)
        slurm.start_controller()
        for node in NODES:
            slurm.start(f"slurmd-{node}", "slurmd", "-D", "-f", str(slurm.conf), "-N", node)
        slurm.wait_for_nodes("idle", "idle")
        yield slurm
    finally:
        slurm.close()
