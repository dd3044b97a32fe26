"""Pack the code of a project, and unpack it where an attempt runs it.

What is edited after an experiment was queued has no effect on it. The archive holds text only, and no large one: data
stays where it is, and a node that sees the project's own folder gets links to what was left out, so that relative paths
hold there.
"""

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from fulltilt.errors import UsageError

SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml", ".txt", ".cfg")
MOST_FILE_BYTES, MOST_BYTES, MOST_LOOKED_AT = 1 << 20, 64 << 20, 50_000
MOST_FILES = 50_000  # of an archive
NO_CODE = ("__pycache__", "node_modules", "runs", "site-packages")


def find_root(source: Path) -> Path:
    """Return the folder of the project that a configuration belongs to: git's, the working directory, or its own."""
    source = source.resolve()
    for folder in source.parents:
        if (folder / ".git").exists():
            return folder
    here = Path.cwd()
    is_project = source.is_relative_to(here) and here not in (Path.home(), Path(here.anchor))
    return here if is_project else source.parent


def pack_code(root: Path, source: Path) -> bytes:
    """Pack the text files below ``root``, and ``source``: the same content gives the same bytes.

    Raises:
        UsageError: there is too much of it.
    """
    files, n_bytes = dict[str, bytes](), 0
    for path in sorted({*_list_files(root), source.resolve()}):
        files[str(path.relative_to(root))] = content = path.read_bytes()
        n_bytes += len(content)
        if n_bytes > MOST_BYTES:
            raise UsageError(
                f"the code below {root} is larger than {MOST_BYTES >> 20} MiB; submit from the folder of the project, "
                "or list what is no code in .gitignore"
            )
    return pack_files(files)


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Pack files by their names; the same content gives the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpack_code(archive: Path, folder: Path, *, beside: Path) -> None:
    """Unpack an archive, whole or not at all: plain files below ``folder``.

    Args:
        beside: The folder it was packed from. Where it is there, what the archive lacks of it is linked.

    Raises:
        UsageError: it leads outside, is too large, or is none.
    """
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        with tarfile.open(archive, "r:") as tar:  # as pack_files writes it: a packed one could grow without end
            n_bytes = 0
            for n_files, entry in enumerate(tar):
                n_bytes += entry.size
                if n_bytes > MOST_BYTES or n_files >= MOST_FILES:
                    raise UsageError(f"the code is larger than {MOST_BYTES >> 20} MiB or {MOST_FILES} files")
            tar.extractall(partial, filter="data")
        link_what_is_left_out(partial, beside)
        partial.rename(folder)
    except tarfile.TarError as error:
        raise UsageError(f"the code that was sent cannot be unpacked ({error}); submit it again") from error
    except OSError:
        if not folder.exists():  # else another attempt was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def link_what_is_left_out(folder: Path, beside: Path) -> None:
    """Link what the archive of ``folder`` lacks of the folder it was packed from. May be repeated: data comes later."""
    for here, _, _ in os.walk(folder):
        there = beside / Path(here).relative_to(folder)
        for name in os.listdir(there) if there.is_dir() else ():
            if not os.path.lexists(Path(here) / name) and not _is_code(there / name):
                with contextlib.suppress(FileExistsError):  # another attempt was faster
                    (Path(here) / name).symlink_to(there / name)


def _is_code(path: Path) -> bool:
    """Return whether a file would be code, and so was written after the archive; other text may be data."""
    with contextlib.suppress(OSError):
        return path.suffix == ".py" and path.stat().st_size <= MOST_FILE_BYTES
    return True


def _list_files(root: Path) -> Iterator[Path]:
    listed = (
        subprocess.run(
            ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"], capture_output=True, check=False
        )
        if (root / ".git").exists()
        else None
    )
    if listed is not None and listed.returncode == 0:
        found = (root / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name)
    else:
        found = _walk(root)
    labs: dict[Path, bool] = {}
    for path in found:
        is_text = path.suffix in SUFFIXES and path.is_file() and not path.is_symlink()
        if is_text and not _is_in_lab(path.parent, root, labs) and path.stat().st_size <= MOST_FILE_BYTES:
            yield path


def _is_in_lab(folder: Path, root: Path, known: dict[Path, bool]) -> bool:
    """Return whether a folder lies in a lab. There are results, and the owner's token."""
    if folder not in known:
        is_lab = (folder / ".lock").exists() and (folder / "token").exists()
        known[folder] = is_lab or (folder != root and _is_in_lab(folder.parent, root, known))
    return known[folder]


def _walk(root: Path) -> Iterator[Path]:
    n_seen = 0
    for here, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in NO_CODE and not (Path(here) / name / "pyvenv.cfg").exists()
        ]
        n_seen += len(files)
        if n_seen > MOST_LOOKED_AT:
            raise UsageError(f"{root} holds more than {MOST_LOOKED_AT} files; submit from the folder of the project")
        yield from (Path(here) / name for name in files)
