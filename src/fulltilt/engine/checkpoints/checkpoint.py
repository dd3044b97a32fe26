"""Checkpoints: everything a run needs to go on as if it had never stopped, in one file that is whole or absent.

``checkpoint.pt`` is the newest, ``checkpoint.previous.pt`` the one before. The file holds tensors and plain Python
values only, so it is read with ``weights_only=True`` and cannot run code. The newest name exists at every moment from
the first save on, so others may read it while training goes on; only the process that holds the folder's lock renames.
"""

from __future__ import annotations

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

from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS
from fulltilt.errors import DeviceMemoryError, NonFiniteLossError, RunFolderError, UsageError
from fulltilt.records import Evidence, classify_outcome
from fulltilt.records.run_folder import open_atomic

FORMAT = 2
DAMAGED = "checkpoint.damaged.pt"
OUT_OF_MEMORY = "out_of_memory"
N_NAMES_SHOWN = 4
READ_ATTEMPTS = 5  # of a reader, while another process saves
PLAIN_TYPES = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
READ_ERRORS = (OSError, ValueError, RuntimeError, EOFError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    state: dict[str, Any]
    path: Path
    note: str | None  # why it is not the newest one


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> Path:
    """Write ``state`` as the newest checkpoint; the one that was the newest becomes the previous one.

    A crash at any moment leaves at least one whole checkpoint, if there was one before.

    Raises:
        StorageError: no space left or not writable; both old checkpoints are as they were.

    **Cost**: one copy of the state is written and synced; it needs the room of three checkpoints while it does.
    """
    path = folder / NEWEST
    with open_atomic(path) as stream:
        _write(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
        # Only now, with the new one on the disk, may the one before the old one go.
        if path.exists():
            _keep_as_previous(path)
    _sync_folder(folder)
    return path


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
    """Read the newest checkpoint that is whole; ``None`` when there is none at all.

    Args:
        holds_lock: The run folder is this process': a damaged newest is renamed, so that the next save does not put it
            in the place of the good one. Anyone else reads again where the files were replaced meanwhile.

    Raises:
        RunFolderError: there are checkpoints and none can be read, or another release wrote them.
        DeviceMemoryError: the host's memory ran out; nothing is renamed.
    """
    if not holds_lock:
        for _ in range(READ_ATTEMPTS - 1):
            before = _list_versions(folder)
            with contextlib.suppress(RunFolderError):
                loaded = _load_whole(folder)
                if loaded is None or loaded.note is None:
                    return loaded
            if _list_versions(folder) == before:
                break
    loaded = _load_whole(folder)
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
    for name in (NEWEST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = read_state(path)
        except (*READ_ERRORS, MemoryError) as error:
            if classify_outcome(Evidence(exception_type=type(error).__name__, message=str(error)))[0] == OUT_OF_MEMORY:
                raise DeviceMemoryError(
                    f"{path} takes more host memory to be read than is left ({_first_line(error)}); it is as it was: "
                    "free some memory, or allow more with --memory-limit, and run the same command again"
                ) from error
            problems.append(f"{path} cannot be read ({_first_line(error)})")
            continue
        note = f"{problems[0]}; going on from {path.name}" if problems else None
        return LoadedCheckpoint(state=state, path=path, note=note)
    if problems:
        raise RunFolderError(f"{'; '.join(problems)}; there is no other, start again in another folder")
    return None


def capture_model(model: nn.Module) -> dict[str, Any]:
    """The model's ``state_dict``; extra state of its modules as plain values."""
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            state[name] = make_plain(value, f"model.{name}")
    return state


def make_plain(value: Any, where: str) -> Any:
    """Only what a checkpoint can be read back with: a number of numpy would be written and refused on reading.

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


def load_previous(folder: Path) -> LoadedCheckpoint | None:
    """The checkpoint before the newest, where there is one that can be read."""
    path = folder / PREVIOUS
    try:
        state = read_state(path)
    except (*READ_ERRORS, RunFolderError):
        return None
    return LoadedCheckpoint(state=state, path=path, note=None)


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
    differences = [
        _list_names("missing", [name for name in mine if name not in saved]),
        _list_names("unexpected", [name for name in saved if name not in mine]),
        _list_names("of another shape", _compare_shapes(mine, saved)),
    ]
    found = [text for text in differences if text]
    if found:
        raise OtherModelError(
            f"{path} is of another model than {type(model).__name__}: {'; '.join(found)}; "
            "restore the model it was written with, or start again in another folder with --out"
        )
    if divide is not None:
        saved = {name: divide(value, mine[name]) for name, value in saved.items()}
    model.load_state_dict(saved)


def load_part_state(name: str, part: Any, saved: Any, path: Path) -> None:
    """Load the state of the optimizer or the scaler.

    Raises:
        RunFolderError: it does not fit.
    """
    try:
        part.load_state_dict(saved)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise RunFolderError(
            f"the state of the {name} in {path} does not fit {type(part).__name__} ({_first_line(error)}); "
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


def _write(state: Mapping[str, Any], stream: BinaryIO) -> None:
    recorder = _ErrorRecorder(stream)
    try:
        torch.save({"format": FORMAT, **state}, recorder)  # type: ignore[arg-type]
    except RuntimeError:
        # torch reports a failed write as an inconsistency of its own archive; the cause is the OSError.
        if recorder.error is not None:
            raise recorder.error from None
        raise


class OtherModelError(RunFolderError):
    """A checkpoint is of another model; the model is untouched."""


class _ErrorRecorder:
    """A file for ``torch.save`` that remembers why a write failed."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise self.error
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._stream.flush()


def read_state(path: Path) -> dict[str, Any]:
    """What one file holds, on the CPU; for a rank that is told by the first one which file it is.

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
        state = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError("it is no checkpoint of fulltilt")
    if state["format"] > FORMAT:
        raise RunFolderError(
            f"{path} was written by a newer fulltilt (format {state['format']}, this one reads {FORMAT})"
        )
    if state["format"] < FORMAT:
        raise RunFolderError(
            f"{path} was written by an older fulltilt (format {state['format']}, this one reads {FORMAT}); go on with "
            "that release, or start again in another folder"
        )
    return state


def set_aside(folder: Path) -> None:
    """Keep a newest of no use from taking the place of the good one at the next save."""
    with contextlib.suppress(OSError):
        (folder / NEWEST).replace(folder / DAMAGED)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    # Some network file systems cannot sync a folder; the file itself is synced.
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)


def _compare_shapes(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {tuple(saved[name].shape)} instead of {tuple(value.shape)}"
        for name, value in mine.items()
        if isinstance(value, torch.Tensor)
        and isinstance(saved.get(name), torch.Tensor)
        and saved[name].shape != value.shape
    ]


def _list_names(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - N_NAMES_SHOWN} more" if len(names) > N_NAMES_SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:N_NAMES_SHOWN])}{more}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
