"""The classifier that a check measures, trained once by ``fulltilt train`` in the check's own folder."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS, find_checkpoint
from fulltilt.errors import TrainingError, UsageError
from fulltilt.hardware.proctree import kill_session, set_death_signal
from fulltilt.levers import load_catalogue

if TYPE_CHECKING:
    from fulltilt.config import Config

FOLDER, RESULT = "training", "training.json"
RESULTS = (FOLDER, RESULT, NEWEST, PREVIOUS)
"""What makes a folder somebody's; the last two that of a training, which no check may take over."""

STOP_S = 30.0  # a training that is told to end saves a checkpoint first


def describe_training(config: Config) -> dict[str, Any]:
    """What the weights depend on: another value of any of it is another training."""
    values = config.to_values()
    for lever in load_catalogue().values():
        section, _, name = lever.key.rpartition(".")
        if set(lever.trades) <= {"speed", "memory"} and not lever.changes_recipe(values[section][name]):
            values[section].pop(name)
    parts = {name: values[name] for name in ("task", "model", "loss", "data", "optim", "speed")}
    return parts | {"seed": config.run.seed, "epochs": config.run.epochs}


def find_training(out_dir: Path) -> Path | None:
    """The folder of a training that came to its end; None: there is none yet."""
    document = _read_result(out_dir)
    return out_dir / FOLDER if document.get("reason") == "finished" and find_checkpoint(out_dir / FOLDER) else None


def run_training(words: Sequence[str], out_dir: Path) -> Path:
    """Train to the end, or go on where an earlier start was broken off → the folder of the training.

    ``words`` are what a user would give ``fulltilt train``; what it says goes to stderr as it comes.

    Raises:
        UsageError: the training refused the configuration.
        TrainingError: it failed; says why.
    """
    folder, result = out_dir / FOLDER, out_dir / RESULT
    result.unlink(missing_ok=True)  # a refusal would leave an earlier one there
    process = subprocess.Popen(
        [sys.executable, "-m", "fulltilt", "train", *words, "--out", folder, "--json", result, "--resume"],
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        preexec_fn=functools.partial(set_death_signal, signal.SIGTERM),
    )
    try:
        code = process.wait()
    finally:
        _end(process)
    if code == 0:
        return folder
    said = _read_result(out_dir).get("error", "its words are above")
    kind = UsageError if code == UsageError.exit_code else TrainingError
    raise kind(f"the training that was to be measured ended with exit code {code}: {said}")


def _read_result(out_dir: Path) -> dict[str, Any]:
    try:
        return json.loads((out_dir / RESULT).read_text())
    except FileNotFoundError:
        return {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no training behind when this process is interrupted; a second Ctrl-C does not wait for its checkpoint."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        kill_session(process.pid)
        process.wait()
