"""The process that trials are forked from: torch is loaded, nothing has run, one thread, no device context.

Started by ``process.Zygote`` as ``python -m fulltilt.tuner.trials.server FD``. ``FD`` is one end of a SOCK_SEQPACKET
pair; messages are JSON objects. In: ``fork`` (with three descriptors: request, answers, log), ``kill``,
``status``. Out: ``ready``, ``failed``, ``forked``, ``exited``, ``status``.

When the last process of a trial should be gone, this process ends what is left of it before it reports
``exited``. It is a subreaper, so that also holds for what moved to a session of its own. It ends
with its socket, or when its parent dies, and takes its trial with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from fulltilt.hardware import proctree

# The modules that a trial needs and that are not the user's.
PRELOAD = (
    "numpy",
    "numpy.ma",
    "torch",
    "torch.utils.data",
    "torch.utils.flop_counter",
    "torch._dynamo",  # every optimizer imports it when it is built: 0.9 s a trial otherwise
    "h5py",
    "fulltilt.config.loading",  # the rooms load their parts on first use: each trial would pay for that again
    "fulltilt.hardware",
    "fulltilt.measure.limit",
    "fulltilt.engine.build.assemble",
    "fulltilt.engine.build.builder",
    "fulltilt.engine.measured.measurement",
    "fulltilt.engine.build.optimizers",
    "fulltilt.tuner.trials.kinds",
    "fulltilt.tuner.trials.trial",
)
MESSAGE_LIMIT_BYTES = 65536
SHORT_HOME = "/tmp"
# 107 bytes for the address of a socket, less fulltilt-xxxxxxxx/pymp-xxxxxxxx/listener-xxxxxxxx with its slashes.
HOME_LIMIT_CHARS = 107 - 50


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forked:
    pid: int
    scratch: str


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    control = socket.socket(fileno=int(given[0]))
    preload = tuple(given[1].split(",")) if len(given) > 1 else PRELOAD
    wakeup = _install_signals()
    proctree.set_death_signal(signal.SIGTERM)
    proctree.become_subreaper()
    try:
        _import_modules(preload)
    except Exception as error:  # process boundary: whatever an import raises, the parent has to hear of it
        _say(control, say="failed", exception_type=type(error).__name__, message=str(error)[:4000])
        raise
    gc.freeze()  # what is loaded now stays shared with every trial
    _say(control, say="ready", pid=os.getpid(), scratch_home=_choose_scratch_home())
    _serve(control, wakeup)


def _install_signals() -> int:
    """SIGINT is the parent's business; SIGCHLD and SIGTERM wake the loop. Returns the descriptor to wait on."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the loop runs there is nothing to end
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _import_modules(names: tuple[str, ...]) -> None:
    """Import with nothing that a fork would break.

    OpenBLAS would start its pool at import. A module that asks whether CUDA is there would initialise the driver,
    unless torch answers through NVML.
    """
    own = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _serve(control: socket.socket, wakeup: int) -> None:
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    trial: Forked | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while not stop:
            for key, _ in selector.select():
                if key.fd == wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup, 4096)
                    continue
                message, descriptors = _receive(control)
                if message is None:
                    stop.append(0)
                    break
                trial = _handle(message, descriptors, control, wakeup, trial)
            trial = _report_end(control, trial)
    if trial is not None:  # nobody else is left to clean up after it
        proctree.remove_shared_segments(set(_end_all(trial.pid)))
        shutil.rmtree(trial.scratch, ignore_errors=True)


def _handle(
    message: dict[str, Any], descriptors: list[int], control: socket.socket, wakeup: int, trial: Forked | None
) -> Forked | None:
    if message["do"] == "status":
        _say(control, say="status", **_read_status())
    elif message["do"] == "kill" and trial is not None:
        proctree.kill_processes(proctree.find_descendants(os.getpid()), spare_cleaners=True)
    elif message["do"] == "fork":
        try:
            trial = _fork_trial(message, descriptors, control, wakeup)
        except OSError as error:  # no process, no memory, no room for the folder: the next trial may have better luck
            _say(control, say="refused", message=str(error))
        else:
            _say(control, say="forked", pid=trial.pid)
        for descriptor in descriptors:
            os.close(descriptor)
    return trial


