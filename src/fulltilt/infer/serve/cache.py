"""Keep answers: in memory, least recently used go first, in front of a file that outlives the server."""

import collections
import hashlib
import time
from collections.abc import Callable
from typing import Literal

from fulltilt.infer.joining import Sample
from fulltilt.infer.serve.disk import Disk
from fulltilt.infer.serve.encoding import decode_arrays, encode_arrays, hash_sample

Source = Literal["memory", "disk"]
ENTRY_BYTES = 400  # what Python takes for an entry beside its arrays


class Cache:
    """Answers by the SHA-256 of artefact, parameters and input. It is used from one thread.

    Args:
        artefact: Digest of what answers.
        parameters: Whatever else the answer depends on.
        clock: Of the wall, since entries on disk outlive this process.
    """

    def __init__(
        self,
        *,
        artefact: str,
        parameters: str = "",
        memory_bytes: int,
        expiry_s: float,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._prefix = hashlib.sha256(f"{artefact}\n{parameters}\n".encode())
        self._most_bytes, self._expiry_s, self._disk, self._clock = memory_bytes, expiry_s, disk, clock
        self._kept: collections.OrderedDict[bytes, tuple[float, int, Sample]] = collections.OrderedDict()
        self.n_bytes = 0

    @property
    def n_answers(self) -> int:
        return len(self._kept)

    def build_key(self, sample: Sample) -> bytes:
        return hash_sample(self._prefix, sample)

    def get(self, key: bytes) -> tuple[Sample, Source] | None:
        now_s = self._clock()
        kept = self._kept.get(key)
        if kept is not None:
            if kept[0] > now_s:
                self._kept.move_to_end(key)
                return kept[2], "memory"
            self._forget(key)
        found = self._disk and self._disk.read(key, now_s)
        if not found:
            return None
        data, expires_s = found
        try:
            outputs = decode_arrays(data)
        except ValueError:  # some bytes of the file are others than were written
            return None
        self._keep(key, outputs, expires_s)
        return outputs, "disk"

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
