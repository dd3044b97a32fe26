"""Train for one attempt: ask what to do, start ``fulltilt train``, and end it when it should end."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import StorageError, UsageError
from fulltilt.hardware import resolve_device
from fulltilt.hardware.proctree import build_death_wish, kill_descendants
from fulltilt.lab.runner.guard import FENCED, Deadline, read_clock_s
from fulltilt.lab.runner.link import FencedError, Link, RejectedError, UnreachableError
from fulltilt.lab.runner.order import MARK, Order
from fulltilt.lab.runner.renewal import Renewal
from fulltilt.lab.runner.shipping import CHECKPOINTS, Shipping, list_result_files, pack_result_folders
from fulltilt.lab.scheduling.ends import End, judge_end, read_document
from fulltilt.lab.snapshot import link_what_is_left_out, unpack_code

TRAIN = (sys.executable, "-m", "fulltilt", "train")
TURN_S = 0.1
RETRY_S, N_TRIES = 1.0, 2  # what the server does not take is sent so often
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FULL_BYTES = 1 << 20  # with less a disk is full
MISSING = re.compile(r"\bno module\b|\bimporting \S+ failed", re.IGNORECASE)
# An engine that ends a job signals all its processes, and we hand the signal on: one wish to save and end. That the
# training does so in time is for us to see to.
ONE_WISH = {"FULLTILT_ECHO_S": "3600"}
OWNER = ".attempt"  # in a run folder: the attempt that wrote it last


def run_attempt(order: Order, deadline: Deadline, guard: int) -> int:
    """Run the attempt to its end and return the exit code of the runner.

    Only this thread starts processes: the kernel's death signal follows the thread that started one.
    """
    stop: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: stop.append(number))
    link = Link(order)
    try:
        renewal = Renewal(link, order, deadline)
        task = renewal.begin()
        attempt = _Attempt(order, task, link, guard)
        end = attempt.train(renewal, stop)
        attempt.hand_in(end)
        renewal.stop()
    except FencedError:
        kill_descendants(guard)  # all but this process: what lost its parent is the guard's
        return FENCED
    return 0


class _Attempt:
    """The folders, the process and the files of one attempt on this node."""

    def __init__(self, order: Order, task: Mapping[str, Any], link: Link, guard: int):
        self._order, self._task, self._link, self._guard = order, task, link, guard
        self._root, name = _find_root(order), task["experiment"]
        self._out_dir = self._root / name
        self._notes = self._root / "attempts" / f"{name}-{task['attempt']}"
        self._result = self._notes / "result.json"
        self._shipping: Shipping | None = None

    def train(self, renewal: Renewal, stop: Sequence[int]) -> End:
        """Start the training, and watch it until it ended, was fenced or told to stop."""
        try:
            source = self._prepare()
        except (OSError, StorageError) as error:
            return End(outcome="infra_refused", reason=f"{self._order.node} cannot begin: {error}")
        except UsageError as error:  # of the code, wherever it is tried
            return End(outcome="user_error", reason=str(error))
        log = self._notes / "log.txt"
        self._shipping = Shipping(Link(self._order), log=log, out_dir=self._out_dir, renewal=renewal)
        with log.open("ab", buffering=0) as stream:
            try:
                stream.write(f"{self._task['title']}\n".encode())
                process = subprocess.Popen(
                    self._build_command(source),
                    cwd=source.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    env={**self._build_environment(source), MARK: self._order.mark, **ONE_WISH},
                    start_new_session=True,
                    preexec_fn=build_death_wish(os.getpid()),
                )
            except OSError as error:
                return End(outcome="infra_refused", reason=f"{self._order.node} cannot start it: {error.strerror}")
        self._shipping.start()
        is_stopped = self._watch(process, renewal, stop)
        kill_descendants(self._guard)
        code, document = process.wait(), read_document(self._result)
        if document is None and code and shutil.disk_usage(self._notes).free < FULL_BYTES:
            said = f"no space left for {self._notes} on {self._order.node}; free some there"
            return End(outcome="infra_refused", reason=said)
        end = judge_end(code, document, is_stopped=is_stopped)
        if end.outcome == "user_error" and MISSING.search(end.reason or ""):
            return dataclasses.replace(end, reason=f"on {self._order.node}: {end.reason}")
        return end

    def hand_in(self, end: End) -> None:
        """Bring the server the rest of the log, the last checkpoint and the end, however long it is away."""
        files, left = self._collect() if end.outcome == "succeeded" else ([], [])
        if self._shipping is not None:
            self._shipping.finish()
        n_left = N_TRIES
        while True:  # until the guard ends this
            try:
                sent = [self._link.send(file) for file in files]
                if self._link.finish(end, sent) == "succeeded" and not left:
                    shutil.rmtree(self._out_dir, ignore_errors=True)  # the lab has it
                break
            except RejectedError as error:
                n_left -= 1
                if not n_left:
                    end, files = End(outcome="user_error", reason=f"its result is not taken: {error}"), []
            except UnreachableError:
                pass
            time.sleep(RETRY_S)
        shutil.rmtree(self._notes, ignore_errors=True)

    def _collect(self) -> tuple[list[Path], list[str]]:
        """Return the files of the result, and what cannot be handed in, which the log says."""
        packed, left = pack_result_folders(self._out_dir, self._notes)
        if left:
            said = f"\n[fulltilt: not handed in, and left on {self._order.node}: {', '.join(left)}]\n"
            with contextlib.suppress(OSError), (self._notes / "log.txt").open("ab") as log:
                log.write(said.encode(errors="replace"))
        return [*list_result_files(self._out_dir), *packed, self._result], left

    def _watch(self, process: subprocess.Popen[bytes], renewal: Renewal, stop: Sequence[int]) -> bool:
        """Wait for the end of the process, and return whether it was asked to stop."""
        asked_s: float | None = None
        while process.poll() is None:
            if renewal.is_fenced:
                raise FencedError
            if asked_s is None and (stop or renewal.wish or read_clock_s() > renewal.ends_s):
                asked_s = read_clock_s()
                process.send_signal(signal.SIGTERM)
            if asked_s is not None and read_clock_s() - asked_s > self._task["grace_s"]:
                kill_descendants(self._guard)
            time.sleep(TURN_S)
        return asked_s is not None

    def _prepare(self) -> Path:
        """Lay out code and checkpoint, and return the configuration file."""
        self._notes.mkdir(parents=True, exist_ok=True)
        self._result.unlink(missing_ok=True)
        self._lay_checkpoint()
        (self._out_dir / OWNER).write_text(str(self._task["attempt"]))
        code = self._task["code"]
        if code is None:
            return Path(self._task["source"])
        folder, beside = self._root / "code" / code["digest"], Path(code["root"])
        if folder.exists():
            link_what_is_left_out(folder, beside)
        else:
            archive = folder.with_suffix(f".{os.getpid()}.tar")
            self._fetch(code["digest"], archive)
            unpack_code(archive, folder, beside=beside)
            archive.unlink()
        return folder / code["entry"]

    def _lay_checkpoint(self) -> None:
        """Start from what the attempt before left here, or else from the newest checkpoint that is whole."""
        if _read_owner(self._out_dir) == self._task["attempt"] - 1:
            return
        shutil.rmtree(self._out_dir, ignore_errors=True)
        self._out_dir.mkdir(parents=True)
        for number in sorted({file["attempt"] for file in self._task["checkpoints"]}, reverse=True):
            try:
                for file in self._task["checkpoints"]:
                    if file["attempt"] == number and file["name"] in CHECKPOINTS:
                        self._fetch(file["digest"], self._out_dir / file["name"])
                return
            except StorageError as error:  # damaged: the one before has to do
                if isinstance(error.__cause__, OSError):  # there is no room for it: the next node starts from it
                    raise

    def _fetch(self, digest: str, target: Path) -> None:
        while True:  # until the guard ends this
            try:
                return self._link.fetch(digest, target)
            except UnreachableError:
                time.sleep(RETRY_S)

    def _build_environment(self, source: Path) -> dict[str, str]:
        """Put the folders of the code that was submitted before those where this node has some of its own."""
        code = self._task["code"]
        depth = 0 if code is None else len(Path(code["entry"]).parents)
        own = [*map(str, source.parents[:depth]), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, own))}

    def _build_command(self, source: Path) -> list[str]:
        command = [*(self._order.command or TRAIN), str(source), *self._task["words"]]
        command += _choose_devices(self._task["n_devices"])
        return [*command, "--resume", "--out", str(self._out_dir), "--json", str(self._result)]


def _find_root(order: Order) -> Path:
    """Return the folder for what attempts write here: the order's, or below one of this node and user."""
    own = os.environ.get("SLURM_TMPDIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() / "fulltilt" / order.root


def _choose_devices(n_devices: int) -> list[str]:
    """Return the words for what the engine gave: the visible GPUs, or as many processes on the CPU."""
    if resolve_device("auto") == "cpu":
        return ["run.device=cpu", *([f"run.n_ranks={n_devices}"] if n_devices > 1 else [])]
    return [f"run.device={json.dumps(list(range(n_devices))) if n_devices > 1 else 'cuda:0'}"]


def _read_owner(out_dir: Path) -> int | None:
    try:
        return int((out_dir / OWNER).read_text())
    except (OSError, ValueError):
        return None
