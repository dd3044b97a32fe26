"""Turn arrays into bytes and back without pickle: check sum, JSON header, then each array."""

import hashlib
import json
import zlib

import numpy as np

from fulltilt.infer.joining import Array, Sample

WORD = 4  # bytes of a size or check sum
KINDS = "biuf"


def encode_arrays(arrays: Sample) -> bytes:
    header = json.dumps([[array.dtype.str, array.shape] for array in arrays]).encode()
    rest = b"".join([len(header).to_bytes(WORD), header, *(array.tobytes() for array in arrays)])
    return zlib.crc32(rest).to_bytes(WORD) + rest


def decode_arrays(data: bytes) -> Sample:
    """Return arrays that share the bytes and cannot be written to.

    Raises:
        ValueError: these are not the bytes that were written.
    """
    rest = memoryview(data)[WORD:]
    if len(rest) < WORD or zlib.crc32(rest) != int.from_bytes(data[:WORD]):
        raise ValueError("the check sum is another")
    begin = WORD + int.from_bytes(rest[:WORD])
    arrays: list[Array] = []
    for name, shape in json.loads(bytes(rest[WORD:begin])):
        dtype = np.dtype(name)
        if dtype.kind not in KINDS:
            raise ValueError(f"{name} is no type of numbers")
        n_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(rest[begin : begin + n_bytes], dtype).reshape(shape))
        begin += n_bytes
    return tuple(arrays)


def hash_sample(prefix: "hashlib._Hash", sample: Sample) -> bytes:
    """Return SHA-256 of what was hashed before and of a sample; types and shapes count, not bytes alone."""
    digest = prefix.copy()
    for array in sample:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
