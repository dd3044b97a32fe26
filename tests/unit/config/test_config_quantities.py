"""Values that carry their own unit."""

import pytest

from fulltilt.config import Interval, Warmup, parse_bytes, parse_duration_s, parse_interval, parse_warmup
from fulltilt.errors import ConfigError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "12GiB", 12 * 2**30),
        (parse_bytes, "12GB", 12 * 10**9),
        (parse_bytes, "500 MiB", 500 * 2**20),
        (parse_bytes, "1.5gib", 3 * 2**29),
        (parse_bytes, "4096", 4096),
        (parse_bytes, 4096, 4096),
        (parse_bytes, "1_000kB", 10**6),
        (parse_duration_s, "6m", 360.0),
        (parse_duration_s, "90s", 90.0),
        (parse_duration_s, "1h", 3600.0),
        (parse_duration_s, "1h30m", 5400.0),
        (parse_duration_s, "250ms", 0.25),
        (parse_duration_s, "2 min", 120.0),
        (parse_interval, "1 epoch", Interval(count=1, unit="epochs")),
        (parse_interval, "500 Steps", Interval(count=500, unit="steps")),
        (parse_interval, str(Interval(count=3, unit="steps")), Interval(count=3, unit="steps")),
        (str, Interval(count=1, unit="epochs"), "1 epoch"),
        (parse_interval, "none", None),
        (parse_interval, None, None),
        (parse_warmup, 0, Warmup(count=0, unit="steps")),
        (parse_warmup, 500, Warmup(count=500, unit="steps")),
        (parse_warmup, 0.05, Warmup(count=0.05, unit="fraction")),
        (parse_warmup, "0.05", Warmup(count=0.05, unit="fraction")),
        (parse_warmup, "2 epochs", Warmup(count=2, unit="epochs")),
        (parse_warmup, "none", Warmup(count=0, unit="steps")),
        (parse_warmup, 3.0, Warmup(count=3, unit="steps")),
    ],
)
def test_read(parse, text, value):
    assert parse(text) == value


UNITLESS, NOT_POSITIVE = "is not a duration; write a number and its unit", "not a duration of more than zero; write for"
REFUSED = [
    (parse_bytes, "12GiB", ["12 apples", "GiB", "", "-1GiB", "0", "0GiB", "1e400GiB", "12GiB or so", True, "nan"]),
    (parse_duration_s, UNITLESS, ["6", 6, "m", "6 parsecs", "1h 30"]),
    (parse_duration_s, f"{NOT_POSITIVE} instance 90s or 6m", ["", "-5s", "-6m", "0s"]),
    (parse_interval, "1 epoch", ["1", "0 epochs", "-1 steps", "1.5 epochs", "often", ""]),
    (parse_warmup, None, [-1, 1.5, "soon", float("nan")]),
]


@pytest.mark.parametrize(
    ("parse", "said", "text"), [(parse, said, text) for parse, said, texts in REFUSED for text in texts]
)
def test_refused(parse, said, text):
    with pytest.raises(ConfigError, match=said):
        parse(text)
