"""Train the model that a check measures, once, by ``fulltilt train`` in the check's own folder."""

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
"""Files that show a folder is in use; the last two belong to a training, which a check must not take over."""

STOP_S = 30.0  # a training that is told to end saves a checkpoint first


def describe_training(config: Config) -> dict[str, Any]:
    """Return the settings that the trained weights depend on."""
    values = config.to_values()
    for lever in load_catalogue().values():
        section, _, name = lever.key.rpartition(".")
        if set(lever.trades) <= {"speed", "memory"} and not lever.changes_recipe(values[section][name]):
            values[section].pop(name)
    parts = {name: values[name] for name in ("task", "model", "loss", "data", "optim", "speed")}
    return parts | {"seed": config.run.seed, "epochs": config.run.epochs}


def find_training(out_dir: Path) -> Path | None:
    """Return the folder of a finished training; None: there is none yet."""
    document = _read_result(out_dir)
    return out_dir / FOLDER if document.get("reason") == "finished" and find_checkpoint(out_dir / FOLDER) else None


def run_training(words: Sequence[str], out_dir: Path) -> Path:
    """Train to the end, resuming an interrupted training, and return its folder.

    ``words`` are the arguments of ``fulltilt train``; its output goes to stderr.

    Raises:
        UsageError: the training refused the configuration.
        TrainingError: it failed; says why.
    """
    folder, result = out_dir / FOLDER, out_dir / RESULT
    result.unlink(missing_ok=True)  # so that a refused training does not leave an older result there
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
    """End the training when this process is interrupted; a second Ctrl-C does not wait for its checkpoint."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        kill_session(process.pid)
        process.wait()
