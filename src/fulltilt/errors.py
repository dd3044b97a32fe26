"""Every error that fulltilt raises on purpose, each with the exit code of the command line.

FulltiltError                 1
├── UsageError                2
│   └── ConfigError, DataError, DeviceError, PlanObstacleError, RunFolderError
│       └── OtherRunError
├── NoPlanError               3
├── StorageError              1
│   └── ResultUnwrittenError
└── TrainingError             1
    ├── NonFiniteLossError, WorkerDiedError, FakeRunError, DeviceMemoryError
    └── RankFailedError
        └── RankHungError

A message says the fact, the values and the remedy: ``batch_size 512 is larger than the dataset (360 samples);
use batch_size 360 or less``.
"""

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_CONTROL_CODES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor: CSI
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links: OSC
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)

_LOG = re.compile(r" \(log: [^()]*\)$")
IN_EVALUATION = "in the evaluation"
"""A note at an error: it came up as the model was evaluated on the validation set."""
MAX_MESSAGE_CHARS = 1000  # of a foreign error that are shown; its log holds all
_LIBRARIES = ("<frozen ", "<eval_with_key", "site-packages", "dist-packages")
_LIBRARIES += tuple(str(Path(file).parent) for file in (os.__file__, __file__))


class FulltiltError(Exception):
    """Base of all errors that fulltilt raises on purpose."""

    exit_code = 1

    @property
    def remedy(self) -> str | None:
        return find_remedy(str(self))


class UsageError(FulltiltError):
    """A wrong flag or a wrong call."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration that cannot be used.

    Args:
        message: Fact, values, remedy.
        file: The file the value came from, or how it was given ("command line").
        line: 1-based line in ``file``.
        key: Dotted key, for instance ``data.batch_size``.
        problems: Those that the message lists, where it is of several.

    Attributes:
        rest: The configuration without the values that were refused, in which more may be wrong; None where it has
            none.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        key: str | None = None,
        problems: Sequence["ConfigError"] = (),
    ):
        place = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(": ".join(part for part in (place, key, message) if part))
        self.file, self.line, self.key, self.message = file, line, key, message
        self.problems = tuple(problems)
        self.rest: Any = None


class DataError(UsageError):
    """A data file is missing, unreadable, truncated or too short."""


class DeviceError(UsageError):
    """The device asked for is not there."""


class PlanObstacleError(UsageError):
    """A lever's value cannot apply to this model on this machine."""


class RunFolderError(UsageError):
    """The output folder is locked or belongs to another run."""


class OtherRunError(RunFolderError):
    """The output folder holds the results of another run."""


class NoPlanError(FulltiltError):
    """No plan can run, or none may be written.

    Args:
        remedy: The remedy, where the message does not end with it.
    """

    exit_code = 3

    def __init__(self, message: str, *, remedy: str | None = None):
        super().__init__(message)
        self._remedy = remedy

    @property
    def remedy(self) -> str | None:
        return self._remedy or find_remedy(str(self))


class StorageError(FulltiltError):
    """No space is left, or the file system is read-only."""


class ResultUnwrittenError(StorageError):
    """The files of a search could not be written; ``result`` is the ``TuneResult`` that was found."""

    def __init__(self, message: str, result: Any):
        super().__init__(message)
        self.result = result


class TrainingError(FulltiltError):
    """The run itself failed."""


class NonFiniteLossError(TrainingError):
    """A loss is not finite, first that of ``step`` where it is known."""

    def __init__(self, message: str, *, step: int | None = None):
        super().__init__(message)
        self.step = step


class WorkerDiedError(TrainingError):
    """A data worker died."""


class RankFailedError(TrainingError):
    """One of several training processes, ``rank``, ended the run of all."""

    def __init__(self, message: str, *, rank: int = 0):
        super().__init__(message)
        self.rank = rank


class RankHungError(RankFailedError):
    """A training process stood still while the others waited for it."""


class FakeRunError(TrainingError):
    """The step cannot be taken on fake tensors; real probes can still measure it.

    Attributes:
        operator: The one that needs data or has no shape rule (``aten.nonzero.default``); None: not known.
    """

    def __init__(self, message: str, *, operator: str | None = None):
        super().__init__(message)
        self.operator = operator


