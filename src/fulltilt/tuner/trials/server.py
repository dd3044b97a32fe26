"""The process that trials are forked from, with torch loaded, one thread and no device context.

``client.Zygote`` starts it with the descriptor of one end of a SOCK_SEQPACKET pair; messages are JSON objects.
In: ``fork`` (with three descriptors: request, link, log), ``kill``. Out: ``ready``, ``failed``, ``forked``,
``refused``, ``exited``. It ends what is left of a trial before it reports ``exited``; as a subreaper it also finds what
moved to a session of its own, once no other trial is alive. It ends with its socket, or when its parent dies, and takes
its trials with it.
"""

import atexit
import contextlib
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
import traceback
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
END_PATIENCE_S = 10.0  # for processes that were killed
SHORT_HOME = "/tmp"
# 107 bytes for the address of a socket, less fulltilt-xxxxxxxx/pymp-xxxxxxxx/listener-xxxxxxxx with its slashes.
HOME_LIMIT_CHARS = 107 - 50


def main() -> None:
    """Load what trials need, then fork one at each request until the parent is gone.

    The words after the descriptor are the modules to load in place of ``PRELOAD``.
    """
    number, *preload = sys.argv[1:]
    control = socket.socket(fileno=int(number))
    wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # on which SIGCHLD and SIGTERM wake the loop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's business
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the loop runs there is nothing to end
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    proctree.set_death_signal(signal.SIGTERM)
    proctree.become_subreaper()
    try:
        _import_modules(preload or PRELOAD)
    except Exception as error:  # process boundary: whatever an import raises, the parent has to hear of it
        _say(control, say="failed", exception_type=type(error).__name__, message=str(error)[:4000])
        raise
    gc.freeze()  # what is loaded now stays shared with every trial
    _say(control, say="ready", scratch_home=_choose_scratch_home())
    _Server(control, wakeup, writer).serve()


def _import_modules(names: tuple[str, ...] | list[str]) -> None:
    """Import modules without what a fork would break.

    OpenBLAS would start its pool at import. A module that asks whether CUDA is there would initialise the driver,
    unless torch answers through NVML.
    """
    before = dict(os.environ)
    os.environ.update({"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        for name in ("OPENBLAS_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"):
            del os.environ[name]
            if name in before:
                os.environ[name] = before[name]


class _Server:
    """Forks trials at request, and tells the end of each."""

    def __init__(self, control: socket.socket, wakeup: int, writer: int):
        self._control, self._wakeup, self._writer = control, wakeup, writer
        self._trials: dict[int, str] = {}  # process → its folder for temporary files
        self._ended: dict[int, int] = {}  # child that has ended → its status

    def serve(self) -> None:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while not stop:
                for key, _ in selector.select():
                    if key.fd == self._wakeup:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wakeup, 4096)
                    elif not self._handle():
                        stop.append(0)
                        break
                self._ended |= _reap()
                while over := self._ended.keys() & self._trials.keys():  # while one is cleaned up, another may end
                    for pid in over:
                        self._clean_up(pid)  # before it is told: whoever is told may be killed before it can
                        _say(
                            self._control, say="exited", pid=pid, exit_code=os.waitstatus_to_exitcode(self._ended[pid])
                        )
                self._ended.clear()
        for pid in list(self._trials):  # nobody else is left to clean up after them
            self._clean_up(pid)

    def _handle(self) -> bool:
        """Do what the next message says; False when there is none, for the parent is gone."""
        message, descriptors = _receive(self._control)
        if message is None:
            return False
        if message["do"] == "kill" and message["pid"] in self._trials:
            proctree.kill_processes(self._find_all_of(message["pid"]), spare_cleaners=True)
        elif message["do"] == "fork":
            try:
                pid = self._fork_trial(message, descriptors)
            except OSError as error:  # no process, no memory, no room for the folder: the next may have better luck
                _say(self._control, say="refused", message=str(error))
            else:
                _say(self._control, say="forked", pid=pid)
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork_trial(self, message: dict[str, Any], descriptors: list[int]) -> int:
        """Fork a trial, with a folder for temporary files that is removed here: this process outlives its search.

        The search names it, and so can remove it whenever this process is the one that was killed.
        """
        parent = os.getpid()
        scratch = message["scratch"]
        os.mkdir(scratch, 0o700)
        try:
            pid = os.fork()
        except OSError:
            os.rmdir(scratch)
            raise
        if pid == 0:
            self._become_trial(message, descriptors, parent)
        self._trials[pid] = scratch
        return pid

    def _become_trial(self, message: dict[str, Any], descriptors: list[int], parent: int) -> NoReturn:
        """In the child: get a session, default signals and a log, run the trial, and exit."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)  # asyncio has done that already, from Python 3.12 on, where torch loads it
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            proctree.set_death_signal(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            self._control.close()
            os.close(self._wakeup)
            os.close(self._writer)
            request, link, log = descriptors
            null = os.open(os.devnull, os.O_RDONLY)
            for standard, file in enumerate((null, log, log)):
                os.dup2(file, standard)
            os.close(null)
            os.close(log)
            from fulltilt.tuner.trials import trial

            code = trial.serve_request(request, link, scratch=message["scratch"], body=message["body"])
            atexit._run_exitfuncs()  # as ``sys.exit`` would: temporary folders of user code go with it
        except BaseException:
            traceback.print_exc()  # else nobody would hear of it
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _clean_up(self, trial: int) -> None:
        """Kill what is left of a trial and wait for its end; remove its shared memory and folder."""
        seen = {trial}
        start = time.monotonic()
        while left := self._find_all_of(trial):
            seen.update(left)
            waited_s = time.monotonic() - start
            proctree.kill_processes(left, spare_cleaners=waited_s < proctree.CLEANER_GRACE_S)
            self._ended |= _reap()
            if waited_s > END_PATIENCE_S:
                break
            time.sleep(0.002)
        proctree.remove_shared_segments(seen)
        shutil.rmtree(self._trials.pop(trial), ignore_errors=True)

    def _find_all_of(self, trial: int) -> list[int]:
        """Find what is left of a trial; of the last one, that is all below this process, in any session."""
        return proctree.find_descendants(os.getpid()) if len(self._trials) == 1 else proctree.find_members(trial)


def _reap() -> dict[int, int]:
    """Collect every child that has ended: process → status."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
            ended[found[0]] = found[1]
    return ended


def _choose_scratch_home() -> str:
    """Choose the usual temporary folder, unless a worker's socket below it would get too long a name."""
    usual = tempfile.gettempdir()
    if len(usual) <= HOME_LIMIT_CHARS or not os.access(SHORT_HOME, os.W_OK | os.X_OK):
        return usual
    return SHORT_HOME


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
    with contextlib.suppress(ConnectionError):
        control.send(json.dumps(message).encode())
