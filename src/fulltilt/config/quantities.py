"""Read values with a unit from the configuration and from flags: ``12GiB``, ``6m``, ``1 epoch``."""

import dataclasses
import math
import re
from typing import Literal

from fulltilt.errors import ConfigError
from fulltilt.levers import read_interval

BYTES_PER_UNIT = {
    "b": 1,
    **{f"{prefix}b": 10 ** (3 * n) for n, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 2 ** (10 * n) for n, prefix in enumerate("kmgt", 1)},
}
SECONDS_PER_UNIT = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_QUANTITY = re.compile(r"(\d+(?:_\d+)*(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Says that something happens every ``count`` optimizer steps or epochs."""

    count: int
    unit: Literal["steps", "epochs"]

    def __str__(self) -> str:
        return f"{self.count} {self.unit if self.count != 1 else self.unit[:-1]}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Warmup:
    """Holds a length of training: optimizer steps, epochs, or a fraction (0 to 1) of the whole run."""

    count: float
    unit: Literal["steps", "epochs", "fraction"]


def parse_bytes(text: str | int) -> int:
    """Read a positive size in bytes (``12GiB`` is 12 · 2³⁰, ``12GB`` 12 · 10⁹), or raise a ConfigError."""
    words = str(text).strip()
    match = _QUANTITY.fullmatch(f"{words}b" if words.isdecimal() else words)
    if match is None or match[2].lower() not in BYTES_PER_UNIT:
        raise ConfigError(f"{text!r} is not a size in bytes; write a number and its unit, as in 12GiB or 500MiB")
    count = round(float(match[1].replace("_", "")) * BYTES_PER_UNIT[match[2].lower()])
    if count < 1:
        raise ConfigError(f"{text!r} is less than one byte; write a positive size, as in 12GiB")
    return count


def parse_duration_s(text: str | int | float) -> float:
    """Read a positive duration in seconds (``6m`` is 360.0, ``1h30m`` 5400.0), or raise a ConfigError."""
    words, total_s = str(text).strip(), 0.0
    rest = words.removeprefix("-")
    while rest:
        match = _QUANTITY.match(rest)
        if match is None or match[2].lower() not in SECONDS_PER_UNIT:
            raise ConfigError(f"{text!r} is not a duration; write a number and its unit, as in 90s, 6m or 1h30m")
        total_s += float(match[1].replace("_", "")) * SECONDS_PER_UNIT[match[2].lower()]
        rest = rest[match.end() :]
    if words.startswith("-") or not 0 < total_s < math.inf:
        raise ConfigError(f"{text!r} is not a duration of more than zero; write for instance 90s or 6m")
    return total_s


def parse_interval(text: str | None) -> Interval | None:
    """Read ``1 epoch`` or ``500 steps`` (None means "never"), or raise a ConfigError."""
    if text is None or str(text).strip().lower() in ("none", "never"):
        return None
    try:
        count, unit = read_interval(str(text))
    except ValueError:
        raise ConfigError(f"{text!r} does not say how often; write '1 epoch', '500 steps' or none") from None
    return Interval(count=count, unit="epochs" if unit == "epoch" else "steps")


def parse_warmup(value: str | int | float) -> Warmup:
    """Read ``0.05`` as a fraction of the run, ``500`` and ``500 steps`` as optimizer steps, ``2 epochs`` as epochs."""
    try:
        number = float(value)
    except ValueError:
        interval = parse_interval(str(value))
        return Warmup(count=interval.count, unit=interval.unit) if interval else Warmup(count=0, unit="steps")
    if 0 < number < 1:
        return Warmup(count=number, unit="fraction")
    if number < 0 or not number.is_integer():
        raise ConfigError(f"warmup {value} is neither a fraction below 1 nor whole steps; write 0.05 or '500 steps'")
    return Warmup(count=int(number), unit="steps")
