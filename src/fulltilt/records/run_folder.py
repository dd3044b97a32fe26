"""A run folder: locked by one process, written durably, refused to another run.

Appends survive SIGKILL (a torn last line is dropped on reading), whole files are replaced atomically, and the
fingerprint says whose results lie here.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from fulltilt.errors import OtherRunError, RunFolderError, StorageError, UsageError
from fulltilt.records.settings import flatten_settings

FINGERPRINT_FILE = "fingerprint.json"
LOCK_FILE = ".lock"
NEW_FILE_MODE = 0o644
N_CHANGES_SHOWN = 4
LOCK_PATIENCE_S = 0.1
LOCK_TURN_S = 0.01
_UNWRITABLE = (
    errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EISDIR, errno.EFBIG,
    errno.ENAMETOOLONG,
)  # fmt: skip


def compute_fingerprint(parts: Mapping[str, Any]) -> str:
    """Compute a stable digest of what a run depends on: configuration, code, machine."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RunFolder:
    """A folder owned by this process until ``close``.

    Args:
        results: Files that make the folder somebody's. Where none of them is there yet, an earlier run ended before
            it had anything to lose, and another fingerprint takes the folder over.
        aging: Parts of the fingerprint that change under the same command: data, code. Where no other part differs the
            earlier results are set aside under another name, ``set_aside`` says so, and the folder starts anew. It
            says so again to the next run where this one ends without a result.
        moving: Parts that may have another value in the same run: where its data lie.
        writes: Files that the run writes over. In a folder of nobody's, or of another command, they are not its own.
        logs: What is left by a run that was refused (UsageError), and goes with a folder that it made.

    Raises:
        RunFolderError: another living process holds it, or it belongs to a run with another fingerprint, or to nobody
            and holds files that the run would write over.
        StorageError: it cannot be created or written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fingerprint_parts: Mapping[str, Any],
        command: str,
        results: Sequence[str],
        aging: Collection[str] = (),
        moving: Collection[str] = (),
        writes: Collection[str] = (),
        logs: Collection[str] = (),
    ):
        self.path = Path(path)
        self._writes, self._logs = writes, logs
        self.set_aside: str | None = None
        self._command = command
        self._is_new = not self.path.exists()
        self._before = _list_names(self.path)
        self._lock = _take_lock(self.path)
        try:
            self.is_resumed = self._claim(fingerprint_parts, command, results, aging, moving)
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, UsageError):
            self._leave_nothing()
        self.close()

    def _leave_nothing(self) -> None:
        """Remove what a run that is refused has made, unless something else came with it."""
        own = {FINGERPRINT_FILE, LOCK_FILE, *(self._logs if self._is_new else ())}
        made = _list_names(self.path) - self._before
        if FINGERPRINT_FILE in self._before or not made <= own:
            return
        with contextlib.suppress(OSError):
            for name in sorted(made, key=LOCK_FILE.__eq__):  # the lock last: who waits for it would come between
                path = self.path / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if self._is_new:
                self.path.rmdir()

    def close(self) -> None:
        """Release the lock. Its file stays, as the folder does: others would have to look again (``_take_lock``)."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def state_fingerprint(self, parts: Mapping[str, Any]) -> None:
        """Write what the results that will lie here depend on; for a folder that holds none yet."""
        mine: dict[str, Any] = {"command": self._command, "fingerprint": compute_fingerprint(parts)}
        mine |= {"parts": dict(parts), "set_aside": self.set_aside}
        write_atomic(self.path / FINGERPRINT_FILE, json.dumps(mine, indent=1, sort_keys=True, default=str) + "\n")

    def _claim(
        self,
        parts: Mapping[str, Any],
        command: str,
        results: Sequence[str],
        aging: Collection[str],
        moving: Collection[str],
    ) -> bool:
        """Take the folder for a run with these parts; whether it goes on from results that lie there."""
        found = _read_fingerprint(self.path, results)
        if _has_results(self.path, results) and found:
            if _compare(found, parts, command, moving) != "other":
                return True
            relation = _compare(found, parts, command, {*aging, *moving})
            change = _describe_change(found.get("parts", {}), parts)
            if relation == "other":
                raise OtherRunError(
                    f"{self.path} holds the results of another run ({change}); give another folder with --out, or "
                    "remove this one"
                )
            self.set_aside = f"earlier results are set aside as {self._set_aside(results)} ({change})"
        elif foreign := _find_foreign(self.path, found, command, self._writes):
            raise OtherRunError(f"{self.path} holds {foreign}, and a run writes there; give another folder with --out")
        else:  # the run that set them aside had no result yet, so nobody was told
            self.set_aside = found.get("set_aside")
        self.state_fingerprint(parts)
        return False

    def _set_aside(self, results: Sequence[str]) -> str:
        """Rename the results, those in a sub-folder too → their new names."""
        names = []
        for old in (Path(name) for name in results if (self.path / name).exists()):
            numbered = (f"{old.stem}-{number}{old.suffix}" for number in itertools.count(1))
            names.append(next(name for name in numbered if not (self.path / name).exists()))
            with _storage_errors(self.path):
                (self.path / old).rename(self.path / names[-1])
        return ", ".join(names)


