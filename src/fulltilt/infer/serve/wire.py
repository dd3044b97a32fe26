"""Read samples out of a request's JSON, and refuse what the model does not take, saying what it expects."""

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from fulltilt.infer.joining import Array, Sample
from fulltilt.infer.manifest import InputSpec, Manifest
from fulltilt.records.words import WordTable

TAKEN = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}  # kind of an input → kinds of numbers that it takes


class MalformedError(Exception):
    """The body is not JSON of the expected form: status 400."""


class UnfitError(Exception):
    """A sample does not fit the model: status 422."""


def read_samples(body: bytes, manifest: Manifest, words: WordTable | None = None) -> list[Sample]:
    """Read ``{"inputs": [sample, …]}``, or with the ``words`` of the training ``{"texts": ["…", …]}``.

    Raises:
        MalformedError: it is not of that form.
        UnfitError: wrong shape, dtype or length.
    """
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f'the body is not JSON ({error}); send {{"inputs": [sample, …]}}') from None
    if isinstance(document, dict) and "texts" in document:
        return _read_texts(document["texts"], manifest, words)
    given = document.get("inputs") if isinstance(document, dict) else None
    if not isinstance(given, list):
        raise MalformedError('the body is not {"inputs": [sample, …]}; send an object with a list of samples')
    if not given:
        raise UnfitError("inputs holds no sample; send at least one")
    return [_read_sample(sample, manifest, f"inputs[{n}]") for n, sample in enumerate(given)]


def _read_texts(texts: Any, manifest: Manifest, words: WordTable | None) -> list[Sample]:
    if words is None:
        raise UnfitError("texts cannot be read: the words of the training are not kept with this model; send inputs")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise MalformedError('texts is not a list of texts; send {"texts": ["…", …]}')
    return [_read_sample(words.encode(text), manifest, f"texts[{n}]") for n, text in enumerate(texts)]


def write_samples(samples: Sequence[Sample]) -> list[Any]:
    """Return samples, or outputs of samples, as they stand in JSON: the one array itself where there is one."""
    return [arrays[0].tolist() if len(arrays) == 1 else [array.tolist() for array in arrays] for arrays in samples]


def describe_input(spec: InputSpec, max_length: int | None) -> str:
    """Say what an input is: ``ids: int64 of shape [length ≤ 128]``."""
    length = "length" if max_length is None else f"length ≤ {max_length}"
    shape = ", ".join(length if size is None else str(size) for size in spec.shape)
    return f"{spec.name}: {spec.dtype} of shape [{shape}]"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _read_sample(given: Any, manifest: Manifest, place: str) -> Sample:
    specs = manifest.inputs
    parts = [given] if len(specs) == 1 else given
    if not isinstance(parts, list) or len(parts) != len(specs):
        expected = "; ".join(describe_input(spec, manifest.max_length) for spec in specs)
        raise UnfitError(f"{place} is not a list of the {len(specs)} inputs of the model; expected {expected}")
    try:
        sample = tuple(_read_array(part, spec) for part, spec in zip(parts, specs, strict=True))
        _check_lengths(sample, manifest)
    except UnfitError as error:
        expected = "; ".join(describe_input(spec, manifest.max_length) for spec in specs)
        raise UnfitError(f"{place}: {error}; expected {expected}") from None
    return sample


def _read_array(given: Any, spec: InputSpec) -> Array:
    try:
        array = np.asarray(given)
    except ValueError:
        raise UnfitError(f"{spec.name} is ragged") from None
    dtype = np.dtype(spec.dtype)
    if array.dtype.kind not in TAKEN[dtype.kind] and array.size:
        found = "something else than numbers" if array.dtype.kind in "OUSV" else str(array.dtype)
        raise UnfitError(f"{spec.name} holds {found}")
    is_fitting = len(array.shape) == len(spec.shape) and all(
        want is None or size == want for size, want in zip(array.shape, spec.shape, strict=True)
    )
    if not is_fitting:
        raise UnfitError(f"{spec.name} has shape {list(array.shape)}")
    return _convert(array, dtype, spec.name)


def _convert(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    is_safe = np.isfinite(converted).all() if dtype.kind == "f" else dtype.kind == "b" or (converted == array).all()
    if not is_safe:
        raise UnfitError(f"{name} holds a number that {dtype} does not")
    return converted


def _check_lengths(sample: Sample, manifest: Manifest) -> None:
    lengths = {spec.name: array.shape[0] for array, spec in zip(sample, manifest.inputs, strict=True) if spec.varies}
    if len(set(lengths.values())) > 1:
        raise UnfitError("its inputs differ in length: " + ", ".join(f"{name} {n}" for name, n in lengths.items()))
    for length in lengths.values():
        if length < 1 or (manifest.max_length is not None and length > manifest.max_length):
            raise UnfitError(f"its length is {length}")
