"""Checkpoints: everything a run needs to go on as if it had never stopped, in one file that is whole or absent.

``checkpoint.pt`` is the newest, ``checkpoint.previous.pt`` the one before. The file holds tensors and plain Python
values only, so it is read with ``weights_only=True`` and cannot run code. The newest name exists at every moment from
the first save on, so others may read it while training goes on; only the process that holds the folder's lock renames.
"""

import contextlib
import dataclasses
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from fulltilt.engine.announce import is_out_of_memory, read_first_line
from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS
from fulltilt.errors import DeviceMemoryError, NonFiniteLossError, RunFolderError, UsageError
from fulltilt.records.run_folder import open_atomic

FORMAT = 2
DAMAGED = "checkpoint.damaged.pt"
N_NAMES_SHOWN = 4
N_LETTERS_SHOWN = 200  # of torch's own errors
READ_ATTEMPTS = 5  # of a reader, while another process saves
PLAIN_TYPES = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
READ_ERRORS = (OSError, ValueError, RuntimeError, EOFError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    state: dict[str, Any]
    path: Path
    note: str | None = None  # why it is not the newest one


class OtherModelError(RunFolderError):
    """Says that a checkpoint is of another model, which is left untouched."""


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> Path:
    """Write ``state`` as the newest checkpoint; the one that was the newest becomes the previous one.

    A crash at any moment leaves at least one whole checkpoint, if there was one before.

    Raises:
        StorageError: no space left or not writable; both old checkpoints are as they were.

    **Cost**: one copy of the state is written and synced; it needs the room of three checkpoints while it does.
    """
    path = folder / NEWEST
    with open_atomic(path) as stream:
        write_state({"format": FORMAT, **state}, stream)
        stream.flush()
        os.fsync(stream.fileno())
        # Only now, with the new one on the disk, may the one before the old one go.
        if path.exists():
            _keep_as_previous(path)
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems cannot sync a folder; the file itself is synced
        os.fsync(handle)
    os.close(handle)
    return path


def write_state(content: Any, stream: BinaryIO) -> None:
    """Write tensors and plain values; a disk that takes no more is an OSError."""
    try:
        torch.save(content, stream)
    except RuntimeError as error:
        # torch reports a failed write as an inconsistency of its own archive; the cause is an OSError before it.
        cause = error.__context__
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise cause or error from None


def _keep_as_previous(path: Path) -> None:
    """Give the newest its second name; it keeps the first one until the new file takes that."""
    temporary = path.with_name(f".{PREVIOUS}.{os.getpid()}")
    try:
        temporary.hardlink_to(path)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, temporary)
    temporary.replace(path.with_name(PREVIOUS))
    temporary.unlink(missing_ok=True)  # a rename between two names of one file does nothing


def load_checkpoint(folder: Path, *, holds_lock: bool = False) -> LoadedCheckpoint | None:
    """Read the newest checkpoint that is whole; None when there is none at all.

    Args:
        holds_lock: The run folder is this process': a damaged newest is renamed, so that the next save does not put it
            in the place of the good one. Anyone else reads again where the files were replaced meanwhile.

    Raises:
        RunFolderError: there are checkpoints and none can be read, or another release wrote them.
        DeviceMemoryError: the host's memory ran out; nothing is renamed.
    """
    loaded, problem = None, None
    for _ in range(1 if holds_lock else READ_ATTEMPTS):
        before = _list_versions(folder)
        try:
            loaded, problem = _load_whole(folder), None
        except RunFolderError as error:
            problem = error
        is_newest = problem is None and (loaded is None or loaded.note is None)
        if is_newest or _list_versions(folder) == before:
            break
    if problem is not None:
        raise problem
    if holds_lock and loaded is not None and loaded.note is not None:
        set_aside(folder)
    return loaded


def _list_versions(folder: Path) -> list[tuple[int, int]]:
    """Tell which files the two names stand for now."""
    found = []
    for name in (NEWEST, PREVIOUS):
        with contextlib.suppress(OSError):
            at = (folder / name).stat()
            found.append((at.st_ino, at.st_mtime_ns))
    return found


def _load_whole(folder: Path) -> LoadedCheckpoint | None:
    problems: list[str] = []
    for path in (folder / NEWEST, folder / PREVIOUS):
        if not path.exists():
            continue
        try:
            state = read_state(path)
        except (*READ_ERRORS, MemoryError) as error:
            said = read_first_line(error)[:N_LETTERS_SHOWN]
            if is_out_of_memory(error):
                raise DeviceMemoryError(
                    f"{path} takes more host memory to be read than is left ({said}); it is as it was: free some "
                    "memory, or allow more with --memory-limit, and run the same command again"
                ) from error
            problems.append(f"{path} cannot be read ({said})")
            continue
        note = f"{problems[0]}; going on from {path.name}" if problems else None
        return LoadedCheckpoint(state=state, path=path, note=note)
    if problems:
        raise RunFolderError(f"{'; '.join(problems)}; there is no other, start again in another folder")
    return None