Relation = Literal["same", "aged", "other"]


@dataclasses.dataclass(frozen=True, slots=True)
class FolderChoice:
    """Says where a run belongs among the folders ``NAME``, ``NAME-2``, ``NAME-3``.

    Attributes:
        usual: ``NAME``.
        own: The newest that holds this very run, or results of it that aged; None where none does.
        is_aged: Whether it is the latter.
        free: The first in which nothing would be lost.
        foreign: Files of others in ``NAME`` that a run would write over.
        change: What differs from the run in ``NAME``; empty where that is this one, or none.
    """

    usual: Path
    own: Path | None
    free: Path
    change: str
    is_aged: bool = False
    foreign: str = ""

    def explain(self, chosen: Path) -> str | None:
        """Say where a run is, and why it is not in the usual folder; None where it is."""
        if chosen == self.usual:
            return None
        held = self.foreign or (f"another run ({self.change})" if self.change else "this run already")
        why = f"{self.usual} holds {held}: "
        return f"{'' if self.free == self.usual else why}this one is in {chosen}"


def find_folders(
    path: Path,
    *,
    fingerprint_parts: Mapping[str, Any],
    command: str,
    results: Sequence[str],
    aging: Collection[str] = (),
    writes: Collection[str] = (),
) -> FolderChoice:
    """Find the folder of a run beside ``path``, and one for it to begin in.

    The arguments are those of ``RunFolder``. One in which another run has begun and has no results yet is not free.
    """
    held: list[tuple[bool, float, Path]] = []  # whether it did not age, when it was written
    free, change, foreign_there = None, "", ""
    for folder in list_numbered(path):
        written_s = [(folder / name).stat().st_mtime for name in results if (folder / name).exists()]
        try:
            found = _read_fingerprint(folder, results)
        except RunFolderError:  # somebody's all the same
            found = dict[str, Any](command="unknown")
        if not found or not (written_s or _is_in_use(folder)):
            foreign = _find_foreign(folder, found, command, writes)
            free = free or (None if foreign else folder)
            foreign_there = foreign if folder == path else foreign_there
            continue
        relation = _compare(found, fingerprint_parts, command, aging)
        if relation != "other":
            held.append((relation == "same", max(written_s, default=0.0), folder))
        if relation != "same" and folder == path:
            change = _describe_change(found.get("parts", {}), fingerprint_parts)
    assert free is not None, "the last of them is new"
    is_same, _, own = max(held, default=(True, 0.0, None))
    return FolderChoice(path, own, free, change, is_aged=not is_same, foreign=foreign_there)


def list_numbered(path: Path) -> Iterator[Path]:
    """List ``path`` and its numbered sisters that exist, in their order, up to the first number that is new."""
    pattern = re.compile(rf"{re.escape(path.name)}-([2-9]|[1-9]\d+)")
    found = {int(match[1]) for each in path.parent.glob("*") if (match := pattern.fullmatch(each.name))}
    yield path
    for number in sorted({*found, next(n for n in itertools.count(2) if n not in found)}):
        yield path.with_name(f"{path.name}-{number}")


def _list_names(path: Path) -> frozenset[str]:
    """List what lies in a folder; nothing where that cannot be read."""
    with contextlib.suppress(OSError):
        return frozenset(os.listdir(path))
    return frozenset()


def _find_foreign(path: Path, found: Mapping[str, Any], command: str, writes: Collection[str]) -> str:
    """Name the files of others that a run of ``command`` would write over; empty where there are none."""
    if found.get("command") == command:
        return ""
    names = ", ".join(name for name in writes if (path / name).exists())
    whose = f" of fulltilt {found['command']}" if "command" in found else " of another origin"
    return names and f"{names}{whose}"


def _has_results(path: Path, results: Sequence[str]) -> bool:
    return any((path / name).exists() for name in results)


def _read_fingerprint(path: Path, results: Sequence[str]) -> dict[str, Any]:
    """Read whose results lie in a folder; empty where nobody's do.

    Raises:
        RunFolderError: it cannot be read, and there are results.
    """
    file = path / FINGERPRINT_FILE
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError) as error:
        if _has_results(path, results):
            raise RunFolderError(f"{file} cannot be read ({error}); give another folder with --out") from None
        return {}


def _compare(found: Mapping[str, Any], parts: Mapping[str, Any], command: str, aging: Collection[str]) -> Relation:
    """Compare a fingerprint that was found with this run's."""
    if found.get("command") != command:
        return "other"
    if found.get("fingerprint") == compute_fingerprint(parts):
        return "same"
    old, new = ({k: each[k] for k in each if k not in aging} for each in (found.get("parts", {}), parts))
    return "aged" if compute_fingerprint(old) == compute_fingerprint(new) else "other"


def _is_in_use(path: Path) -> bool:
    """Return whether a living process holds the folder."""
    try:
        lock = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


