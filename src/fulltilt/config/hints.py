"""Read type annotations: what they admit, and what they are in words."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import DocInfo
from pydantic.fields import FieldInfo


def admits(hint: Any, *wanted: Any, deep: bool = False) -> bool:
    """Return whether a value of a ``wanted`` type fits the annotation, or, with ``deep``, an entry inside the value."""
    return any(kind in wanted for kind in _list_kinds(hint, deep=deep))


def _list_kinds(hint: Any, *, deep: bool) -> list[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _list_kinds(args[0], deep=deep)
    if origin is Literal:
        return [type(value) for value in args]
    is_union = origin in (typing.Union, types.UnionType)
    kinds = [kind for arg in args if is_union or deep for kind in _list_kinds(arg, deep=deep)]
    return kinds if is_union else [origin or hint, *kinds]


_TYPE_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "a value",
}


def describe_type(hint: Any) -> str:
    """Return a type in words: "a whole number of at least 1 or null"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return describe_type(args[0]) + " and".join(_list_bounds(args[1:]))
    if origin in (typing.Union, types.UnionType):
        kinds = dict.fromkeys(describe_type(a) for a in args)
        return " or ".join(kind for kind in kinds if kind != _TYPE_NAMES[int] or _TYPE_NAMES[float] not in kinds)
    if origin is Literal:
        return " or ".join("null" if v is None else json.dumps(v) if isinstance(v, bool) else str(v) for v in args)
    if origin is tuple and args and args[-1] is not ...:
        return f"a list of ({', '.join(map(describe_type, args))})"
    if origin in (list, tuple, Sequence):
        return f"a list of ({describe_type(args[0])})" if args and args[0] is not Any else "a list"
    if origin is dict:
        return f"a mapping of ({describe_type(args[0])}) to ({describe_type(args[1])})"
    return _TYPE_NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _list_bounds(metadata: Iterable[Any]) -> list[str]:
    """List what an annotation adds to its type, each with a space in front: " of at least 0"."""
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below", "min_length": "with at least"}
    bounds: list[str] = []
    for bound in metadata:
        if isinstance(bound, FieldInfo):
            bounds += _list_bounds(bound.metadata)
        elif isinstance(bound, DocInfo):
            bounds.append(f" {bound.documentation}")
        else:
            for name, text in words.items():
                if (limit := getattr(bound, name, None)) is not None:
                    bounds.append(f" {text} {limit}" + (" entry" if name == "min_length" else ""))
    return bounds
