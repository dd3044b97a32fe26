"""Read samples out of a request's JSON, and refuse what the model does not take, saying what it expects."""

import json
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request

from fulltilt.infer.joining import MIN_LENGTH, Array, Sample
from fulltilt.infer.manifest import InputSpec, Manifest
from fulltilt.records.words import WordTable

MALFORMED, UNFIT = 400, 422
STATUS = "fulltilt.status"  # in a request's scope: as its answer was sent, or as a stream failed after that
TAKEN = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}  # kind of an input → kinds of numbers that it takes


def read_samples(body: bytes, manifest: Manifest, words: WordTable | None, most: float = math.inf) -> list[Sample]:
    """Read ``{"inputs": [sample, …]}``, or with the ``words`` of the training ``{"texts": ["…", …]}``.

    Raises:
        HTTPException: it is not of that form (400); more than ``most`` samples (413); wrong shape, dtype, length (422).
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(MALFORMED, f'the body is not JSON ({error}); send {{"inputs": [sample, …]}}') from None
    kinds = [*({"inputs", "texts"} & document.keys())] if isinstance(document, dict) else []
    given = document[kinds[0]] if len(kinds) == 1 else None
    if not isinstance(given, list):
        said = 'the body is not {"inputs": [sample, …]}, nor {"texts": ["…", …]}; send an object with one such list'
        raise HTTPException(MALFORMED, said)
    kind = kinds[0]
    if not given:
        raise HTTPException(UNFIT, f"{kind} holds no sample; send at least one")
    if len(given) > most:
        raise HTTPException(413, f"{len(given)} samples are more than may wait ({most}); send fewer")
    if kind == "texts":
        if words is None:
            raise HTTPException(UNFIT, "the words of the training are not kept with this model; send inputs, no texts")
        if not all(isinstance(text, str) for text in given):
            raise HTTPException(UNFIT, 'texts holds something else than texts; send {"texts": ["…", …]}')
        given = [words.encode(text) for text in given]
    return [_read_sample(sample, manifest, f"{kind}[{n}]") for n, sample in enumerate(given)]


def write_samples(samples: Sequence[Sample]) -> list[Any]:
    """Return samples, or outputs of samples, as they stand in JSON: the one array itself where there is one."""
    return [arrays[0].tolist() if len(arrays) == 1 else [array.tolist() for array in arrays] for arrays in samples]


def describe_inputs(manifest: Manifest) -> str:
    """Say what the model takes: ``ids: int64 of shape [length ≤ 128]; mask: …``."""
    length = "length" if manifest.max_length is None else f"length ≤ {manifest.max_length}"
    shapes = [", ".join(length if n is None else str(n) for n in spec.shape) for spec in manifest.inputs]
    given = zip(manifest.inputs, shapes, strict=True)
    return "; ".join(f"{spec.name}: {spec.dtype} of shape [{shape}]" for spec, shape in given)


def _read_sample(given: Any, manifest: Manifest, place: str) -> Sample:
    specs = manifest.inputs
    parts = [given] if len(specs) == 1 else given
    try:
        if not isinstance(parts, list) or len(parts) != len(specs):
            raise ValueError(f"it is not a list of the {len(specs)} inputs of the model")
        sample = tuple(_read_array(part, spec) for part, spec in zip(parts, specs, strict=True))
        _check_lengths(sample, manifest)
    except ValueError as error:
        raise HTTPException(UNFIT, f"{place}: {error}; expected {describe_inputs(manifest)}") from None
    return sample


def _read_array(given: Any, spec: InputSpec) -> Array:
    try:
        array = np.asarray(given)
    except ValueError:
        raise ValueError(f"{spec.name} is ragged") from None
    dtype = np.dtype(spec.dtype)
    if array.dtype.kind not in TAKEN[dtype.kind] and array.size:
        found = "something else than numbers of 64 bits" if array.dtype.kind in "OUSV" else str(array.dtype)
        raise ValueError(f"{spec.name} holds {found}")
    fitting = [want in (None, size) for want, size in zip(spec.shape, array.shape, strict=False)]
    if array.ndim != len(spec.shape) or not all(fitting):
        raise ValueError(f"{spec.name} has shape {list(array.shape)}")
    if spec.below is not None and not ((array >= 0) & (array < spec.below)).all():
        raise ValueError(f"{spec.name} holds a number that is not 0 to {spec.below - 1}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if not (np.isfinite(converted) if dtype.kind == "f" else converted == array).all():
        raise ValueError(f"{spec.name} holds a number that {dtype} does not")
    return converted


def _check_lengths(sample: Sample, manifest: Manifest) -> None:
    lengths = {spec.name: array.shape[0] for array, spec in zip(sample, manifest.inputs, strict=True) if spec.varies}
    if len(set(lengths.values())) > 1:
        raise ValueError("its inputs differ in length: " + ", ".join(f"{name} {n}" for name, n in lengths.items()))
    least = 1 if manifest.joins == "pad" else MIN_LENGTH  # a shorter one would be padded
    for length in lengths.values():
        if length < least or (manifest.max_length is not None and length > manifest.max_length):
            raise ValueError(f"its length is {length}")


def read_deadline_s(request: Request, usual_s: float | None) -> float:
    """Return when a request's time is over, by the monotonic clock; infinite: never. Raises HTTPException (400)."""
    given = request.headers.get("x-deadline-ms")
    if given is not None and not re.fullmatch("[1-9][0-9]{,12}", given):
        raise HTTPException(MALFORMED, f"X-Deadline-Ms {given:.40} is not 1 to 13 digits; send milliseconds above 0")
    seconds = usual_s if given is None else int(given) / 1000
    return math.inf if seconds is None else time.monotonic() + seconds
