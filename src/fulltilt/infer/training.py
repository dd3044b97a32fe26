"""Train the model that a check measures, once, by ``fulltilt train`` in the check's own folder."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fulltilt.config import Config
from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS, find_checkpoint
from fulltilt.errors import TrainingError, UsageError
from fulltilt.hardware.proctree import run_in_session
from fulltilt.levers import select_recipe

FOLDER, RESULT = "training", "training.json"
RESULTS = (FOLDER, RESULT, NEWEST, PREVIOUS)  # show a folder in use; the last two by a training, not to be taken over

STOP_S = 30.0  # a training that is told to end saves a checkpoint first


def describe_training(config: Config) -> dict[str, Any]:
    """Return the settings that the trained weights depend on."""
    return select_recipe(config.to_values()) | {"seed": config.run.seed, "epochs": config.run.epochs}


def find_training(out_dir: Path) -> Path | None:
    """Return the folder of a finished training; None: there is none yet."""
    document = _read_result(out_dir)
    return out_dir / FOLDER if document.get("reason") == "finished" and find_checkpoint(out_dir / FOLDER) else None


def run_training(words: Sequence[str], out_dir: Path) -> Path:
    """Train to the end, resuming an interrupted training, and return its folder.

    ``words`` are the arguments of ``fulltilt train``; its output goes to stderr, with ``--quiet`` warnings and errors.

    Raises:
        UsageError: the training refused the configuration.
        TrainingError: it failed; says why.
    """
    folder, result = out_dir / FOLDER, out_dir / RESULT
    result.unlink(missing_ok=True)  # so that a refused training does not leave an older result there
    train = [sys.executable, "-m", "fulltilt", "train", *words, "--out", folder, "--json", result, "--resume"]
    stdout = subprocess.DEVNULL if "--quiet" in words else 2
    code = run_in_session(train, grace_s=STOP_S, stdout=stdout)
    if code == 0:
        return folder
    said = _read_result(out_dir).get("error", "its words are above")
    kind = UsageError if code == UsageError.exit_code else TrainingError
    raise kind(f"the training that was to be measured ended with exit code {code}: {said}")


def _read_result(out_dir: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, TypeError):  # none, or damaged: it is trained again
        return dict(json.loads((out_dir / RESULT).read_text()))
    return {}
