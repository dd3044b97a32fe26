"""Keep files under the digest of their content, at a URI that fsspec can open: code, checkpoints, results.

A file that arrives twice is stored once, and one that arrived in part is never there: it gets its name last.
"""

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fulltilt.errors import StorageError
from fulltilt.lab.beneath import open_beneath

PIECE_BYTES = 1 << 20
LINK_BYTES = 1 << 20  # smaller ones are copied: people edit them
DIGEST = re.compile(r"[0-9a-f]{64}")


class Depot:
    """Files by digest (SHA-256, hexadecimal) below ``uri``: a folder, ``s3://…``, ``gs://…``, ``sftp://…``.

    In a folder on the same disk a file is linked, not copied: 2 GB take no time and no room.
    """

    def __init__(self, uri: str | Path):
        self.uri = str(uri)
        self._system, self._root = fsspec.core.url_to_fs(self.uri)
        self._folder = Path(self._root) if isinstance(self._system, LocalFileSystem) else None

    def has(self, digest: str) -> bool:
        place = self._place(digest)
        if self._folder is None:
            return self._system.exists(place)
        with contextlib.suppress(FileNotFoundError), open_beneath(self._folder, digest[:2], digest):
            return True
        return False

    def claim(self, digest: str) -> bool:
        """Return whether a file is there; one that is counts as new from now on (``remove_older``)."""
        is_there = self.has(digest)
        if is_there and self._folder is not None:
            with contextlib.suppress(OSError):  # gone just now, or another user's
                os.utime(self._place(digest))
        return is_there

    def put(self, path: Path) -> str:
        """Store a file and return its digest. It must not be written to later; replacing it is fine."""
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if self.claim(digest):
                return digest
            place = Path(self._place(digest))
            if self._folder is not None and os.fstat(stream.fileno()).st_size >= LINK_BYTES:
                with contextlib.suppress(OSError):  # another disk, one without links, or replaced meanwhile
                    place.parent.mkdir(parents=True, exist_ok=True)
                    # What was read, whatever has the name now; with a descriptor of a folder os.link follows links.
                    os.link(f"/proc/self/fd/{stream.fileno()}", place, src_dir_fd=stream.fileno())
                    return digest
            stream.seek(0)
            self.put_pieces(iter(lambda: stream.read(PIECE_BYTES), b""), digest)
        return digest

    def put_pieces(self, pieces: Iterable[bytes], digest: str) -> int:
        """Store what arrives in pieces and return its size.

        Raises:
            StorageError: the content has another digest, or there is no room; nothing is kept.
        """
        n_bytes = 0
        with self.receive(digest) as take:
            for piece in pieces:
                take(piece)
                n_bytes += len(piece)
        return n_bytes

    @contextlib.contextmanager
    def receive(self, digest: str) -> Iterator[Callable[[bytes], None]]:
        """Give the block a function that takes the pieces of a file. The file is stored when the block ends well.

        Raises:
            StorageError: as for ``put_pieces``.
        """
        place, found = self._place(digest), hashlib.sha256()
        partial = f"{place}.{uuid.uuid4().hex}.part"

        def take(piece: bytes) -> None:
            found.update(piece)
            with _explain(place):
                stream.write(piece)

        try:
            with _explain(place):
                self._system.makedirs(self._system._parent(place), exist_ok=True)
                stream = self._system.open(partial, "wb")
            with stream:
                yield take
                if self._folder is not None:
                    with _explain(place):
                        stream.flush()
                        os.fsync(stream.fileno())
            if found.hexdigest() != digest:
                raise StorageError(f"a file arrived as {found.hexdigest()}, and {digest} was said; send it again")
            with _explain(place):
                self._system.mv(partial, place)
        except BaseException:
            with contextlib.suppress(OSError):
                self._system.rm(partial)
            raise

    def get(self, digest: str, target: Path) -> None:
        """Put a stored file to ``target``, whole or not at all.

        Raises:
            StorageError: it is not there, or its content has changed.
        """
        with _explain(target), self.open(digest) as source:
            write_verified(iter(lambda: source.read(PIECE_BYTES), b""), digest, target)

    def open(self, digest: str) -> BinaryIO:
        place = self._place(digest)
        try:
            if self._folder is not None:  # others may write there: a link that they laid is not followed
                return open_beneath(self._folder, digest[:2], digest)
            return self._system.open(place, "rb")
        except FileNotFoundError:
            raise StorageError(f"{self.uri} holds no file {digest}") from None
        except OSError as error:
            raise StorageError(f"{place} cannot be read ({error.strerror or error}); see that it can be") from error

    def measure(self, digest: str) -> int:
        """Return the size of a stored file in bytes."""
        if self._folder is None:
            return self._system.size(self._place(digest))
        with self.open(digest) as stream:
            return os.fstat(stream.fileno()).st_size

    def link(self, digest: str, target: Path) -> None:
        """Put a stored file to ``target``, as a link where that is possible."""
        if self._folder is not None and self.measure(digest) >= LINK_BYTES:
            partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with contextlib.suppress(OSError), self.open(digest) as stream:
                    os.link(f"/proc/self/fd/{stream.fileno()}", partial, src_dir_fd=stream.fileno())
                    partial.replace(target)
                    return
            finally:
                partial.unlink(missing_ok=True)  # rename leaves it where the target is the same file already
        self.get(digest, target)

    def remove(self, digest: str) -> None:
        """Remove a stored file; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._place(digest))

    def remove_older(self, before_s: float, *, spare: Collection[str]) -> int:
        """Remove what was neither stored nor claimed since a Unix time, and return the number of files."""
        n = 0
        for path in self._system.find(self._root):
            name = path.rpartition("/")[2]
            with contextlib.suppress(FileNotFoundError):
                if DIGEST.fullmatch(name) and name not in spare and self._system.modified(path).timestamp() < before_s:
                    self._system.rm(path)
                    n += 1
        return n

    def _place(self, digest: str) -> str:
        if not DIGEST.fullmatch(digest):
            raise StorageError(f"{digest!r} is no digest of a file")
        return f"{self._root}/{digest[:2]}/{digest}"


@contextlib.contextmanager
def _explain(place: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        said = error.strerror or error
        raise StorageError(f"{place} cannot be written ({said}); free some room, or see who may write there") from error


def write_verified(pieces: Iterable[bytes], digest: str, target: Path) -> None:
    """Write what arrives to ``target``, whole or not at all. Raises StorageError if its digest is another one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    found = hashlib.sha256()
    try:
        with partial.open("wb") as stream:
            for piece in pieces:
                found.update(piece)
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        if found.hexdigest() != digest:
            raise StorageError(f"{target.name} arrived damaged: {found.hexdigest()} instead of {digest}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
