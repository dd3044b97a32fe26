"""Sizes in words: the unit by the size, and never 0.00 of what is something."""

import pytest

from fulltilt.records import format_bytes, format_gib


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (980, "980 bytes"),
        (1024, "1 KiB"),
        (15_678, "15.3 KiB"),
        (1023.7, "1 KiB"),
        (1023 * 1024, "1,023 KiB"),
        (2**20 - 1, "1 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**40 - 1, "1.00 TiB"),
        (3 * 2**20, "3 MiB"),
        (302.4 * 2**20, "302 MiB"),
        (2**30, "1.00 GiB"),
        (18.834 * 2**30, "18.83 GiB"),
        (3757.3 * 2**40, "3,757.30 TiB"),
    ],
)
def test_the_unit_follows_the_size(n_bytes, text):
    assert format_bytes(n_bytes) == format_gib(n_bytes / 2**30) == text


@pytest.mark.parametrize("exponent", range(45))
def test_no_size_is_rounded_to_nothing(exponent):
    said = format_bytes(2**exponent).split()[0]
    assert float(said.replace(",", "")) >= 1