def _report_end(control: socket.socket, trial: Forked | None) -> Forked | None:
    """Reap; when the trial's own process is among the dead, end the rest of it and say so."""
    ended = _reap()
    status = None if trial is None else ended.get(trial.pid)
    if trial is None or status is None:
        return trial
    stray = _end_all(None)
    proctree.remove_shared_segments({trial.pid, *stray})  # here: whoever is told may be killed before it can
    shutil.rmtree(trial.scratch, ignore_errors=True)
    _say(control, say="exited", pid=trial.pid, exit_code=os.waitstatus_to_exitcode(status), stray_pids=stray)
    return None


def _reap() -> dict[int, int]:
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _end_all(trial: int | None, *, patience_s: float = 10.0) -> list[int]:
    """Kill every process below this one and wait until none is left; return those that were seen."""
    seen: set[int] = {trial} if trial is not None else set()
    start = time.monotonic()
    while below := proctree.find_descendants(os.getpid()):
        seen.update(below)
        waited_s = time.monotonic() - start
        proctree.kill_processes(below, spare_cleaners=waited_s < proctree.CLEANER_GRACE_S)
        _reap()
        if waited_s > patience_s:
            break
        time.sleep(0.002)
    return sorted(seen)


def _fork_trial(message: dict[str, Any], descriptors: list[int], control: socket.socket, wakeup: int) -> Forked:
    """The folder for temporary files is made and removed here: this process outlives a search that is killed.

    The search names it, and so can remove it whenever this process is the one that was killed.
    """
    parent = os.getpid()
    scratch = message["scratch"]
    os.mkdir(scratch, 0o700)
    try:
        pid = os.fork()
    except OSError:
        Path(scratch).rmdir()
        raise
    if pid == 0:
        _become_trial(message, descriptors, control, wakeup, parent)
    return Forked(pid=pid, scratch=scratch)


def _choose_scratch_home() -> str:
    """The usual folder, unless a data worker's socket in a folder below it would get too long a name."""
    usual = tempfile.gettempdir()
    if len(usual) <= HOME_LIMIT_CHARS or not os.access(SHORT_HOME, os.W_OK | os.X_OK):
        return usual
    return SHORT_HOME


def _become_trial(
    message: dict[str, Any], descriptors: list[int], control: socket.socket, wakeup: int, parent: int
) -> NoReturn:
    """In the child: a session, default signals and a log of its own, then the trial, then out."""
    code = 1
    try:
        os.setsid()
        writer = signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        proctree.set_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        control.close()
        os.close(wakeup)
        os.close(writer)
        request, answers, log = descriptors
        _redirect(log)
        from fulltilt.tuner.trials import trial

        code = trial.serve_request(request, answers, scratch=message["scratch"], body=message["body"])
        _run_exit_functions()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


def _run_exit_functions() -> None:
    """What ``sys.exit`` would run: temporary folders of user code go with it."""
    import atexit

    atexit._run_exitfuncs()


def _read_status() -> dict[str, Any]:
    """For tests and reports: what could make a fork unsafe."""
    torch = sys.modules.get("torch")
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return {
        "n_threads": len(os.listdir("/proc/self/task")),
        "has_cuda_context": bool(torch is not None and torch.cuda.is_initialized()),
        "n_device_files": sum(link.startswith("/dev/nvidia") for link in links),
        "modules": sorted(name for name in PRELOAD if name in sys.modules),
    }


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    try:
        data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_LIMIT_BYTES, 3)
    except ConnectionError:
        return None, []
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return (json.loads(data) if data else None), descriptors


def _say(control: socket.socket, **message: Any) -> None:
    # A parent that is gone is seen at the next receive.
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
