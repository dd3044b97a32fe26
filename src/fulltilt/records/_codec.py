"""Encode frozen dataclasses as plain JSON, and decode them by their type hints.

Reading ignores unknown keys, gives missing ones their default, and is strict in types. Non-finite floats never reach a
file: JSON has no spelling for them.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

VERSION = 1
T = TypeVar("T")


def encode(value: Any) -> Any:
    """Turn a record into JSON-ready dicts and lists; a non-finite float becomes ``None``."""
    kind = type(value)
    if kind is float:  # plain values first: nearly all of an event's fields are, and it is written while training
        return value if math.isfinite(value) else None
    if value is None or kind in (int, str, bool):
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _list_fields(kind)}
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [encode(v) for v in value]
    if isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"{type(value).__name__} has no JSON form here; give the record a to_json()")


def decode(cls: type[T], data: Any) -> T:
    """Build ``cls`` from what ``encode`` made.

    Raises:
        ValueError: a required field is missing, or a value has the wrong type; names the field.
    """
    return typing.cast(T, _decode(cls, data, cls.__name__))


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Encode a record as JSON text."""
    return json.dumps(encode(value), indent=indent, ensure_ascii=False, allow_nan=False)


def loads(cls: type[T], text: str | bytes) -> T:
    """Decode a record from JSON text; raises ValueError as ``decode`` does."""
    return decode(cls, json.loads(text))


@functools.cache
def _list_fields(cls: type) -> tuple[str, ...]:
    """List the fields, those that the class inherits behind its own."""
    names = [field.name for field in dataclasses.fields(cls)]
    inherited = {
        field.name for base in filter(dataclasses.is_dataclass, cls.__mro__[1:]) for field in dataclasses.fields(base)
    }
    return tuple(sorted(names, key=inherited.__contains__))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, data: Any, where: str) -> Any:
    if hint is Any:
        return data
    if hasattr(hint, "from_json"):
        try:
            return hint.from_json(data)
        except KeyError as missing:
            raise ValueError(f"{where}.{missing.args[0]} is missing") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, data, where)
    if origin is typing.Literal:
        if data not in args:
            raise ValueError(f"{where} is {data!r}, expected one of {', '.join(map(repr, args))}")
        return data
    if origin in (tuple, list) and not isinstance(data, list | tuple):
        raise ValueError(f"{where} is {data!r} ({type(data).__name__}), expected a list")
    if origin is tuple:
        inner = args[:1] * len(data) if args[-1:] == (Ellipsis,) else args
        return tuple(_decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(inner, data, strict=True)))
    if origin is list:
        return [_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(data)]
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(data, Mapping):
            raise ValueError(f"{where} is {data!r} ({type(data).__name__}), expected an object")
        return {k: _decode(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), data, where)
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(hint, type) and not isinstance(data, hint):
        raise ValueError(f"{where} is {data!r} ({type(data).__name__}), expected {hint.__name__}")
    return data


def _decode_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, data, where)
        except ValueError as problem:
            problems.append(str(problem))
    raise ValueError("; ".join(problems))


def _decode_dataclass(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {type(data).__name__}, expected an object with the fields of {cls.__name__}")
    values = {}
    for field in dataclasses.fields(cls):
        if field.name in data:
            values[field.name] = _decode(_hints(cls)[field.name], data[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}.{field.name} is missing")
    return cls(**values)
