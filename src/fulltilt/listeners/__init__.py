"""Listeners: callables of an ``Event`` that show or store what the engine says. The engine knows none of them."""

# ruff: noqa: F401

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fulltilt.listeners.csv_log import CsvLog
from fulltilt.listeners.event_log import EventLog
from fulltilt.listeners.metrics_tracker import MetricsTracker
from fulltilt.listeners.mlflow_log import MlflowLog
from fulltilt.listeners.progress_bar import ProgressBar, list_headlines
from fulltilt.listeners.tensorboard_log import TensorBoardLog
from fulltilt.listeners.wandb_log import WandbLog
from fulltilt.records import Listener

LOGGERS: Mapping[str, Callable[[Path], Listener]] = {
    "csv": CsvLog,
    "tensorboard": lambda out_dir: TensorBoardLog(out_dir / "tensorboard"),
    "mlflow": lambda out_dir: MlflowLog(out_dir / "mlflow"),
    "wandb": WandbLog,
}
"""What ``run.loggers`` can name → its listener for a run folder."""


def build_loggers(names: Iterable[str], out_dir: Path) -> list[Listener]:
    """The listeners that ``run.loggers`` names, each once.

    Raises:
        UsageError: the package of one is not installed.
    """
    return [LOGGERS[name](out_dir) for name in dict.fromkeys(names)]