def load_previous(folder: Path) -> LoadedCheckpoint | None:
    """Read the checkpoint before the newest, where there is one that can be read."""
    with contextlib.suppress(*READ_ERRORS, RunFolderError):
        return LoadedCheckpoint(state=read_state(folder / PREVIOUS), path=folder / PREVIOUS)
    return None


def read_state(path: Path) -> dict[str, Any]:
    """Read one file to the CPU.

    Raises:
        one of READ_ERRORS: it is damaged. RunFolderError: another release wrote it, in another format.
    """
    # torch.load checks no sums: a flipped byte in a weight would be read as it is.
    with path.open("rb") as stream:  # opened once: the name may lead to another file a moment later
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} is damaged")
        stream.seek(0)
        try:
            state = torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch advises to load it all the same, with code and all
            raise pickle.UnpicklingError(
                "it holds more than tensors and plain values, so loading it could run code; fulltilt writes no such "
                "file: do not trust it unless you know who wrote it"
            ) from error
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError("it is no checkpoint of fulltilt")
    if state["format"] != FORMAT:
        age = "a newer" if state["format"] > FORMAT else "an older"
        raise RunFolderError(
            f"{path} was written by {age} fulltilt (format {state['format']}, this one reads {FORMAT}); go on with "
            "that release, or start again in another folder"
        )
    return state


def set_aside(folder: Path) -> None:
    """Rename a newest of no use, so that the next save does not put it in the place of the good one."""
    with contextlib.suppress(OSError):
        (folder / NEWEST).replace(folder / DAMAGED)


def capture_model(model: nn.Module) -> dict[str, Any]:
    """Return the model's ``state_dict``, with extra state of its modules as plain values."""
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            state[name] = make_plain(value, f"model.{name}")
    return state


def make_plain(value: Any, where: str) -> Any:
    """Turn values of numpy into plain ones: they would be written, and refused on reading.

    Raises:
        UsageError: an object that is neither a tensor nor plain; says where it is.
    """
    if value is None or isinstance(value, torch.Tensor) or type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {make_plain(k, where): make_plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, tuple | list):
        parts = [make_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    raise UsageError(
        f"{where} is of type {type(value).__name__}: a checkpoint holds tensors, numbers, text, lists and dicts only; "
        "return such from state_dict()"
    )


def load_model_state(
    model: nn.Module, saved: Mapping[str, Any], path: Path, divide: Callable[[Any, Any], Any] | None = None
) -> None:
    """Load a model's state, or say in which names and shapes the two models differ.

    Args:
        divide: ``(saved, mine)`` → the part that belongs here, of a model whose weights are divided among ranks.

    Raises:
        OtherModelError: the checkpoint is of another model.
    """
    mine = model.state_dict()
    both = [(name, saved[name], value) for name, value in mine.items() if name in saved]
    differences = {
        "missing": [name for name in mine if name not in saved],
        "unexpected": [name for name in saved if name not in mine],
        "of another shape": [
            f"{name} {tuple(theirs.shape)} instead of {tuple(value.shape)}"
            for name, theirs, value in both
            if isinstance(theirs, torch.Tensor) and isinstance(value, torch.Tensor) and theirs.shape != value.shape
        ],
    }
    found = []
    for what, names in differences.items():
        if names:
            more = f" and {len(names) - N_NAMES_SHOWN} more" if len(names) > N_NAMES_SHOWN else ""
            found.append(f"{len(names)} {what}: {', '.join(names[:N_NAMES_SHOWN])}{more}")
    if found:
        raise OtherModelError(
            f"{path} is of another model than {type(model).__name__}: {'; '.join(found)}; "
            "restore the model it was written with, or start again in another folder with --out"
        )
    if divide is not None:
        saved = {name: divide(value, mine[name]) for name, value in saved.items()}
    model.load_state_dict(saved)


def load_part_state(name: str, part: Any, saved: Any, path: Path) -> None:
    """Load the state of the optimizer, the scaler or the average.

    Raises:
        RunFolderError: it does not fit.
    """
    try:
        part.load_state_dict(saved)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        said = read_first_line(error)[:N_LETTERS_SHOWN]
        raise RunFolderError(
            f"the state of the {name} in {path} does not fit {type(part).__name__} ({said}); "
            "resume with the configuration it was written with, or start again in another folder with --out"
        ) from error


def check_finite(model: nn.Module, *, step: int) -> None:
    """Refuse to save a model that has already diverged.

    Raises:
        NonFiniteLossError: a parameter holds a NaN or an infinity; names it.

    **Device**: synchronises once.
    """
    local = ((name, p.to_local() if hasattr(p, "to_local") else p) for name, p in model.named_parameters())
    named = [(name, p.detach()) for name, p in local if p.is_floating_point() and p.numel()]
    if not named:
        return
    norms = torch.stack([n.to(torch.float32) for n in torch._foreach_norm([p for _, p in named], float("inf"))])
    is_finite = torch.isfinite(norms).tolist()
    bad = [name for (name, _), good in zip(named, is_finite, strict=True) if not good]
    if bad:
        raise NonFiniteLossError(
            f"after step {step} {len(bad)} of {len(named)} parameters hold NaN or infinity, first {bad[0]}; "
            "no checkpoint was written of them"
        )
