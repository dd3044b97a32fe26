"""Write experiments as a table for other programs."""

import csv
import io
from collections.abc import Sequence

from fulltilt.errors import strip_control_codes
from fulltilt.lab.listing import Entry

FIRST = ("id", "sweep", "state", "attempt", "seconds")
DANGEROUS = ("=", "+", "-", "@", "\t")  # a spreadsheet takes a text that begins so for a formula


def format_csv(entries: Sequence[Entry]) -> str:
    """Return a line for each experiment: what it is, the values of its point, its metrics, why it ended."""
    stream = io.StringIO(newline="")
    axes = dict.fromkeys(key for entry in entries for key in entry["point"])
    metrics = dict.fromkeys(name for entry in entries for name in entry["metrics"])
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(list(map(_disarm, [*FIRST, *axes, *metrics, "reason"])))
    for entry in entries:
        values = [entry[name] for name in FIRST] + [entry["point"].get(key) for key in axes]
        values += [entry["metrics"].get(name) for name in metrics] + [entry["reason"]]
        writer.writerow(list(map(_disarm, values)))
    return stream.getvalue()


def _disarm(value: object) -> object:
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    text = strip_control_codes(value)  # a bare carriage return would begin another line
    return f"'{text}" if text.startswith(DANGEROUS) else text
