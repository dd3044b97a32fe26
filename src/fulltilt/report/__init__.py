"""Tables, pages and charts, computed from records and from the JSON documents alone."""

from fulltilt.report.html import build_tune_html, describe_machine
from fulltilt.report.outcome import describe_outcome
from fulltilt.report.summary import (
    PICK_TITLES,
    describe_advice,
    describe_hints,
    describe_marks,
    describe_pick,
    describe_plan,
    describe_same_pick,
    describe_search,
    describe_verification,
    format_duration,
)
from fulltilt.report.table import (
    BUSY_MARK,
    build_trials_table,
    describe_busy,
    explain_mark,
    format_throughput,
    format_value,
    mark_busy,
    read_memory_gib,
)
from fulltilt.report.trials_csv import build_trials_csv

__all__ = [
    "BUSY_MARK",
    "PICK_TITLES",
    "build_trials_csv",
    "build_trials_table",
    "build_tune_html",
    "describe_advice",
    "describe_busy",
    "describe_hints",
    "describe_machine",
    "describe_marks",
    "describe_outcome",
    "describe_pick",
    "describe_plan",
    "describe_same_pick",
    "describe_search",
    "describe_verification",
    "explain_mark",
    "format_duration",
    "format_throughput",
    "format_value",
    "mark_busy",
    "read_memory_gib",
]
