"""Listeners: callables of an ``Event`` that show or store what the engine says. The engine knows none of them."""

from fulltilt.listeners.csv_log import CsvLog
from fulltilt.listeners.event_log import EventLog
from fulltilt.listeners.metrics_tracker import MetricsTracker
from fulltilt.listeners.progress_bar import ProgressBar, list_headlines
from fulltilt.listeners.tensorboard_log import TensorBoardLog

__all__ = ["CsvLog", "EventLog", "MetricsTracker", "ProgressBar", "TensorBoardLog", "list_headlines"]
