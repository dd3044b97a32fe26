"""``TensorBoardLog``: the curves of a run for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.records import EpochDone, Evaluated, Event, RunEnded, RunStarted, StepsDone


class TensorBoardLog:
    """Writes scalars over optimizer steps into ``folder``, for ``tensorboard --logdir``.

    After a resume TensorBoard is told to hide the steps past the checkpoint that an earlier process wrote.

    Raises:
        UsageError: the tensorboard package is not installed.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self._writer_class = _import_writer()
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            if self._writer is not None:  # the run goes on in another form, see Replanned
                self._writer.close()
            purge = event.first_step + 1 if event.first_step else None
            self._writer = self._writer_class(str(self.path), purge_step=purge)
        elif self._writer is None:
            return
        elif isinstance(event, StepsDone):
            for name in ("loss", "lr", "samples_per_s"):
                self._writer.add_scalar(f"train/{name}", getattr(event, name), event.step)
            for phase, value in event.phases_ms.items():
                if value is not None:
                    self._writer.add_scalar(f"phases_ms/{phase}", value, event.step)
        elif isinstance(event, EpochDone):
            self._add_metrics("epoch", {"loss": event.loss, **event.metrics}, event.step)
        elif isinstance(event, Evaluated):
            self._add_metrics(event.split, event.metrics, event.step)
        elif isinstance(event, RunEnded):
            self._writer.close()
            self._writer = None

    def _add_metrics(self, group: str, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)
        self._writer.flush()


def _import_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            f"TensorBoardLog needs the tensorboard package ({error}); pip install 'fulltilt[track]', "
            "or leave TensorBoard out"
        ) from error
    return SummaryWriter
