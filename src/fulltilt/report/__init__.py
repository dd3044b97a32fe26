"""Tables, pages and charts, computed from records and from the JSON documents alone."""

from fulltilt.report.html import build_tune_html, describe_machine
from fulltilt.report.summary import (
    PICK_TITLES,
    describe_epoch,
    describe_gain,
    describe_learning_rate,
    describe_pick,
    describe_plan,
    describe_search,
    format_duration,
)
from fulltilt.report.table import build_trials_table, format_throughput, format_value, read_memory_gib

__all__ = [
    "PICK_TITLES",
    "build_trials_table",
    "build_tune_html",
    "describe_epoch",
    "describe_gain",
    "describe_learning_rate",
    "describe_machine",
    "describe_pick",
    "describe_plan",
    "describe_search",
    "format_duration",
    "format_throughput",
    "format_value",
    "read_memory_gib",
]