class DeviceMemoryError(TrainingError):
    """Memory ran out, on the device or the host."""


def find_remedy(message: str) -> str | None:
    """Return the remedy at the end of a message, without the log it names; None where there is none."""
    _, found, remedy = _LOG.sub("", message.strip()).rpartition("; ")
    return remedy if found else None


def is_library(file: str) -> bool:
    """Return whether a path is that of a library's file, or of fulltilt's.

    Libraries lie where torch lies, wherever that is. Where that is the user's own folder, torch alone is known.
    """
    package = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "")
    folder = os.path.dirname(package)
    with contextlib.suppress(OSError):  # the current folder is gone
        folder = package if f"{Path.cwd()}{os.sep}".startswith(f"{folder}{os.sep}") else folder
    return any(part in file for part in _LIBRARIES) or (bool(folder) and file.startswith(f"{folder}{os.sep}"))


def find_place(error: BaseException) -> str | None:
    """Find where an error is the user's: the line it passed last, ``my_module.py:4 in step``, or a layer of a library.

    Returns:
        ``in Linear(in_features=4, out_features=2)`` for a layer; None where the error is fulltilt's own.
    """
    walked = traceback.walk_tb(None if isinstance(error, FulltiltError) else error.__traceback__)
    frames = list(walked)[::-1]
    for frame, line in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not is_library(file) and (file, name) != ("<string>", "__init__"):  # that of a dataclass
            with contextlib.suppress(OSError):  # the current folder is gone
                file = file.removeprefix(f"{Path.cwd()}{os.sep}")
            return f"{file}:{line} {'as it was imported' if name == '<module>' else f'in {name}'}"
    layers = (frame.f_locals.get("self") for frame, _ in frames if frame.f_code.co_name == "forward")
    layer = next((each for each in layers if hasattr(each, "extra_repr")), None)
    return None if layer is None else f"in {type(layer).__name__}({layer.extra_repr()})"


def describe_error(error: BaseException) -> str:
    """Describe an error: ours by its message, others by the user's line, their class and their message."""
    said: tuple[str | None, ...] = (str(error),)
    if not isinstance(error, FulltiltError):
        text = str(error).strip() or "no message"
        text = text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]} …"
        said = (find_place(error), type(error).__name__, text)
    where = IN_EVALUATION if IN_EVALUATION in getattr(error, "__notes__", ()) else None
    return strip_control_codes(": ".join(part for part in (where, *said) if part))


def keep_traceback(error: BaseException, path: Path | None = None) -> str:
    """Write the whole traceback into a file and return `` (log: FILE)``; "" on a full disk."""
    try:
        if path is None:
            import tempfile  # 8 ms, which every command would wait for

            handle, name = tempfile.mkstemp(prefix="fulltilt-", suffix="-traceback.log")
            os.close(handle)
            path = Path(name)
        path.write_text(
            strip_control_codes("".join(traceback.format_exception(error))), encoding="utf-8", errors="replace"
        )
    except OSError:
        return ""
    return f" (log: {name_file(path)})"


def name_file(file: str | Path) -> str:
    """Name a file as the user would: relative to the current folder where it lies below that."""
    here, path = Path.cwd().resolve(), Path(file).resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def find_log(error: BaseException) -> str:
    """Return what ``keep_traceback`` returned, where it was noted at the error; "" where it was not."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(" (log: ")), "")


def format_nearest(unknown: str, valid: Iterable[str]) -> str:
    """Write the end of a message about an unknown name: ``did you mean a or b? valid: …``."""
    names = sorted(valid)
    near = difflib.get_close_matches(unknown, names, n=3, cutoff=0.5)
    listing = f"valid: {', '.join(names)}"
    return f"did you mean {' or '.join(near)}? {listing}" if near else listing


def strip_control_codes(text: str) -> str:
    """Remove from a text what would steer a terminal; line breaks and tabs stay."""
    return _CONTROL_CODES.sub("", text)
