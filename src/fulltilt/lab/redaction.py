"""Hide secrets in what is shown of an experiment: by key, in URLs, and by well-known shape."""

import functools
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_MODELS = ("bos", "cls", "eos", "mask", "pad", "per", "sep", "unk")  # their tokens are words of a vocabulary
_KEY = (
    r"(?:passw(?:or)?d|passphrase|secret|credentials?|(?:api|access|private|secret|account|auth)[_-]?key|"
    + "".join(rf"(?<!{word}_)" for word in _MODELS)
    + "token)"
)
_ENDS_SECRET = re.compile(f"{_KEY}$", re.IGNORECASE)
_ASSIGNED = re.compile(rf"""({_KEY}["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;&|()\[\]{{}}"']+)""", re.IGNORECASE)
_IN_URL = re.compile(r"(\w://)(?!git@)[^\s/?#@]+@")
_SHAPE = re.compile(
    r"\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
)


def redact(value: Any, key: str = "") -> Any:
    """Return a value as readers may see it, mappings and lists with all that is in them."""
    if isinstance(value, Mapping):
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, key) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    if _is_secret(key):
        return HIDDEN
    return _redact_text(value) if isinstance(value, str) else value


@functools.lru_cache(4096)  # the points of a grid have the same keys, and many the same texts
def _is_secret(key: str) -> bool:
    return _ENDS_SECRET.search(key) is not None


@functools.lru_cache(4096)
def _redact_text(text: str) -> str:
    text = _IN_URL.sub(rf"\1{HIDDEN}@", _ASSIGNED.sub(rf"\1{HIDDEN}", text))
    return _SHAPE.sub(HIDDEN, text)
