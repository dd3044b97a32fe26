"""Keep answers: in memory, least recently used go first, in front of a file that outlives the server."""

import collections
import hashlib
import json
import time
import zlib
from collections.abc import Callable
from typing import Literal

import numpy as np

from fulltilt.infer.joining import Array, Sample
from fulltilt.infer.serve.disk import Disk

Source = Literal["memory", "disk"]
ENTRY_BYTES = 400  # what Python takes for an entry beside its arrays
WORD = 4  # bytes of a size or check sum


class Cache:
    """Answers by the SHA-256 of artefact and input. It is used from one thread.

    Args:
        artefact: Digest of what answers, and of all else that the answer depends on.
        clock: Of the wall, since entries on disk outlive this process.
    """

    def __init__(
        self,
        *,
        artefact: str,
        memory_bytes: int,
        expiry_s: float,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._prefix = hashlib.sha256(artefact.encode())
        self._most_bytes, self._expiry_s, self._disk, self._clock = memory_bytes, expiry_s, disk, clock
        self._kept: collections.OrderedDict[bytes, tuple[float, int, Sample]] = collections.OrderedDict()
        self.n_bytes = 0

    def build_key(self, sample: Sample) -> bytes:
        digest = self._prefix.copy()
        for array in sample:  # types and shapes count, not bytes alone
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()

    def get(self, key: bytes) -> tuple[Sample, Source] | None:
        now_s = self._clock()
        kept = self._kept.get(key)
        if kept is not None:
            if kept[0] > now_s:
                self._kept.move_to_end(key)
                return kept[2], "memory"
            self._forget(key)
        found = self._disk and self._disk.read(key, now_s)
        if found and (outputs := decode_arrays(found[0])) is not None:
            self._keep(key, outputs, found[1])
            return outputs, "disk"
        return None

    def put(self, key: bytes, outputs: Sample) -> None:
        expires_s = self._clock() + self._expiry_s
        self._keep(key, tuple(array.copy() for array in outputs), expires_s)  # of a view the whole batch would stay
        if self._disk is not None:
            self._disk.write(key, encode_arrays(outputs), expires_s)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _keep(self, key: bytes, outputs: Sample, expires_s: float) -> None:
        n_bytes = ENTRY_BYTES + sum(array.nbytes for array in outputs)
        self._forget(key)
        if n_bytes > self._most_bytes:
            return
        for array in outputs:
            array.setflags(write=False)  # several requests share it
        self._kept[key] = (expires_s, n_bytes, outputs)
        self.n_bytes += n_bytes
        while self.n_bytes > self._most_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        self.n_bytes -= kept[1] if kept else 0


def encode_arrays(arrays: Sample) -> bytes:
    """Turn arrays into bytes without pickle: check sum, JSON header, then each array."""
    header = json.dumps([[array.dtype.str, array.shape] for array in arrays]).encode()
    rest = b"".join([len(header).to_bytes(WORD), header, *(array.tobytes() for array in arrays)])
    return zlib.crc32(rest).to_bytes(WORD) + rest


def decode_arrays(data: bytes) -> Sample | None:
    """Return arrays that share the bytes and cannot be written to; None: these are not the bytes that were written."""
    rest = memoryview(data)[WORD:]
    if len(rest) < WORD or zlib.crc32(rest) != int.from_bytes(data[:WORD]):
        return None
    begin = WORD + int.from_bytes(rest[:WORD])
    arrays: list[Array] = []
    for name, shape in json.loads(bytes(rest[WORD:begin])):
        dtype = np.dtype(name)
        n_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(rest[begin : begin + n_bytes], dtype).reshape(shape))
        begin += n_bytes
    return tuple(arrays)
