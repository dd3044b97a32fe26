"""Tables, pages and charts, computed from records and from the JSON documents alone."""

from fulltilt.report.summary import describe_plan, format_duration
from fulltilt.report.table import describe_busy, format_throughput, mark_busy

__all__ = ["describe_busy", "describe_plan", "format_duration", "format_throughput", "mark_busy"]
