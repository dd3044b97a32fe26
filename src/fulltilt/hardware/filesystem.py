"""Read the mount table, the file system that a path lies on, and shared memory. Source: proc_pid_mountinfo(5)."""

import ctypes
import dataclasses
import os
import re
from pathlib import Path
from typing import NamedTuple

from fulltilt.hardware._files import Root, read_text

# A WSL drive (/mnt/c) is a 9p mount: every access crosses to another machine there too.
NETWORK_TYPES = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs", "smb3"}
    | {f"fuse.{name}" for name in ("ceph", "gcsfuse", "glusterfs", "juicefs", "rclone", "s3fs", "sshfs")}
)


_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # FALLOC_FL_*, fallocate(2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Filesystem:
    """Where a path lies. ``None``: could not be read."""

    type: str | None  # as mount(8) names it: "ext4", "nfs4", "overlay"
    is_network: bool | None
    free_bytes: int | None  # for an ordinary user


class ShmSpace(NamedTuple):
    """Size and use of /dev/shm, where data workers hand over their batches. ``None``: there is none."""

    total_bytes: int | None
    used_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of the mount table."""

    point: str
    root: str  # the part of the file system that is mounted here
    type: str
    options: str  # of the file system: "rw,memory"


def read_mounts(root: Root = "/") -> tuple[Mount, ...]:
    """Read all mounts in the order they were made: a later one covers an earlier one on the same point."""
    lines = (read_text(root, "/proc/self/mountinfo") or "").splitlines()
    return tuple(mount for line in lines if (mount := _parse_mount(line)) is not None)


def _parse_mount(line: str) -> Mount | None:
    before, _, after = line.partition(" - ")
    left, right = before.split(), after.split()
    if len(left) < 5 or len(right) < 2:
        return None
    return Mount(point=_unescape(left[4]), root=_unescape(left[3]), type=right[0], options="".join(right[2:3]))


def _unescape(text: str) -> str:
    """Decode blanks and backslashes, which come as octal: ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_filesystem(path: str | Path, root: Root = "/") -> Filesystem:
    """Read the file system that ``path`` lies on, or would lie on: it need not exist yet."""
    real = Path(os.path.realpath(path))
    mounts = [mount for mount in reversed(read_mounts(root)) if real.is_relative_to(mount.point)]
    type_ = max(mounts, key=lambda mount: len(Path(mount.point).parts)).type if mounts else None
    is_network = None if type_ is None else type_ in NETWORK_TYPES
    return Filesystem(type=type_, is_network=is_network, free_bytes=_read_free_bytes(real))


def read_shm(root: Root = "/") -> ShmSpace:
    """Read size and use of /dev/shm."""
    try:
        stat = os.statvfs(Path(root) / "dev/shm")
    except OSError:
        return ShmSpace(None, None)
    return ShmSpace(stat.f_blocks * stat.f_frsize, (stat.f_blocks - stat.f_bfree) * stat.f_frsize)


def _read_free_bytes(path: Path) -> int | None:
    for folder in (path, *path.parents):
        try:
            stat = os.statvfs(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
        return stat.f_bavail * stat.f_frsize
    return None


def free_beginning(path: Path, n_bytes: int) -> None:
    """Give back the room of a file's first bytes, which read as zeros then, where the file system can; no size changes.

    Who appends to it meanwhile is not disturbed.
    """
    with path.open("rb+", buffering=0) as stream:
        ctypes.CDLL(None).fallocate(stream.fileno(), _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(n_bytes))
