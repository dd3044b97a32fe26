"""Resolve ``${data.batch_size}``, values that refer to other keys, once a grid is expanded."""

import re
from collections.abc import Mapping
from typing import Any

from fulltilt.config.aliases import resolve_spelling, suggest_names
from fulltilt.config.calls import format_value
from fulltilt.config.leaves import LEAVES
from fulltilt.errors import ConfigError

MAX_TEXT = 2**16  # characters that references may bring into one value: a few lines of them could fill any memory
_REFERENCE = re.compile(r"\$\{\s*([^{}]*?)\s*\}")


def resolve_references(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace references; a value that is one reference takes the type of what it refers to.

    Args:
        values: By canonical key; keys that are not there have their default.

    Returns:
        The resolved values, and a message for every key that could not be resolved.
    """
    done: dict[str, Any] = {}
    room: dict[str, int] = {}

    def refer(spelled: str, path: tuple[str, ...]) -> Any:
        found = resolve_key(_find_key(spelled), path)
        room[path[-1]] -= len(str(found))
        if room[path[-1]] < 0:
            raise ConfigError(f"its references bring more than {MAX_TEXT} characters; write what is meant")
        return found

    def resolve_key(key: str, path: tuple[str, ...]) -> Any:
        if key in path:
            chain = " → ".join([*path[path.index(key) :], key])
            raise ConfigError(f"refers to itself: {chain}; put a value in one of them")
        if key not in done:
            room[key] = MAX_TEXT
            done[key] = resolve_value(values[key] if key in values else LEAVES[key].default, (*path, key))
        return done[key]

    def resolve_value(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {k: resolve_value(v, path) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [resolve_value(v, path) for v in value]
        if not isinstance(value, str):
            return value
        if whole := _REFERENCE.fullmatch(value):
            return refer(whole[1], path)

        def insert(reference: re.Match[str]) -> str:
            found = refer(reference[1], path)
            return found if isinstance(found, str) else format_value(found)

        text = _REFERENCE.sub(insert, value)
        if "${" in text:
            raise ConfigError(f"{value!r} has '${{' without a key and '}}'; write ${{data.batch_size}}")
        return text

    problems: dict[str, str] = {}
    for key in values:
        try:
            resolve_key(key, ())
        except ConfigError as error:
            problems[key] = error.message
    return {key: done[key] for key in values if key in done}, problems


def _find_key(spelled: str) -> str:
    spelling = resolve_spelling(spelled)
    if spelling is None:
        raise ConfigError(f"${{{spelled}}} refers to an unknown key; {suggest_names(spelled)}")
    key, *others = spelling.keys
    if others:
        raise ConfigError(f"${{{spelled}}} refers to {' and '.join(spelling.keys)}; name one of them")
    return key
