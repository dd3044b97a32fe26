"""Save a lab to one file while it is served, and make a lab of such a file again.

A backup is a tar file: the depot's files that something refers to, logs and results, the database as
it was at one moment, and last a manifest, without which it is not whole. The owner's token is not in it.
"""

import contextlib
import hashlib
import json
import re
import shutil
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulltilt._version import __version__
from fulltilt.errors import StorageError, UsageError
from fulltilt.lab.lab import Lab
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.serving import DEPOT, open_lab
from fulltilt.lab.settling import settle
from fulltilt.lab.states import LIVE
from fulltilt.lab.store import DATABASE, copy_database, open_store
from fulltilt.records import VERSION
from fulltilt.records.run_folder import open_atomic

MANIFEST = "manifest.json"
KEPT = re.compile(r"e\d+")  # folders, beside the depot
RESTORED = End(outcome="preempted", reason="it ran when the backup was made")


def write_backup(folder: Path, target: Path) -> dict[str, Any]:
    """Write the lab in a folder to a file → the manifest. A server may run, and so may its experiments.

    Raises:
        UsageError: the records are not in the folder. StorageError: it cannot be read or written.
    """
    database = folder / DATABASE
    if not database.is_file():
        raise UsageError(
            f"{database} is not there; of a lab in PostgreSQL save the database with pg_dump, and copy {folder} and, "
            "where it is elsewhere, its --depot"
        )
    with (
        open_atomic(target, new_mode=0o600) as stream,  # it holds what the lab's folder shows to nobody else
        tarfile.open(fileobj=stream, mode="w") as tar,
        tempfile.TemporaryDirectory(dir=target.resolve().parent, prefix=f".{target.name}.") as staging,
    ):
        copy = Path(staging) / DATABASE
        written: set[str] = set()
        before: set[str] | None = None
        while True:
            copy_database(database, copy)
            with contextlib.closing(open_store(copy.parent)) as store:
                wanted, states = store.read_digests(), store.count_states()
            new = {digest: f"{DEPOT}/{digest[:2]}/{digest}" for digest in wanted - written}
            missing = {digest for digest, name in new.items() if not _add(tar, folder, name)}
            written |= wanted - missing
            if not missing or missing == before:  # old checkpoints go away while this reads
                break
            before = missing
        for path in _list_kept(folder):
            _add(tar, folder, str(path.relative_to(folder)))
        _add(tar, copy.parent, DATABASE)
        manifest = {"version": VERSION, "fulltilt": __version__, "time_s": time.time(), "states": states}
        manifest |= {"n_files": len(written), "n_missing": len(missing)}
        Path(staging, MANIFEST).write_text(json.dumps(manifest))
        _add(tar, Path(staging), MANIFEST)
    return manifest


def restore_backup(file: Path, folder: Path) -> dict[str, Any]:
    """Make a lab of a backup, whole or not at all → the manifest. What ran then is queued again.

    Raises:
        UsageError: there is something in the folder, or no such file. StorageError: the backup is damaged.
    """
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name a new folder with --lab")
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        manifest = _unpack(file, partial)
        _check_files(partial / DEPOT)
        with open_lab(partial) as lab:  # checks the database too
            _end_leases(lab)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except StorageError as error:  # it may name the folder that is removed now
        raise StorageError(str(error).replace(str(partial), str(file))) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # which has another name where all went well
    return manifest


def _add(tar: tarfile.TarFile, folder: Path, name: str) -> bool:
    """Write a file as long as it is now; False: there is none."""
    try:
        stream = (folder / name).open("rb")
    except FileNotFoundError:
        return False
    with stream:
        info = tar.gettarinfo(arcname=name, fileobj=stream)  # a second link to a file that is written becomes a link
        tar.addfile(info, stream if info.isreg() else None)
    return True


def _list_kept(folder: Path) -> Iterator[Path]:
    for place in sorted(folder.iterdir()):
        if KEPT.fullmatch(place.name):
            yield from (path for path in sorted(place.rglob("[!.]*")) if path.is_file() and not path.is_symlink())


def _unpack(file: Path, target: Path) -> dict[str, Any]:
    try:
        with tarfile.open(file, "r:") as tar:
            target.mkdir(parents=True, mode=0o700)
            for member in tar:
                if not (member.isreg() or member.islnk()):
                    raise StorageError(f"{file} holds {member.name}, which is no file; it is no backup of a lab")
                tar.extract(member, target, filter="data")
        manifest = json.loads((target / MANIFEST).read_text())
        (target / MANIFEST).unlink()
    except FileNotFoundError:
        if not file.exists():
            raise UsageError(f"{file} does not exist; name a file that fulltilt lab backup wrote") from None
        raise StorageError(f"{file} ends before its manifest; take another backup") from None
    except (tarfile.TarError, ValueError) as error:
        raise StorageError(f"{file} is no whole backup of a lab ({error}); take another one") from None
    return manifest


def _check_files(depot: Path) -> None:
    for path in depot.glob("*/*"):
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != path.name:
                raise StorageError(f"file {path.name} of the backup is damaged; take another backup")


def _end_leases(lab: Lab) -> None:
    """End what ran in the lab that was saved: its processes, where they still run, are not this lab's."""
    for experiment in lab.store.read_experiments(states=LIVE):
        settle(lab, experiment.newest, RESTORED)
