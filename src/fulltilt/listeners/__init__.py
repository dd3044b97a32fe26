"""Listeners: callables of an ``Event`` that show or store what the engine says. The engine knows none of them."""

from fulltilt.listeners.csv_log import CsvLog
from fulltilt.listeners.event_log import EventLog
from fulltilt.listeners.progress_bar import ProgressBar
from fulltilt.listeners.tensorboard_log import TensorBoardLog

__all__ = ["CsvLog", "EventLog", "ProgressBar", "TensorBoardLog"]
