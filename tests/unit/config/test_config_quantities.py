"""Values that carry their own unit."""

from __future__ import annotations

import pytest

from fulltilt.config import Interval, Warmup, parse_bytes, parse_duration_s, parse_interval, parse_warmup
from fulltilt.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("12GiB", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("500 MiB", 500 * 2**20),
        ("1.5gib", 3 * 2**29),
        ("4096", 4096),
        (4096, 4096),
        ("1_000kB", 10**6),
    ],
)
def test_bytes(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["12 apples", "GiB", "", "-1GiB", "0", "0GiB", "1e400GiB", "12GiB or so", True, "nan"])
def test_bytes_refused(text):
    with pytest.raises(ConfigError, match="12GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("6m", 360.0), ("90s", 90.0), ("1h", 3600.0), ("1h30m", 5400.0), ("250ms", 0.25), ("2 min", 120)],
)
def test_durations(text, seconds):
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("said", "texts"),
    [
        ("is not a duration; write a number and its unit", ["6", 6, "m", "6 parsecs", "1h 30"]),
        ("not a duration of more than zero; write for instance 90s or 6m", ["", "-5s", "-6m", "0s"]),
    ],
)
def test_durations_refused(said, texts):
    for text in texts:
        with pytest.raises(ConfigError, match=said):
            parse_duration_s(text)


def test_intervals():
    assert parse_interval("1 epoch") == Interval(count=1, unit="epochs")
    assert parse_interval("500 Steps") == Interval(count=500, unit="steps")
    assert parse_interval("none") is None
    assert parse_interval(None) is None
    assert str(Interval(count=1, unit="epochs")) == "1 epoch"
    assert parse_interval(str(Interval(count=3, unit="steps"))) == Interval(count=3, unit="steps")


@pytest.mark.parametrize("text", ["1", "0 epochs", "-1 steps", "1.5 epochs", "often", ""])
def test_intervals_refused(text):
    with pytest.raises(ConfigError, match="1 epoch"):
        parse_interval(text)


@pytest.mark.parametrize(
    ("value", "count", "unit"),
    [
        (0, 0, "steps"),
        (500, 500, "steps"),
        (0.05, 0.05, "fraction"),
        ("0.05", 0.05, "fraction"),
        ("2 epochs", 2, "epochs"),
        ("none", 0, "steps"),
        (3.0, 3, "steps"),
    ],
)
def test_warmup(value, count, unit):
    assert parse_warmup(value) == Warmup(count=count, unit=unit)


@pytest.mark.parametrize("value", [-1, 1.5, "soon", float("nan")])
def test_warmup_refused(value):
    with pytest.raises(ConfigError):
        parse_warmup(value)
