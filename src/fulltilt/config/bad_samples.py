"""Read ``data.on_bad_sample``, which says what a run does about a sample that cannot be read."""

import contextlib
import struct
from collections.abc import Iterator
from typing import Annotated

from annotated_types import Ge

from fulltilt.config.binding import build_component
from fulltilt.config.calls import parse_call
from fulltilt.errors import ConfigError, DataError

DEFAULT_LIMIT = 100
SKIP_REMEDY = f"data.on_bad_sample=skip(limit={DEFAULT_LIMIT}) leaves such samples out"
UNREADABLE = (DataError, OSError, EOFError, SyntaxError, ValueError, struct.error)
"""What a damaged sample is known to raise, in our readers and in a user's own dataset."""


def parse_on_bad_sample(text: str) -> int | None:
    """Return how many samples may be left out: None for ``stop``, 20 for ``skip(limit=20)``, 100 for ``skip``."""
    if parse_call(text).name not in _POLICIES:
        raise ConfigError(f"{text!r} is neither stop nor skip(limit=…)")
    return build_component(text, _POLICIES, kind="policy", where="data.on_bad_sample")


@contextlib.contextmanager
def explain_unskipped(what: str) -> Iterator[None]:
    """Turn the error of an unreadable sample into a DataError: ``on_bad_sample: skip`` does not apply to ``what``."""
    try:
        yield
    except UNREADABLE as error:
        raise DataError(f"{error}; data.on_bad_sample skip does not reach {what}: repair or remove the data") from error


def _skip(limit: Annotated[int, Ge(1)] = DEFAULT_LIMIT) -> int:
    return limit


_POLICIES = {"stop": lambda: None, "skip": _skip}