@contextlib.contextmanager
def hold_folder(path: str | Path, *, patience_s: float = LOCK_PATIENCE_S) -> Iterator[None]:
    """Lock a folder again after its ``RunFolder`` was closed: nobody else starts a run in it meanwhile.

    Args:
        patience_s: How long to wait for another process that holds it.

    Raises:
        RunFolderError: another living process holds it. StorageError: it cannot be written.
    """
    lock = _take_lock(Path(path), patience_s)
    try:
        yield
    finally:
        os.close(lock)


def find_folder_obstacle(path: Path) -> str | None:
    """Say why there can be no folder at ``path``; None where there can be, as far as is known without making it."""
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"{there} is no folder, and one is needed; give another place with --out"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written ({os.strerror(errno.EACCES)}); give another place with --out"
    return None


def _take_lock(path: Path, patience_s: float = LOCK_PATIENCE_S) -> int:
    """Lock the folder → the descriptor of the lock file, which holds the lock until it is closed."""
    if obstacle := find_folder_obstacle(path):
        raise StorageError(obstacle)
    with _storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for n_left in reversed(range(1 + round(patience_s / LOCK_TURN_S))):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if not n_left:
                    holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise RunFolderError(
                        f"{path} is in use by process {holder}; wait for it, or give another folder with --out"
                    ) from None
            time.sleep(LOCK_TURN_S)  # a command that looks for its folder holds the lock for a moment, see _is_in_use
        if not os.fstat(lock).st_nlink:  # who held it was refused, and removed the folder it had made
            os.close(lock)
            return _take_lock(path)
        with _storage_errors(path):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write a whole file so that a reader, or a crash, sees the old one or the new one and never a part.

    Raises:
        StorageError: no space, no permission; the old file is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    with open_atomic(path) as stream:
        stream.write(data)
    return path


def find_other_content(path: Path, *starts: bytes, at: int = 0) -> str | None:
    """Say why a file is not written over: no earlier one of its kind has one of ``starts`` at byte ``at``."""
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        with path.open("rb") as stream:
            stream.seek(at)
            is_other = not stream.read(max(map(len, starts))).startswith(starts)
    except OSError as error:
        return f"is there already and cannot be read ({error.strerror}); name another file"
    return "is there already and holds something else; name another file" if is_other else None


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.touch(mode=0o600)
    write_atomic(path, text)


@contextlib.contextmanager
def open_atomic(path: Path, *, new_mode: int = NEW_FILE_MODE) -> Iterator[BinaryIO]:
    """Write a file in pieces: it takes its place, whole and synced, when the block ends well.

    A link keeps leading to its file, and a file that is replaced keeps its mode. What is no file at all, such as
    ``/dev/stdout`` or a pipe, is written to as it stands: a rename would put a file in its place.

    Raises:
        StorageError: as for ``write_atomic``.
    """
    path = path.resolve()
    with _storage_errors(path):
        if path.exists() and not path.is_file():
            with path.open("wb") as stream:
                yield stream
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else new_mode
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).chmod(mode)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise


def append_line(path: Path, *lines: str) -> None:
    """Append a line, or several as one, and sync them to the disk. A torn line left by a crash is cut off first.

    Raises:
        StorageError: no space; what this call wrote of the lines is taken back.
    """
    if any("\n" in line for line in lines):
        raise ValueError("a journal line must not hold a line break")
    # Unbuffered: a buffer would write its rest once more when the file is closed after a failure.
    with contextlib.ExitStack() as stack:
        stack.enter_context(_storage_errors(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = stack.enter_context(path.open("ab+", buffering=0))
        end = drop_torn_line(stream)
        try:
            rest = b"".join(line.encode() + b"\n" for line in lines)
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(stream.fileno(), end)
            raise


def read_lines(path: Path) -> list[str]:
    """Read the whole lines of a journal; a torn last line (no line break) is left out."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror}); give another folder with --out") from None
    return [line for line in text.split("\n")[:-1] if line.strip()]


def drop_torn_line(stream: FileIO) -> int:
    """Cut the file back to its last line break; return its size then."""
    end = stream.seek(0, os.SEEK_END)
    if not end:
        return 0
    stream.seek(end - 1)
    if stream.read(1) == b"\n":
        return end
    stream.seek(0)
    end = stream.read().rfind(b"\n") + 1
    os.ftruncate(stream.fileno(), end)
    return end


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"no space left for {path}; free some and try again") from error
        if error.errno in _UNWRITABLE:
            raise StorageError(f"{path} cannot be written ({error.strerror}); name another place") from error
        raise


def _describe_change(found: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Name single values, down to the key: ``changed: optim.lr 0.002 → 0.5``."""
    old, new = (dict(flatten_settings(json.loads(json.dumps(parts, default=str)))) for parts in (found, mine))
    changes = [
        f"{name} {_shorten(old.get(name))} → {_shorten(new.get(name))}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    more = f" and {len(changes) - N_CHANGES_SHOWN} more" if len(changes) > N_CHANGES_SHOWN else ""
    return f"changed: {', '.join(changes[:N_CHANGES_SHOWN])}{more}" if changes else "another command"


def _shorten(value: Any) -> str:
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    cut = f"…{text[-39:]}" if text.startswith("/") else f"{text[:39]}…"  # of a path the end tells
    return text if len(text) <= 40 else cut
